"""The numpy executor: always there, and the fallback of every other backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Geometry
from o1core.executor import Buffers, Executor
from o1core.layout import GroupMeta, Meta, state_buffers
from o1core.meter import Meter
from o1core.plan import Plan
from o1core_numpy.cohort import Cohort, Groups, room
from o1core_numpy.kernels import KERNELS, Call, Kernel, scaled_mix
from o1core_numpy.meter import NumpyMeter

__all__ = ["NumpyExecutor", "NumpyState"]


@dataclass(eq=False)
class NumpyState:
    """The handle of one layer."""

    geometry: Geometry
    cohorts: list[Cohort]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The cohorts as they were, with copies of their live keys where a run may overwrite them."""

    cohorts: list[Cohort]
    live: list[tuple[F32, F32]] | None


class NumpyExecutor(Executor):
    """Runs plans with numpy, on as many threads as its BLAS was given."""

    name = "numpy"
    auto_rank = 0
    kernels: ClassVar[Mapping[str, Kernel]] = KERNELS

    def __init__(self) -> None:
        _touch_blas_buffers()
        self.device = f"CPU (numpy {np.__version__})"

    @classmethod
    def open(cls, device: Any = None, *, strategy: str | None = None) -> Self:
        """`device` may be `None` or "cpu"; anything else is a ValueError."""
        if device not in (None, "cpu"):
            raise ValueError(f"device must be None or 'cpu' for the numpy backend, got {device!r}")
        executor = cls()
        executor.use_strategy(strategy)
        return executor

    def meter(self) -> Meter:
        return NumpyMeter()

    def unsupported(self, plan: Plan) -> list[str]:
        # Whatever fits in memory runs.
        if plan.strategy == "sub-chunk":
            return []
        return [f"strategy must be 'sub-chunk' (numpy), got {plan.strategy!r}"]

    def allocate(self, geometry: Geometry) -> NumpyState:
        return NumpyState(geometry, [])

    def write(self, handle: NumpyState, buffers: Buffers) -> None:
        g = handle.geometry
        members: dict[tuple[int, GroupMeta], list[int]] = {}
        for i, row in enumerate(buffers["meta"]):
            key = (g.windows[i], GroupMeta(*map(int, row[:3])))
            members.setdefault(key, []).append(i)
        far = g.far.unpack(buffers)
        handle.cohorts = [
            _cohort(
                slice(None) if len(members) == 1 else np.array(groups), window, meta, buffers, far
            )
            for (window, meta), groups in members.items()
        ]

    def read(self, handle: NumpyState) -> dict[str, npt.NDArray[Any]]:
        g = handle.geometry
        table = state_buffers(g)
        buffers = {b.name: np.zeros(b.shape or (), b.dtype) for b in table}
        far: dict[str, npt.NDArray[Any]] = {
            name: np.empty(shape, np.float32) for name, shape in g.far.arrays(g).items()
        }
        for c in handle.cohorts:
            groups = np.arange(g.groups)[c.groups]
            slots = (c.meta.head + np.arange(c.meta.length)) % c.window
            buffers["meta"][groups] = (*c.meta, c.window)
            buffers["ring_k"][groups[:, None], slots] = c.keys[:, c.live]
            buffers["ring_v"][groups[:, None], slots] = c.values[:, c.live]
            buffers["sink_k"][groups], buffers["sink_v"][groups] = c.sink_k, c.sink_v
            for name, array in far.items():
                array[groups] = c.far[name]
        return {**buffers, **g.far.pack(far)}

    def run(self, plan: Plan, handle: NumpyState, q: F32, k: F32, v: F32, out: F32) -> Meta:
        g = plan.geometry
        # Underflow to 0 is what a softmax wants, and a host may have made it an error.
        with np.errstate(all="ignore"):
            for _ in self._dispatched(plan, handle, q, k, v, out):
                pass
        metas: list[GroupMeta] = [GroupMeta(0, 0, 0)] * g.groups
        for c in handle.cohorts:
            for i in np.arange(g.groups)[c.groups]:
                metas[i] = c.meta
        return metas

    def steps(
        self, plan: Plan, handle: NumpyState, q: F32, k: F32, v: F32, out: F32
    ) -> Iterator[tuple[str, ...]]:
        dispatched = self._dispatched(plan, handle, q, k, v, out)
        ran: tuple[str, ...] = ()
        for _ in plan.dispatches:
            # Not around the stops too, where the caller has settings of its own.
            with np.errstate(all="ignore"):
                ran += (next(dispatched),)
            # The live keys are where `start`, which ring_commit moves, and meta say together.
            if ran[-1] != "ring_commit":
                yield ran
                ran = ()

    def _dispatched(
        self, plan: Plan, handle: NumpyState, q: F32, k: F32, v: F32, out: F32
    ) -> Iterator[str]:
        """Run the dispatches one by one, and name the kernel of each once it has run."""
        g = plan.geometry
        by_group = (plan.rows, g.groups, g.heads_per_group)
        q4, out4 = q.reshape(*by_group, g.head_dim), out.reshape(*by_group, g.value_dim)
        calls: list[Call] = []
        at = -1
        for dispatch in plan.dispatches:
            if dispatch.first_row != at:
                at = dispatch.first_row
                rows = slice(at, at + dispatch.rows)
                calls = [
                    Call(g, q4[rows, c.groups], k[rows, c.groups], v[rows, c.groups], out4[rows])
                    for c in handle.cohorts
                ]
            for c, call in zip(handle.cohorts, calls, strict=True):
                self.kernels[dispatch.kernel](c, call)
            yield dispatch.kernel

    def copy(self, handle: NumpyState, geometry: Geometry) -> NumpyState:
        return NumpyState(
            geometry,
            [
                replace(c, keys=c.keys.copy(), values=c.values.copy(), scratch={})
                for c in handle.cohorts
            ],
        )

    def checkpoint(self, handle: NumpyState, plans: Sequence[Plan]) -> Checkpoint:
        # One sub-chunk only writes beside the live keys; a second one may write over those that
        # the first evicted.
        live = None
        if sum(len(plan.sub_chunks) for plan in plans) > 1:
            live = [(c.keys[:, c.live].copy(), c.values[:, c.live].copy()) for c in handle.cohorts]
        return Checkpoint([copy(c) for c in handle.cohorts], live)

    def rollback(self, handle: NumpyState, checkpoint: Checkpoint) -> None:
        # Fresh records: the checkpoint must stay good for another rollback.
        handle.cohorts = [replace(c, scratch={}, sinks_before=-1) for c in checkpoint.cohorts]
        if checkpoint.live is not None:
            for c, (keys, values) in zip(handle.cohorts, checkpoint.live, strict=True):
                c.keys[:, c.live], c.values[:, c.live] = keys, values


