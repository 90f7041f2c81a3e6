"""The GPU: which adapter, opened once a process and shared, or the host's own device."""

from __future__ import annotations

import ctypes
import operator
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, SupportsIndex

import wgpu
import wgpu.backends.wgpu_native

from o1core.errors import BackendUnavailable
from o1core.process import changed_environment, exit_without_drivers, headless
from o1core_wgpu.kernel_set import MAX_WORKGROUPS, GivenKernels, KernelSet
from o1core_wgpu.native import without_checks

__all__ = ["DeviceLostError", "Gpu", "open_gpu", "software_adapter"]

STORAGE_LIMIT = "max-storage-buffers-per-shader-stage"
STORAGE_BUFFERS = 13
"""What the original's attend binds; o1core's own kernels bind 8."""
TIMESTAMPS = "timestamp-query"
ADAPTER_NAME = "WGPUPY_WGPU_ADAPTER_NAME"
"""wgpu's own variable, by which hosts and CI pick an adapter for every program."""

NO_ADAPTER = (
    "no WebGPU adapter was found: install the driver of the GPU; without a GPU, Debian's and "
    "Ubuntu's mesa-vulkan-drivers runs the kernels on the CPU"
)
FORKED = (
    "this process was forked from one that had used the GPU, and a forked GPU hangs: start workers "
    "with multiprocessing's 'spawn' or 'forkserver', or open the GPU only after the fork"
)
LOST_GIVEN = (
    "the wgpu.GPUDevice given is lost, or was opened before this process was forked: request "
    "another one from its adapter"
)
LOST = (
    "the GPU device is lost, and with it the state of this layer on the device. Go on from a state "
    "kept on the host: restore a snapshot taken with layer.snapshot(durable=True), or "
    "engine.load() a state that layer.state() gave; either opens the device anew"
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
        self.device = device
        self.adopted = adopted
        self.software = _is_software(device.adapter)
        self.name = _name(device.adapter)
        self.limits: Mapping[str, int] = device.limits
        self._pid = os.getpid()
        self._lost = False
        self._lock = threading.Lock()
        self._pipelines: dict[str, dict[str, Pipeline]] = {}

    @property
    def largest_buffer(self) -> int:
        """Bytes that one buffer may have, of the sizes that `buffer` makes."""
        return self.limits["max-buffer-size"] // 16 * 16

    @property
    def largest_binding(self) -> int:
        """Bytes that one binding of a whole buffer may have."""
        return min(self.largest_buffer, self.limits["max-storage-buffer-binding-size"] // 16 * 16)

    def require_process(self) -> None:
        """RuntimeError in a process that was forked from that of the device.

        To be asked before any lock is taken: nobody may be left there to release it.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(FORKED)

    def require_live(self, fault: BaseException | None = None) -> None:
        """RuntimeError in a forked process, DeviceLostError once the device is known to be lost."""
        self.require_process()
        if self._lost or self._destroyed:
            raise DeviceLostError(LOST_ADOPTED if self.adopted else LOST) from fault

    @property
    def _destroyed(self) -> bool:
        """Whether `device.destroy()` was called; the first thing that does is to end its thread."""
        thread = self.device._poller
        return thread is None or thread._shutdown

    def lost_by_now(self) -> bool:
        """Whether the device is lost; asks it, since a lost one finishes no commands."""
        if not self._lost and os.getpid() == self._pid:
            try:
                # Not is_alive(), which an interrupt can make wrong. Without its thread, as in a
                # process forked from that of the host, a device never answers.
                self._lost = self._destroyed or self.device._poller not in threading.enumerate()
                if not self._lost:
                    self.device.create_command_encoder().finish()
            except wgpu.GPUError:
                self._lost = True
        return self._lost

    def missing(self, kernels: KernelSet) -> list[str]:
        """Why this device cannot run the kernels at all."""
        sizes = [entry.workgroup_size for entry in kernels.interface.entry_points.values()]
        needs = {
            STORAGE_LIMIT: kernels.storage_buffers,
            "max-bindings-per-bind-group": max(kernels.interface.bindings) + 1,
            "max-dynamic-uniform-buffers-per-pipeline-layout": 1,
            "max-uniform-buffer-binding-size": kernels.uniform_bytes,
            "max-compute-invocations-per-workgroup": max(map(prod, sizes)),
            "max-compute-workgroups-per-dimension": MAX_WORKGROUPS,
            **{
                f"max-compute-workgroup-size-{axis}": max(extents)
                for axis, extents in zip("xyz", zip(*sizes, strict=True), strict=True)
            },
        }
        fix = "choose another adapter with device="
        if self.adopted:
            fix = "request the device with that limit"
        elif isinstance(kernels, GivenKernels):
            fix += ", or leave wgsl out: o1core's own kernels need less"
        return [
            f"{limit} must be at least {need} ({kernels.label}), got {self.limits[limit]}; {fix}"
            for limit, need in needs.items()
            if self.limits[limit] < need
        ]

    def pipelines(self, kernels: KernelSet) -> dict[str, Pipeline]:
        """The compiled kernels, by entry point; compiled once for all engines."""
        with self._lock:
            found = self._pipelines.get(kernels.sha256)
            if found is None:
                found = self._pipelines[kernels.sha256] = self._compile(kernels)
            return found

    def _compile(self, kernels: KernelSet) -> dict[str, Pipeline]:
        module = self.device.create_shader_module(code=kernels.text, label=kernels.label)
        if kernels.trusted:
            module = without_checks(self.device, kernels.text, kernels.label) or module
        pipelines = {}
        for name, entry in kernels.interface.entry_points.items():
            layout = self.device.create_bind_group_layout(
                entries=[
                    {
                        "binding": number,
                        "visibility": wgpu.ShaderStage.COMPUTE,
                        "buffer": _binding_type(kernels, number),
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

    def submit(self, encoder: wgpu.GPUCommandEncoder) -> None:
        """Submit what was recorded, and with it what was written into buffers before."""
        # Finishing shows a lost device; submitting to one would end the process.
        commands = encoder.finish()
        self.require_live()
        self.device.queue.submit([commands])

    @contextmanager
    def mapped(self, staging: wgpu.GPUBuffer, nbytes: int) -> Iterator[memoryview]:
        """The contents of a staging buffer, once all commands that were submitted are done.

        If this fails the buffer may stay mapped for ever, and must not be used again.
        """
        # Waiting for the commands is part of mapping; plain "READ" would submit once more for it.
        promise = staging.map_async("READ_NOSYNC", 0, nbytes)
        while not promise._thread_event.wait(0.2):
            # A device that its owner destroys in the meantime never answers.
            if self.lost_by_now():
                self.require_live()
        promise.sync_wait()
        # What a destroyed device had mapped is gone: reading it would end the process.
        self.require_live()
        try:
            yield staging.read_mapped(0, nbytes, copy=False)
        finally:
            staging.unmap()
        self.require_live()


def _is_software(adapter: wgpu.GPUAdapter) -> bool:
    kind: str = adapter.info["adapter_type"]
    return kind == "CPU"


def _name(adapter: wgpu.GPUAdapter) -> str:
    info = adapter.info
    kind = "software" if _is_software(adapter) else info["adapter_type"]
    return f"{info['device'] or info['description']} ({kind}, {info['backend_type']})"


def _binding_type(kernels: KernelSet, number: int) -> dict[str, Any]:
    access, size = kernels.interface.bindings[number].access, kernels.uniform_bytes
    if access == "uniform":
        return {"type": "uniform", "has_dynamic_offset": True, "min_binding_size": size}
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
    before OpenGL. An index, in wgpu's order, or a part of a name picks an adapter. A
    `wgpu.GPUDevice` of the host is adopted as it is.

    BackendUnavailable when there is no adapter, when the device given is lost, or when this process
    was forked from one that had used the GPU; ValueError for a name or an index that no adapter
    has; TypeError for anything else.
    """
    _claim()
    with _lock:
        _expect_forks()
        if isinstance(device, wgpu.GPUDevice):
            gpu = _adopted.get(id(device))
            if gpu is None:
                gpu = _adopted[id(device)] = Gpu(device, adopted=True)
            if gpu.lost_by_now():
                raise BackendUnavailable("wgpu", [LOST_GIVEN])
            return gpu
        adapters = _adapters()
        index = _choose(adapters, device)
        gpu = _shared.get(index)
        if gpu is None or gpu.lost_by_now():
            gpu = _shared[index] = Gpu(_request(adapters[index]), adopted=False)
        return gpu


def software_adapter(device: Any = None) -> str:
    """The name of the adapter that `open_gpu` would open if it is a software one, else "".

    Raises as that does.
    """
    if isinstance(device, wgpu.GPUDevice):
        return ""
    _claim()
    with _lock:
        adapters = _adapters()
        adapter = adapters[_choose(adapters, device)]
    return _name(adapter) if _is_software(adapter) else ""


def _claim() -> None:
    """Note that this process uses the GPU, so that one forked from it leaves it alone.

    To be called before the lock is taken, which in a forked process nobody may be left to release.
    """
    if _used_by - {os.getpid()}:
        raise BackendUnavailable("wgpu", [FORKED])
    _used_by.add(os.getpid())


@cache
def _expect_forks() -> None:
    """Have processes that are forked from now on leave the devices of this one alone."""
    if hasattr(os, "register_at_fork"):
        libc = ctypes.CDLL(None)
        os.register_at_fork(after_in_child=lambda: _leave_alone(libc))


def _leave_alone(libc: Any) -> None:
    """In a forked process: release nothing of the parent's devices.

    The threads of the driver are not here, and releasing a device waits for them, as do the
    driver's handlers at exit. Where the C library can, exit therefore ends with Python's part.
    """
    for kind in (wgpu.GPUObjectBase, wgpu.GPUAdapter):
        kind.__del__ = lambda self: None
    exit_without_drivers(libc)


def _request(adapter: wgpu.GPUAdapter) -> wgpu.GPUDevice:
    # Whatever is not named keeps the adapter's own limit: bindings and buffers as large as it has.
    wanted = min(STORAGE_BUFFERS, adapter.limits[STORAGE_LIMIT])
    # Costs nothing until a pass asks for its times, as only `o1core bench` does.
    features = [name for name in (TIMESTAMPS,) if name in adapter.features]
    return adapter.request_device_sync(
        label="o1core", required_features=features, required_limits={STORAGE_LIMIT: wanted}
    )


@cache
def _adapters() -> tuple[wgpu.GPUAdapter, ...]:
    with changed_environment(headless()):
        return tuple(wgpu.gpu.enumerate_adapters_sync())


def _choose(adapters: Sequence[wgpu.GPUAdapter], device: Any) -> int:
    """The index of the adapter that `device` names."""
    there = "; ".join(f"{i}: {a.summary}" for i, a in enumerate(adapters)) or "there is none"
    rule = "device must be None, an adapter's index or a part of its name, or a wgpu.GPUDevice"
    if isinstance(device, bool) or not (device is None or isinstance(device, (str, SupportsIndex))):
        raise TypeError(f"{rule}, got {device!r} (adapters: {there})")
    if not adapters:
        raise BackendUnavailable("wgpu", [NO_ADAPTER])
    order = sorted(range(len(adapters)), key=lambda i: (*_rank(adapters[i]), i))
    if device is None:
        wanted = os.environ.get(ADAPTER_NAME, "")
        for i in order:
            if wanted.casefold() in adapters[i].summary.casefold():
                return i
        fix = f"{ADAPTER_NAME} must be a part of an adapter's name, got {wanted!r} ({there})"
        raise BackendUnavailable("wgpu", [fix])
    if isinstance(device, str):
        for i in order:
            if device and device.casefold() in adapters[i].summary.casefold():
                return i
    elif 0 <= operator.index(device) < len(adapters):
        return operator.index(device)
    raise ValueError(f"{rule}, got {device!r} (adapters: {there})")


def _rank(adapter: wgpu.GPUAdapter) -> tuple[int, bool]:
    kinds = ("DiscreteGPU", "IntegratedGPU", "Unknown", "CPU")
    kind = adapter.info["adapter_type"]
    known = kinds.index(kind) if kind in kinds else kinds.index("Unknown")
    return known, adapter.info["backend_type"].startswith("OpenGL")
