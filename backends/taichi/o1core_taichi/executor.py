"""The Taichi executor: a call as one kernel launch, states as arrays of the language's runtime."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Geometry
from o1core.errors import BackendUnavailable
from o1core.executor import Buffers, DeviceRows, Executor
from o1core.layout import Meta, as_meta, buffers, state_buffers
from o1core.meter import Meter
from o1core.plan import MAX_SCRATCH, STRATEGIES, Plan, Slab
from o1core_taichi.common import (
    FIELDS,
    MAX_LANDMARKS,
    SEALED,
    STAGES,
    STATE,
    TILE,
)
from o1core_taichi.kernels import call_on_cpu, call_on_gpu
from o1core_taichi.language import NAME, ti
from o1core_taichi.launch import launch
from o1core_taichi.meter import TaichiMeter
from o1core_taichi.resident import resident
from o1core_taichi.runtime import (
    ARCHES,
    MAX_ELEMENTS,
    Runtime,
    describe,
    open_runtime,
    why_not_auto,
    would_be,
)

__all__ = ["TaichiExecutor", "TaichiState"]

CPU_SCRATCH = 2**24
"""Bytes on CPUs, which gain nothing from more than their caches hold."""
ARRAY_BUDGET = 2**24
"""Bytes of a host array in one launch, which has a copy of it on the device."""
KEPT_SCRATCH = 4
"""Geometries whose scratch is kept."""

Rows = tuple[F32, F32, F32]


@dataclass(eq=False)
class Moving:
    """What a call changes of a layer's state: meta, and all else in one array.

    shared: other handles have it too, so it must stay what it is.
    """

    meta: Any
    state: Any
    shared: bool = False


@dataclass(eq=False)
class TaichiState:
    """The handle of one layer.

    A call reads `current` and writes another set, which then takes its place; so `kept`, which was
    current when the call began, is still what it was should the call fail. stopped is what `read`
    gives while a call stands between two of its steps.
    """

    runtime: Runtime
    geometry: Geometry
    sealed: Any
    current: Moving
    kept: Moving | None = None
    own: list[Moving] = field(default_factory=list)
    stopped: dict[str, npt.NDArray[Any]] | None = None

    def target(self) -> Moving:
        """A set that the next launch may write."""
        self.own = [moving for moving in self.own if not moving.shared]
        for moving in self.own:
            if moving is not self.current and moving is not self.kept:
                return moving
        self.own.append(_moving(self.runtime, self.geometry))
        return self.own[-1]


@dataclass(eq=False)
class Scratch:
    """What the stages of a call tell each other, with room for so many rows, and the sizes."""

    rows: int
    array: Any
    sizes: Any


class TaichiExecutor(Executor):
    """Runs plans through Taichi, or quadrants, on the arch that `device` names."""

    name = "taichi"
    auto_rank: ClassVar[int] = 10
    strategies = STRATEGIES[::-1]

    def __init__(self, runtime: Runtime, device: Any = None) -> None:
        self.use_strategy(None)
        self._asked = device
        self._staging: list[F32] = []
        self._use(runtime)

    def _use(self, runtime: Runtime) -> None:
        self.device, self.software = runtime.name, runtime.software
        self.detail = "the host's runtime" if runtime.adopted else ""
        self.max_scratch = CPU_SCRATCH if runtime.arch == "cpu" else MAX_SCRATCH
        self._runtime = runtime
        self._scratch: OrderedDict[Geometry, Scratch] = OrderedDict()
        self._notes: dict[int, dict[str, Any]] = {}
        self._reasons: dict[Geometry, list[str]] = {}

    @classmethod
    def open(cls, device: Any = None, *, strategy: str | None = None) -> Self:
        """An executor on an arch: "cuda", "vulkan", "metal", "cpu", `None` for the best there is.

        strategy: "whole-call", which it takes by itself, or "sub-chunk". See
        `o1core_taichi.runtime.open_runtime`, also for what it raises.
        """
        executor = cls(open_runtime(device), device)
        executor.use_strategy(strategy)
        return executor

    @classmethod
    def why_not_auto(cls, device: Any = None) -> str:
        return why_not_auto(device)

    @classmethod
    def probe(cls) -> str:
        return describe()

    @classmethod
    def variants(cls) -> Mapping[str, Mapping[str, Any]]:
        return {
            f"{cls.name}-{arch}{suffix}": {"device": arch, **options}
            for arch in ARCHES
            for suffix, options in (("", {}), ("-sub-chunk", {"strategy": "sub-chunk"}))
        }

    @property
    def on_cpu(self) -> bool:
        return self._runtime.arch == "cpu"

    def unsupported(self, plan: Plan) -> list[str]:
        if self._runtime.gone:
            # What is asked for will run on the one that comes next.
            try:
                return self._why_not(plan.geometry, would_be(self._asked))
            except BackendUnavailable as fault:
                return list(fault.reasons)
        # Calls are run in parts where they must be, so the sizes decide.
        reasons = self._reasons.get(plan.geometry)
        if reasons is None:
            if len(self._reasons) > 256:
                self._reasons.clear()
            reasons = self._why_not(plan.geometry, self._runtime.arch)
            self._reasons[plan.geometry] = reasons
        return list(reasons)

    def _why_not(self, g: Geometry, arch: str) -> list[str]:
        reasons, on_cpu = [], arch == "cpu"
        if not on_cpu and g.landmarks > MAX_LANDMARKS:
            reasons.append(
                f"landmarks must be at most {MAX_LANDMARKS} ({NAME} on {arch}), got {g.landmarks}"
            )
        sizes = {b.name: b.nbytes // 4 for b in buffers(g, TILE) if b.role in ("input", "output")}
        sizes |= {
            "state": _total(_shapes(g, STATE)),
            "sealed state": _total(_shapes(g, SEALED)),
            "scratch": _total(_scratch_shapes(g, TILE, on_cpu)),
        }
        reasons += [
            f"{name} must have at most {MAX_ELEMENTS:,} elements ({NAME}), got {size:,}"
            for name, size in sizes.items()
            if size > MAX_ELEMENTS
        ]
        return reasons

    def meter(self) -> Meter:
        return TaichiMeter(self._runtime)

    # State ----------------------------------------------------------------------------------------

    def allocate(self, geometry: Geometry) -> TaichiState:
        if self._runtime.gone:
            self._use(open_runtime(self._asked))
        runtime = self._runtime
        with runtime.using():
            moving = _moving(runtime, geometry)
            sealed = runtime.array(ti.f32, _total(_shapes(geometry, SEALED)))
            return TaichiState(runtime, geometry, sealed, moving, own=[moving])

    def write(self, handle: TaichiState, buffers: Buffers) -> None:
        g = handle.geometry
        with handle.runtime.using():
            if any(b.name not in buffers for b in state_buffers(g)):
                buffers = {**self.read(handle), **buffers}
            moving = handle.target()
            moving.meta.from_numpy(np.array(buffers["meta"]))
            moving.state.from_numpy(_joined(buffers, _shapes(g, STATE)))
            sealed = handle.runtime.array(ti.f32, handle.sealed.shape)
            sealed.from_numpy(_joined(buffers, _shapes(g, SEALED)))
            handle.sealed, handle.current, handle.stopped = sealed, moving, None

    def read(self, handle: TaichiState) -> dict[str, npt.NDArray[Any]]:
        if handle.stopped is not None:
            return {name: array.copy() for name, array in handle.stopped.items()}
        with handle.runtime.using():
            parts = _moved(handle.geometry, handle.current)
            parts |= _apart(handle.sealed.to_numpy(), _shapes(handle.geometry, SEALED))
        table = state_buffers(handle.geometry)
        return {b.name: parts[b.name].reshape(b.shape or ()) for b in table}

    def meta(self, handle: TaichiState) -> Meta:
        with handle.runtime.using():
            return as_meta(handle.current.meta.to_numpy())

    def copy(self, handle: TaichiState, geometry: Geometry) -> TaichiState:
        # Nothing is copied: no launch writes what is current, and what is shared nobody writes.
        with handle.runtime.using():
            handle.current.shared = True
            return TaichiState(handle.runtime, geometry, handle.sealed, handle.current)

    def checkpoint(self, handle: TaichiState, plans: Sequence[Plan]) -> Moving:
        del plans
        with handle.runtime.using():
            handle.kept = handle.current
            return handle.current

    def rollback(self, handle: TaichiState, checkpoint: Moving) -> None:
        handle.current, handle.stopped = checkpoint, None

    def close(self) -> None:
        """Release what calls share; the runtime stays, for other engines and for the host."""
        self._scratch.clear()
        self._notes.clear()

    # Running --------------------------------------------------------------------------------------

    def run(self, plan: Plan, handle: TaichiState, q: F32, k: F32, v: F32, out: F32) -> Meta:
        g = plan.geometry
        widest = 4 * max(g.heads, g.groups) * max(g.head_dim, g.value_dim)
        most = max(TILE, ARRAY_BUDGET // widest // TILE * TILE)
        held = np.empty((g.groups, 4), np.uint32)
        with handle.runtime.using():
            # In a launch of its own each, with arrays of its own: a launch may spoil what it does
            # not write of an array of the host.
            for first, rows_of_slab in plan.slabs:
                for at in range(first, first + rows_of_slab, most):
                    part = slice(at, min(at + most, first + rows_of_slab))
                    rows = q[part], k[part], v[part]
                    slabs = (Slab(0, len(rows[0])),)
                    if handle.runtime.copies:
                        self._launch_between_copies(handle, slabs, rows, out[part], held)
                    else:
                        staged = rows if self.on_cpu else self._staged(rows)
                        self.launch(handle, slabs, staged, out[part], held)
            ti.sync()
        return as_meta(held)

    def _launch_between_copies(
        self,
        handle: TaichiState,
        slabs: Sequence[Slab],
        rows: Rows,
        out: F32,
        held: npt.NDArray[np.uint32],
    ) -> None:
        runtime = handle.runtime
        q, k, v = (runtime.upload(x, ti.f32) for x in rows)
        on_device = runtime.array(ti.f32, out.shape), runtime.array(ti.u32, held.shape)
        self.launch(handle, slabs, (q, k, v), *on_device)
        for array, to in zip(on_device, (out, held), strict=True):
            runtime.download(array, to)

    def _staged(self, rows: Rows) -> Rows:
        """Copies of the caller's arrays, to be overwritten by the next.

        The language copies an array of the host to the device and back, also one that no kernel
        writes; the caller's may be read only, or shared with other threads.
        """
        copies = []
        for i, array in enumerate(rows):
            if len(self._staging) <= i or self._staging[i].size < array.size:
                self._staging[i : i + 1] = [np.empty(array.size, np.float32)]
            copy = self._staging[i][: array.size].reshape(array.shape)
            np.copyto(copy, array)
            copies.append(copy)
        return copies[0], copies[1], copies[2]

    def steps(
        self, plan: Plan, handle: TaichiState, q: F32, k: F32, v: F32, out: F32
    ) -> Iterator[tuple[str, ...]] | None:
        if len(plan.slabs) != 1:
            return None  # every slab runs all stages
        return self._steps(plan, handle, (q, k, v), out)

    def _steps(
        self, plan: Plan, handle: TaichiState, rows: Rows, out: F32
    ) -> Iterator[tuple[str, ...]]:
        g, runtime = handle.geometry, handle.runtime
        writes = {dispatch.kernel: dispatch.writes for dispatch in plan.dispatches}
        call = call_on_cpu if self.on_cpu else call_on_gpu
        with runtime.using():
            now, then = handle.current, _moving(runtime, g)
            room = -(-plan.rows // TILE) * TILE
            shapes = _scratch_shapes(g, room, self.on_cpu)
            scratch = runtime.array(ti.f32, _total(shapes))
            held = runtime.array(ti.u32, (g.groups, 4))
            qkv: tuple[Any, ...] = rows
            result: Any = out
            if not self.on_cpu:
                # A launch may spoil what it does not write of an array of the host.
                qkv = tuple(_on_device(runtime, x) for x in rows)
                result = runtime.array(ti.f32, out.shape)
        shown = handle.stopped = self.read(handle)
        try:
            mask = 0
            for stage, kernel in enumerate(STAGES):
                mask |= 1 << stage
                if kernel not in writes:
                    continue  # the next one needs it
                with runtime.using():
                    sizes = runtime.array(ti.i32, len(FIELDS))
                    sizes.from_numpy(_sizes(g, room, shapes, mask))
                    mask = 0
                    moving = now.meta, now.state, handle.sealed, then.meta, then.state
                    call(0, plan.rows, sizes, *moving, scratch, *qkv, result, held)
                    ti.sync()
                    if kernel == "attend" and result is not out:
                        out[...] = result.to_numpy()
                    after = _moved(g, then)
                for name in set(writes[kernel]) & after.keys():
                    shown[name] = after[name].reshape(shown[name].shape)
                yield (kernel,)
            handle.current = then
        finally:
            # Unless the call was undone, and the handle has gone on, before this was closed.
            if handle.stopped is shown:
                handle.stopped = None

    def device_rows(self, values: Mapping[str, Any]) -> DeviceRows | None:
        return resident(self, self._runtime, values)

    def launch(
        self,
        handle: TaichiState,
        slabs: Sequence[Slab],
        qkv: tuple[Any, Any, Any],
        out: Any,
        held: Any,
    ) -> None:
        """Run the slabs of a plan, or of a part of one.

        Arrays of the host, of the language or of torch; held `[G, 4]` gets the meta.
        """
        g = handle.geometry
        call = call_on_cpu if self.on_cpu else call_on_gpu
        for first, count in slabs:
            scratch, now, then = self._scratch_for(g, count), handle.current, handle.target()
            moving = now.meta, now.state, handle.sealed, then.meta, then.state
            arrays = scratch.sizes, *moving, scratch.array, *qkv, out, held
            launch(self._runtime, call, (first, count), arrays)
            handle.current = then

    def notes_for(self, groups: int) -> dict[str, Any]:
        """Arrays for what a call on the device's own arrays tells: meta, and faults found."""
        found = self._notes.get(groups)
        if found is None:
            found = self._notes[groups] = {
                "held": self._runtime.array(ti.u32, (groups, 4)),
                "found": self._runtime.array(ti.i32, (4,)),
            }
        return found

    def _scratch_for(self, g: Geometry, rows: int) -> Scratch:
        found = self._scratch.get(g)
        if found is None or found.rows < rows:
            self._scratch.pop(g, None)
            room = -(-rows // TILE) * TILE
            shapes = _scratch_shapes(g, room, self.on_cpu)
            sizes = self._runtime.array(ti.i32, len(FIELDS))
            sizes.from_numpy(_sizes(g, room, shapes))
            array = self._runtime.array(ti.f32, _total(shapes))
            found = self._scratch[g] = Scratch(room, array, sizes)
            while len(self._scratch) > KEPT_SCRATCH:
                self._scratch.popitem(last=False)
        self._scratch.move_to_end(g)
        return found


def _moving(runtime: Runtime, g: Geometry) -> Moving:
    state = runtime.array(ti.f32, _total(_shapes(g, STATE)))
    return Moving(runtime.array(ti.u32, (g.groups, 4)), state)


def _moved(g: Geometry, moving: Moving) -> dict[str, npt.NDArray[Any]]:
    """The buffers that a call changes, flat, on the host."""
    return {"meta": moving.meta.to_numpy(), **_apart(moving.state.to_numpy(), _shapes(g, STATE))}


def _on_device(runtime: Runtime, rows: F32) -> Any:
    array = runtime.array(ti.f32, rows.shape)
    array.from_numpy(np.array(rows))  # it writes what it reads
    return array


Shapes = Mapping[str, tuple[int, ...]]


@lru_cache(maxsize=128)
def _shapes(g: Geometry, names: tuple[str, ...]) -> Shapes:
    """Of some buffers of the state; what a layer lacks has no elements."""
    shapes = {b.name: b.shape or () for b in state_buffers(g)}
    return {name: shapes.get(name, (0,)) for name in names}


def _scratch_shapes(g: Geometry, rows: int, on_cpu: bool) -> Shapes:
    """Of the parts of scratch in a call of so many rows; see `o1core_taichi.common`."""
    landmark_rows, blocks = g.heads * g.landmarks, -(-rows // TILE)
    rows = blocks * TILE
    near = g.sinks + g.ring + rows
    return {
        "far_logits": (landmark_rows, rows),
        "far_peaks": (landmark_rows, rows),
        "far_weights": (landmark_rows, rows),
        "block_mass": (blocks, landmark_rows),
        "running_max": (blocks, landmark_rows),
        "running_mass": (blocks, landmark_rows),
        "numerators": (blocks, landmark_rows, g.value_dim),
        "weights": (g.heads * rows, g.landmarks + g.sinks + g.ring + TILE),
        "shares": (g.heads * rows,),
        "keys": (0,) if on_cpu else (g.groups, g.landmarks + near, g.head_dim),
        "values": (0,) if on_cpu else (g.groups, near, g.value_dim),
        # On GPUs this is in workgroup memory.
        "landmark_store": (g.heads * rows, 3, g.landmarks) if on_cpu else (0,),
    }


def _total(shapes: Shapes) -> int:
    """Elements of an array with these parts; none is empty."""
    return max(1, sum(map(math.prod, shapes.values())))


def _sizes(
    g: Geometry, room: int, scratch: Shapes, stages: int = (1 << len(STAGES)) - 1
) -> npt.NDArray[np.int32]:
    """What kernels know of a geometry, and which stages they run: the fields of `FIELDS`."""
    values: dict[str, int] = {
        "groups": g.groups,
        "heads": g.heads_per_group,
        "landmarks": g.landmarks,
        "sinks": g.sinks,
        "ring": g.ring,
        "head_dim": g.head_dim,
        "value_dim": g.value_dim,
        "clamps": int(g.rectifier == "fm"),
        "room": room,
        "stages": stages,
        "scale": int(np.float32(g.scale).view(np.int32)),
    }
    for shapes in (_shapes(g, STATE), _shapes(g, SEALED), scratch):
        at = 0
        for name, shape in shapes.items():
            values[name] = at
            at += math.prod(shape)
    return np.array([values[name] for name in FIELDS], np.int32)


def _joined(buffers: Buffers, shapes: Shapes) -> F32:
    """The buffers one after the other, in one array that has at least one element."""
    parts = [buffers[name].reshape(-1) for name in shapes if name in buffers]
    array: F32 = np.concatenate(parts) if parts else np.empty(0, np.float32)
    return array if array.size else np.zeros(1, np.float32)


def _apart(array: F32, shapes: Shapes) -> dict[str, F32]:
    """The inverse of `_joined`."""
    parts, at = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        parts[name] = array[at : at + size]
        at += size
    return parts
