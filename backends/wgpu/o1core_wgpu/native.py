"""What wgpu-native can do and wgpu's Python interface does not offer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import wgpu

__all__ = ["Launched", "record", "without_checks"]


class Launched(NamedTuple):
    """One launch: a pipeline, its bind group with the offset of its uniform, the workgroups."""

    pipeline: wgpu.GPUComputePipeline
    group: wgpu.GPUBindGroup
    offset: int
    workgroups: tuple[int, int, int]


def _commands() -> tuple[Any, Any, Any] | None:
    """wgpu-native's functions for pipeline, bind group and launch of a compute pass."""
    try:
        from wgpu.backends.wgpu_native import lib

        return (
            lib.wgpuComputePassEncoderSetPipeline,
            lib.wgpuComputePassEncoderSetBindGroup,
            lib.wgpuComputePassEncoderDispatchWorkgroups,
        )
    except (ImportError, AttributeError):
        return None


COMMANDS = _commands()


def record(compute: wgpu.GPUComputePassEncoder, launches: Iterable[Launched]) -> None:
    """Record launches into a pass; wgpu.GPUError, before any of them, when it is not open.

    wgpu asks for an error after each command, which costs several times the command. Here it does
    so for the first launch; what else could be wrong is reported when the encoder is finished.
    """
    pending = iter(launches)
    first = next(pending, None)
    if first is None:
        return
    _record_checked(compute, first)
    if COMMANDS is None:
        for launched in pending:
            _record_checked(compute, launched)
        return
    set_pipeline, set_bind_group, dispatch = COMMANDS
    inner = compute._internal
    for pipeline, group, offset, workgroups in pending:
        set_pipeline(inner, pipeline._internal)
        set_bind_group(inner, 0, group._internal, 1, _offsets(offset))
        dispatch(inner, *workgroups)


def _record_checked(compute: wgpu.GPUComputePassEncoder, launched: Launched) -> None:
    compute.set_pipeline(launched.pipeline)
    compute.set_bind_group(0, launched.group, [launched.offset])
    compute.dispatch_workgroups(*launched.workgroups)


@lru_cache(maxsize=4096)
def _offsets(offset: int) -> Any:
    from wgpu.backends.wgpu_native import ffi

    return ffi.new("uint32_t[]", [offset])


def without_checks(device: wgpu.GPUDevice, code: str, label: str) -> wgpu.GPUShaderModule | None:
    """A module without bounds checks and guards against endless loops; None if that is not offered.

    For WGSL that is known to compile and to stay within its buffers: nobody would be told.
    """
    try:
        from wgpu.backends.wgpu_native import _api, ffi, lib

        create = lib.wgpuDeviceCreateShaderModuleTrusted
    except (ImportError, AttributeError):
        return None
    text, name = code.encode(), label.encode()
    source = ffi.new("WGPUShaderSourceWGSL *")
    source.chain.sType = lib.WGPUSType_ShaderSourceWGSL
    descriptor = ffi.new("WGPUShaderModuleDescriptor *")
    descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
    kept: list[Any] = []
    for view, content in ((source.code, text), (descriptor.label, name)):
        kept.append(ffi.from_buffer(content))
        view.data, view.length = ffi.cast("char *", kept[-1]), len(content)
    found = create(device._internal, descriptor, 0)
    return _api.GPUShaderModule(label, found, device)
