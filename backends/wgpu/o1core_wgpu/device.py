"""The GPU: which adapter, opened once a process and shared, or the host's own device."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import wgpu
import wgpu.backends.wgpu_native

from o1core.errors import BackendUnavailable
from o1core_wgpu.kernel_set import KernelSet

__all__ = ["DeviceLostError", "Gpu", "open_gpu"]

STORAGE_LIMIT = "max-storage-buffers-per-shader-stage"
STORAGE_BUFFERS = 13
"""What the original's attend binds; o1core's own kernels bind 7."""
UNIFORM_BYTES = 48

NO_ADAPTER = (
    "no WebGPU adapter was found: install the driver of the GPU; without a GPU, Debian's and "
    "Ubuntu's mesa-vulkan-drivers runs the kernels on the CPU"
)
FORKED = (
    "this process was forked from one that had used the GPU, and a forked GPU hangs: start workers "
    "with multiprocessing's 'spawn' or 'forkserver', or open the GPU only after the fork"
)


LOST = (
    "the GPU device is lost, and with it the state of this layer on the device. Go on from a state "
    "kept on the host: restore a snapshot taken with layer.snapshot(durable=True), or engine.load() "
    "a state that layer.state() gave; either opens the device anew"
)
LOST_ADOPTED = (
    "the GPU device that this engine was given is lost, and with it the state of this layer. Go on "
    "on another one: o1core.O1Batch('wgpu', device=...).load() of what layer.state() gave, or of "
    "snapshot.state of a snapshot taken with layer.snapshot(durable=True)"
)


class DeviceLostError(RuntimeError):
    """The device is gone, and what was stored on it too."""


@dataclass(frozen=True)
class Pipeline:
    """An entry point, compiled, and the layout of what it binds."""

    compute: wgpu.GPUComputePipeline
    layout: wgpu.GPUBindGroupLayout
    bindings: tuple[int, ...]


class Gpu:
    """An open device and what the engines on it share: the compiled kernels."""

    def __init__(self, device: wgpu.GPUDevice, *, adopted: bool) -> None:
        info = device.adapter.info
        self.device = device
        self.adopted = adopted
        self.software = info["adapter_type"] == "CPU"
        kind = "software" if self.software else info["adapter_type"]
        self.name = f"{info['device'] or info['description']} ({kind}, {info['backend_type']})"
        self.limits: Mapping[str, int] = device.limits
        self._pid = os.getpid()
        self._lost = False
        self._lock = threading.Lock()
        self._pipelines: dict[str, dict[str, Pipeline]] = {}

    @property
    def largest_binding(self) -> int:
        """Bytes that one binding may have."""
        return min(self.limits["max-storage-buffer-binding-size"], self.limits["max-buffer-size"])

    def require_live(self, fault: BaseException | None = None) -> None:
        """RuntimeError in a forked process, DeviceLostError once the device is known to be lost."""
        if os.getpid() != self._pid:
            raise RuntimeError(FORKED)
        if self._lost:
            raise DeviceLostError(LOST_ADOPTED if self.adopted else LOST) from fault

    def lost_by_now(self) -> bool:
        """Whether the device is lost; asks it, since a lost one finishes no commands."""
        if not self._lost and os.getpid() == self._pid:
            try:
                self.device.create_command_encoder().finish()
            except wgpu.GPUError:
                self._lost = True
        return self._lost

    def missing(self, kernels: KernelSet) -> list[str]:
        """Why this device cannot run the kernels at all."""
        have, need = self.limits[STORAGE_LIMIT], kernels.storage_buffers
        if have >= need:
            return []
        fix = (
            "request it with that limit" if self.adopted else "leave wgsl out: o1core's need fewer"
        )
        return [f"{STORAGE_LIMIT} must be at least {need} ({kernels.label}), got {have}; {fix}"]

    def pipelines(self, kernels: KernelSet) -> dict[str, Pipeline]:
        """The compiled kernels, by entry point; compiled once for all engines."""
        with self._lock:
            found = self._pipelines.get(kernels.sha256)
            if found is None:
                found = self._pipelines[kernels.sha256] = self._compile(kernels)
            return found

    def _compile(self, kernels: KernelSet) -> dict[str, Pipeline]:
        module = self.device.create_shader_module(code=kernels.text, label=kernels.label)
        pipelines = {}
        for name, entry in kernels.interface.entry_points.items():
            layout = self.device.create_bind_group_layout(
                entries=[
                    {
                        "binding": number,
                        "visibility": wgpu.ShaderStage.COMPUTE,
                        "buffer": _binding_type(kernels.interface.bindings[number].access),
                    }
                    for number in entry.bindings
                ]
            )
            compute = self.device.create_compute_pipeline(
                label=name,
                layout=self.device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={"module": module, "entry_point": name},
            )
            pipelines[name] = Pipeline(compute, layout, entry.bindings)
        return pipelines

    def buffer(self, nbytes: int, usage: int) -> wgpu.GPUBuffer:
        """A new buffer of zeros; none is empty, since bindings must not be."""
        try:
            return self.device.create_buffer(size=max(16, nbytes + -nbytes % 16), usage=usage)
        except wgpu.GPUOutOfMemoryError as fault:
            raise MemoryError(f"{self.name} has no room for {nbytes:,} bytes: {fault}") from fault

    @contextmanager
    def mapped(self, staging: wgpu.GPUBuffer, nbytes: int) -> Iterator[memoryview]:
        """The contents of a staging buffer, once all commands that were submitted are done.

        If this fails the buffer may stay mapped for ever, and must not be used again.
        """
        # Waiting for the commands is part of mapping; plain "READ" would submit once more for it.
        promise = staging.map_async("READ_NOSYNC", 0, nbytes)
        while not promise._thread_event.wait(1.0):
            # A device that its owner destroys in the meantime never answers.
            if self.lost_by_now():
                self.require_live()
        promise.sync_wait()
        try:
            yield staging.read_mapped(0, nbytes, copy=False)
        finally:
            staging.unmap()


def _binding_type(access: str) -> dict[str, Any]:
    if access == "uniform":
        return {"type": "uniform", "has_dynamic_offset": True, "min_binding_size": UNIFORM_BYTES}
    return {"type": "storage" if access == "read_write" else "read-only-storage"}


# Choosing -----------------------------------------------------------------------------------------

_lock = threading.Lock()
_shared: dict[int, Gpu] = {}
# By the id of the host's device, which lives as long as its Gpu does.
_adopted: weakref.WeakValueDictionary[int, Gpu] = weakref.WeakValueDictionary()
_used_by: set[int] = set()


def open_gpu(device: Any = None) -> Gpu:
    """The GPU that `device` names; each is opened once a process and shared by all engines.

    None takes the best adapter: discrete, integrated, virtual, then software; native interfaces
    before OpenGL. An index or a part of a name picks one of `adapters()`. A `wgpu.GPUDevice` of the
    host is adopted as it is.

    BackendUnavailable when there is no adapter or this process was forked from one that had used
    the GPU; ValueError for a name or an index that no adapter has; TypeError for anything else.
    """
    if isinstance(device, bool) or not (
        device is None or isinstance(device, (int, str, wgpu.GPUDevice))
    ):
        raise TypeError(
            "device must be None, an adapter's index or a part of its name, or a wgpu.GPUDevice, "
            f"got {device!r}"
        )
    with _lock:
        if _used_by - {os.getpid()}:
            raise BackendUnavailable("wgpu", [FORKED])
        if isinstance(device, wgpu.GPUDevice):
            _used_by.add(os.getpid())
            gpu = _adopted.get(id(device))
            if gpu is None:
                gpu = _adopted[id(device)] = Gpu(device, adopted=True)
            return gpu
        adapters = _adapters()
        index = _choose(adapters, device)
        gpu = _shared.get(index)
        if gpu is None or gpu.lost_by_now():
            gpu = _shared[index] = Gpu(_request(adapters[index]), adopted=False)
        return gpu


def _request(adapter: wgpu.GPUAdapter) -> wgpu.GPUDevice:
    # Whatever is not named keeps the adapter's own limit: bindings and buffers as large as it has.
    wanted = min(STORAGE_BUFFERS, adapter.limits[STORAGE_LIMIT])
    return adapter.request_device_sync(label="o1core", required_limits={STORAGE_LIMIT: wanted})


@cache
def _adapters() -> tuple[wgpu.GPUAdapter, ...]:
    with _quiet_enumeration():
        _used_by.add(os.getpid())
        return tuple(wgpu.gpu.enumerate_adapters_sync())


@contextmanager
def _quiet_enumeration() -> Iterator[None]:
    """Keep EGL from writing to stderr that a headless session has no runtime directory."""
    name = "XDG_RUNTIME_DIR"
    if sys.platform != "linux" or name in os.environ:
        yield
        return
    os.environ[name] = tempfile.gettempdir()
    try:
        yield
    finally:
        del os.environ[name]


def _choose(adapters: Sequence[wgpu.GPUAdapter], device: int | str | None) -> int:
    if not adapters:
        raise BackendUnavailable("wgpu", [NO_ADAPTER])
    if device is None:
        # wgpu's own variable, by which hosts and CI pick an adapter for every program.
        device = os.environ.get("WGPUPY_WGPU_ADAPTER_NAME") or None
    order = sorted(range(len(adapters)), key=lambda i: (*_rank(adapters[i]), i))
    if device is None:
        return order[0]
    if isinstance(device, int):
        if 0 <= device < len(adapters):
            return device
    else:
        for i in order:
            if device.casefold() in adapters[i].summary.casefold():
                return i
    there = "; ".join(f"{i}: {a.summary}" for i, a in enumerate(adapters))
    raise ValueError(
        f"device must be an adapter's index or a part of its name, got {device!r} ({there})"
    )


def _rank(adapter: wgpu.GPUAdapter) -> tuple[int, bool]:
    kinds = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")
    kind = adapter.info["adapter_type"]
    known = kinds.index(kind) if kind in kinds else kinds.index("Unknown")
    return known, adapter.info["backend_type"].startswith("OpenGL")
