"""Executors around an executor: one with hostile memory, and the base of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Geometry
from o1core.executor import Buffers, DeviceRows, Executor
from o1core.layout import GroupMeta, Meta
from o1core.plan import Plan

__all__ = ["Around", "Hostile", "cleared", "unused_slots"]


class Around(Executor):
    """Does what another executor does; subclasses do some of it differently."""

    name = "around"

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]  # of the class in others, for their entry point
        self.software, self.device, self.detail = inner.software, inner.device, inner.detail

    @classmethod
    def open(cls, device: Any = None) -> Self:
        raise TypeError(f"{cls.__name__} is made from an executor, not opened on {device!r}")

    def plan(self, geometry: Geometry, rows: int) -> Plan:
        return self.inner.plan(geometry, rows)

    def unsupported(self, plan: Plan) -> list[str]:
        return self.inner.unsupported(plan)

    def allocate(self, geometry: Geometry) -> Any:
        return self.inner.allocate(geometry)

    def write(self, handle: Any, buffers: Buffers) -> None:
        self.inner.write(handle, buffers)

    def read(self, handle: Any) -> dict[str, npt.NDArray[Any]]:
        return self.inner.read(handle)

    def run(self, plan: Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
        return self.inner.run(plan, handle, q, k, v, out)

    def steps(
        self, plan: Plan, handle: Any, q: F32, k: F32, v: F32, out: F32
    ) -> Iterator[tuple[str, ...]] | None:
        return self.inner.steps(plan, handle, q, k, v, out)

    def check_encode(self, geometry: Geometry, rows: int, *arguments: Any) -> None:
        self.inner.check_encode(geometry, rows, *arguments)

    def encode(self, plan: Plan, handle: Any, *arguments: Any) -> None:
        self.inner.encode(plan, handle, *arguments)

    def device_rows(self, values: Mapping[str, Any]) -> DeviceRows | None:
        return self.inner.device_rows(values)

    def meta(self, handle: Any) -> Meta:
        return self.inner.meta(handle)

    def close(self) -> None:
        self.inner.close()

    def copy(self, handle: Any, geometry: Geometry) -> Any:
        return self.inner.copy(handle, geometry)

    def checkpoint(self, handle: Any, plans: Sequence[Plan]) -> Any:
        return self.inner.checkpoint(handle, plans)

    def rollback(self, handle: Any, checkpoint: Any) -> None:
        self.inner.rollback(handle, checkpoint)


class Hostile(Around):
    """Another executor, given memory as unfriendly as its contract allows.

    Ring slots that hold no key are NaN, those past a narrower window too; rows are read-only, lie
    amid NaN, and are NaN themselves once the call is over; the output begins as NaN, and what lies
    around it must stay what it is, and it itself after the call.
    """

    MARGIN = 4096
    """Numbers before and after an array of rows: more than any tile reaches."""

    def __init__(self, inner: Executor) -> None:
        super().__init__(inner)
        self._given: tuple[F32, F32] | None = None

    def write(self, handle: Any, buffers: Buffers) -> None:
        if "meta" in buffers:
            poisoned = {n: np.array(buffers[n]) for n in ("ring_k", "ring_v") if n in buffers}
            for ring in poisoned.values():
                ring[unused_slots(buffers["meta"], ring.shape[1])] = np.nan
            buffers = {**buffers, **poisoned}
        self.inner.write(handle, buffers)

    def run(self, plan: Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
        (all_q, q), (all_k, k), (all_v, v) = (self._amid_nan(x) for x in (q, k, v))
        whole, inside = self._guarded(out)
        meta = self.inner.run(plan, handle, q, k, v, inside)
        self._take(whole, inside, out)
        if self._given is not None and self._given[0].tobytes() != self._given[1].tobytes():
            raise AssertionError(f"backend {self.name} wrote to the output of an earlier call")
        self._given = inside, out.copy()
        for array in (all_q, all_k, all_v):
            array.flags.writeable = True
            array.fill(np.nan)
        return meta

    def steps(
        self, plan: Plan, handle: Any, q: F32, k: F32, v: F32, out: F32
    ) -> Iterator[tuple[str, ...]] | None:
        rows = [self._amid_nan(x)[1] for x in (q, k, v)]
        whole, inside = self._guarded(out)
        stops = self.inner.steps(plan, handle, rows[0], rows[1], rows[2], inside)
        return None if stops is None else self._passed_on(stops, whole, inside, out)

    def _passed_on(
        self, stops: Iterator[tuple[str, ...]], whole: F32, inside: F32, out: F32
    ) -> Iterator[tuple[str, ...]]:
        for names in stops:
            self._take(whole, inside, out)
            yield names

    def _amid_nan(self, rows: F32) -> tuple[F32, F32]:
        whole, inside = self._guarded(rows)
        inside[...] = rows
        whole.flags.writeable = inside.flags.writeable = False
        return whole, inside

    def _guarded(self, like: F32) -> tuple[F32, F32]:
        whole = np.full(like.size + 2 * self.MARGIN, np.nan, np.float32)
        return whole, whole[self.MARGIN : self.MARGIN + like.size].reshape(like.shape)

    def _take(self, whole: F32, inside: F32, out: F32) -> None:
        around = np.concatenate((whole[: self.MARGIN], whole[-self.MARGIN :]))
        if not np.isnan(around).all():
            raise AssertionError(f"backend {self.name} wrote outside of out")
        out[...] = inside


def cleared(buffers: Buffers, meta: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Buffers of a state with 0 in the slots that hold no key by meta, which may be a later one."""
    rings = {name: np.array(buffers[name]) for name in ("ring_k", "ring_v")}
    for ring in rings.values():
        ring[unused_slots(meta, ring.shape[1])] = 0
    return {**buffers, **rings}


def unused_slots(meta: npt.NDArray[Any], ring: int) -> npt.NDArray[np.bool_]:
    """`[G, ring]`: the slots that hold no key, by the buffer `meta`."""
    unused = np.ones((len(meta), ring), bool)
    for i, row in enumerate(meta.tolist()):
        group, window = GroupMeta(*row[:3]), row[3] or ring
        unused[i, (group.head + np.arange(group.length)) % window] = False
    return unused
