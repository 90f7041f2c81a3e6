"""What lies on the device between calls: layer states, checkpoints, and what all calls share."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import wgpu

from o1core.config import Geometry
from o1core.layout import state_buffers
from o1core.plan import SubChunk
from o1core_wgpu.device import Gpu
from o1core_wgpu.kernel_set import Launch

__all__ = ["Bound", "BoundSet", "Checkpoint", "Piece", "Step", "WgpuState", "Workspace"]

STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
UNIFORM = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST

# Dynamic offsets are multiples of this on every device.
UNIFORM_STRIDE = 256
UNIFORM_SLOTS = 4096


class Piece(NamedTuple):
    """Consecutive sub-chunks of a plan that are submitted together."""

    first_row: int
    rows: int
    sub_chunks: tuple[SubChunk, ...]


class Bound(NamedTuple):
    """A range of a buffer, as a binding takes it."""

    buffer: wgpu.GPUBuffer
    offset: int
    nbytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        return id(self.buffer), self.offset, self.nbytes


class Step(NamedTuple):
    """One launch of a program: pipeline, workgroups, where its uniform lies."""

    entry_point: str
    workgroups: tuple[int, int, int]
    offset: int


class BoundSet(NamedTuple):
    """The bind groups of all entry points for some buffers, and the buffers."""

    groups: dict[str, wgpu.GPUBindGroup]
    buffers: tuple[wgpu.GPUBuffer, ...]


Stored = Mapping[str, wgpu.GPUBuffer]


@dataclass(eq=False)
class Checkpoint:
    """Copies of the buffers that kernels write; `copied` once a submission has filled them."""

    buffers: Stored
    copied: bool = False


@dataclass(eq=False)
class WgpuState:
    """The handle of one layer: its buffers by name, and the bind groups made with them.

    checkpoint is one that was taken but not filled yet; the next submission does that first.
    """

    gpu: Gpu
    geometry: Geometry
    buffers: Stored
    bind_groups: OrderedDict[Any, BoundSet] = field(default_factory=OrderedDict)
    checkpoint: Checkpoint | None = None


class Workspace:
    """Buffers that the calls of an executor share, each as large as any call needed it so far."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.programs: dict[Any, tuple[Step, ...]] = {}
        self._buffers: dict[str, wgpu.GPUBuffer] = {}
        self._spare: dict[Geometry, list[Stored]] = {}
        self._new_uniforms()

    def buffer(self, name: str, nbytes: int, usage: int) -> wgpu.GPUBuffer:
        """The shared buffer of this name, with room for `nbytes`."""
        found = self._buffers.get(name)
        if found is None or found.size < nbytes:
            found = self._buffers[name] = self.gpu.buffer(nbytes, usage)
        return found

    def absent(self, number: int) -> Bound:
        """In place of a buffer that the geometry lacks; each its own, since they may not alias."""
        return Bound(self.buffer(f"no binding {number}", 16, STORAGE), 0, 16)

    def checkpoint(self, geometry: Geometry) -> Checkpoint:
        """A checkpoint to fill; its buffers are used again once nobody holds it."""
        pool = self._spare.setdefault(geometry, [])
        if pool:
            stored = pool.pop()
        else:
            stored = {
                b.name: self.gpu.buffer(b.nbytes, STORAGE)
                for b in state_buffers(geometry)
                if b.role == "state"
            }
        checkpoint = Checkpoint(stored)
        weakref.finalize(checkpoint, pool.append, stored).atexit = False
        return checkpoint

    def forget(self, name: str) -> None:
        """Drop a shared buffer whose fate is unknown."""
        self._buffers.pop(name, None)

    def _new_uniforms(self) -> None:
        # Never overwritten: an encoder of the host may still be waiting to use the old ones.
        self.uniforms = self.gpu.buffer(UNIFORM_SLOTS * UNIFORM_STRIDE, UNIFORM)
        self._slots: dict[bytes, int] = {}
        self.programs.clear()

    def program(self, key: Any, launches: Sequence[Launch]) -> tuple[Step, ...]:
        """The launches with their uniforms in place, kept under `key`."""
        if len(self._slots.keys() | {launch.uniform for launch in launches}) > UNIFORM_SLOTS:
            self._new_uniforms()
        steps = []
        for entry_point, workgroups, uniform in launches:
            offset = self._slots.get(uniform)
            if offset is None:
                offset = self._slots[uniform] = len(self._slots) * UNIFORM_STRIDE
                self.gpu.device.queue.write_buffer(self.uniforms, offset, uniform)
            steps.append(Step(entry_point, workgroups, offset))
        self.programs[key] = tuple(steps)
        return self.programs[key]