@cache
def _touch_blas_buffers() -> None:
    """One large product a process, before any small one.

    OpenBLAS packs operands into a buffer whose pages come to life when first written, and its
    kernels prefetch past what a small product wrote. On the absent pages every prefetch is a page
    walk: products of this package's sizes then run at a quarter of their speed until some larger
    one has been there (docs/performance.md).
    """
    for dtype in (np.float32, np.float64):
        square = np.ones((512, 512), dtype)
        np.matmul(square, square)


def _cohort(groups: Groups, window: int, meta: GroupMeta, buffers: Buffers, far: Buffers) -> Cohort:
    """A cohort with copies of its groups' state."""
    sink_k, sink_v = buffers["sink_k"][groups].copy(), buffers["sink_v"][groups].copy()
    count, sinks, _ = sink_k.shape
    c = Cohort(
        groups=groups,
        window=window,
        meta=meta,
        sink_k=sink_k,
        sink_v=sink_v,
        far={name: array[groups].copy() for name, array in far.items()},
        keys=np.empty((count, room(window, sinks), sink_k.shape[2]), np.float32),
        values=np.empty((count, room(window, sinks), sink_v.shape[2]), np.float32),
        start=sinks,
    )
    slots = (meta.head + np.arange(meta.length)) % window
    c.keys[:, c.live] = buffers["ring_k"][groups][:, slots]
    c.values[:, c.live] = buffers["ring_v"][groups][:, slots]
    if "mix" in c.far:
        c.far.update(scaled_mix(c.far["mix"]))
    return c
