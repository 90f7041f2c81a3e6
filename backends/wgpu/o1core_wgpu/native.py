"""What wgpu-native can do and wgpu's Python interface does not offer."""

from __future__ import annotations

from typing import Any

import wgpu

__all__ = ["without_checks"]


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
