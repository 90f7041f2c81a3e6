"""What lies on the device between calls: layer states, checkpoints, and what all calls share."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import wgpu

from o1core.config import Geometry
from o1core.layout import Meta, state_buffers
from o1core.plan import Slab
from o1core_wgpu.device import Gpu
from o1core_wgpu.kernel_set import Launch

__all__ = ["Bound", "BoundSet", "Checkpoint", "Piece", "Step", "WgpuState", "Workspace"]

STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
STAGING = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
UNIFORM = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST

# Dynamic offsets are multiples of this on every device.
UNIFORM_STRIDE = 256
UNIFORM_SLOTS = 4096
KEPT_STEPS = 2**16
"""Steps of programs that are kept; a program of many slabs costs little beside its call."""


class Piece(NamedTuple):
    """Consecutive slabs of a plan that are submitted together."""

    first_row: int
    rows: int
    slabs: tuple[Slab, ...]


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
    """The bind groups of all entry points for some buffers, while these buffers are there."""

    groups: dict[str, wgpu.GPUBindGroup]
    watched: tuple[weakref.ref[wgpu.GPUBuffer], ...]


Stored = Mapping[str, wgpu.GPUBuffer]


@dataclass(eq=False)
class Checkpoint:
    """Copies of the buffers that kernels write, and the meta at the time.

    filled: a submission has filled them; None while it is on its way, when an interrupt may come
    before it or after it.
    """

    buffers: Stored
    meta: Meta
    filled: bool | None = False


@dataclass(eq=False)
class WgpuState:
    """The handle of one layer: its buffers by name, and the bind groups made with them.

    meta is what the buffer of that name holds once all that was recorded has run. checkpoint is one
    that was taken but not filled yet; the next submission does that first. undo is one to go back
    to before anything else.
    """

    gpu: Gpu
    geometry: Geometry
    buffers: Stored
    meta: Meta = ()
    bind_groups: OrderedDict[Any, BoundSet] = field(default_factory=OrderedDict)
    checkpoint: Checkpoint | None = None
    undo: Checkpoint | None = None

    def keep(
        self, key: Any, groups: dict[str, wgpu.GPUBindGroup], others: set[wgpu.GPUBuffer]
    ) -> None:
        """Keep bind groups until one of the other buffers, which are not the layer's, is gone.

        Its id, in the key, can then come to be that of another one; and the caller may count on its
        memory.
        """
        owner = weakref.ref(self)

        def forget(_: Any) -> None:
            state = owner()
            if state is not None:
                state.bind_groups.pop(key, None)

        watched = tuple(weakref.ref(buffer, forget) for buffer in others)
        self.bind_groups[key] = BoundSet(groups, watched)


class Workspace:
    """Buffers that the calls of an executor share, each as large as any call needed it so far."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._buffers: dict[str, wgpu.GPUBuffer] = {}
        self._spare: list[Stored] = []
        self._new_uniforms(0)

    def buffer(self, name: str, nbytes: int, usage: int) -> wgpu.GPUBuffer:
        """The shared buffer of this name, with room for `nbytes`."""
        found = self._buffers.get(name)
        if found is None or found.size < nbytes:
            found = self._buffers[name] = self.gpu.buffer(nbytes, usage)
        return found

    def absent(self, number: int) -> Bound:
        """In place of a buffer that the geometry lacks; each its own, since they may not alias."""
        return Bound(self.buffer(f"no binding {number}", 16, STORAGE), 0, 16)

    def checkpoint(self, geometry: Geometry, meta: Meta) -> Checkpoint:
        """A checkpoint to fill; its buffers are used again once nobody holds it."""
        stored = dict(self._spare.pop()) if self._spare else {}
        for b in state_buffers(geometry):
            # Layers of other sizes take turns with them, so only growth makes new ones.
            if b.role == "state" and (b.name not in stored or stored[b.name].size < b.nbytes):
                stored[b.name] = self.gpu.buffer(b.nbytes, STORAGE)
        checkpoint = Checkpoint(stored, meta)
        weakref.finalize(checkpoint, self._spare.append, stored).atexit = False
        return checkpoint

    def forget(self, name: str) -> None:
        """Drop a shared buffer whose fate is unknown."""
        self._buffers.pop(name, None)

    def clear(self) -> None:
        """Drop all buffers but the uniforms; what is needed again is made again."""
        self._buffers.clear()
        self._spare.clear()

    def _new_uniforms(self, slots: int) -> None:
        # Never overwritten: an encoder of the host may still be waiting to use the old ones.
        slots = max(slots, min(UNIFORM_SLOTS, self.gpu.largest_buffer // UNIFORM_STRIDE))
        uniforms = self.gpu.buffer(slots * UNIFORM_STRIDE, UNIFORM)
        self._slots: dict[bytes, int] = {}
        self.programs: dict[Any, tuple[Step, ...]] = {}
        self._steps = 0
        self.uniforms = uniforms

    def program(self, key: Any, launches: Sequence[Launch]) -> tuple[Step, ...]:
        """The launches with their uniforms in place, kept under `key`."""
        distinct = {launch.uniform for launch in launches}
        if len(self._slots.keys() | distinct) > self.uniforms.size // UNIFORM_STRIDE:
            self._new_uniforms(len(distinct))
        steps = []
        for entry_point, workgroups, uniform in launches:
            offset = self._slots.get(uniform)
            if offset is None:
                offset = len(self._slots) * UNIFORM_STRIDE
                self.gpu.device.queue.write_buffer(self.uniforms, offset, uniform)
                self._slots[uniform] = offset
            steps.append(Step(entry_point, workgroups, offset))
        self._steps += len(steps)
        if self._steps > KEPT_STEPS:
            self.programs.clear()
            self._steps = len(steps)
        self.programs[key] = tuple(steps)
        return self.programs[key]
