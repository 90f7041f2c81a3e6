"""`Plan`: what a call of n rows does, as plain data that any executor can run."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from o1core.checks import integer
from o1core.config import MAX_ROWS, Geometry
from o1core.layout import (
    MAX_SUB_CHUNK,
    Buffer,
    GroupMeta,
    Meta,
    Strategy,
    buffers,
    kernels,
    scratch_parts,
)
from o1core.text import table

__all__ = [
    "MAX_SCRATCH",
    "MAX_SLAB",
    "MAX_SUB_CHUNK",
    "STRATEGIES",
    "Dispatch",
    "Plan",
    "Slab",
    "SubChunk",
    "scratch_bytes",
]

STRATEGIES: tuple[Strategy, ...] = ("sub-chunk", "whole-call")

MAX_SCRATCH = 2**28
"""Bytes of scratch that a whole call may take before it is cut into slabs."""
MAX_SLAB = 2**13
"""Rows of a slab, whatever scratch has room for: more gain nothing."""

CACHED_SUB_CHUNKS = 16
FORMAT, VERSION = "o1core-plan", 2


class SubChunk(NamedTuple):
    """Consecutive rows of the call; the keys that they evict go far together."""

    first_row: int
    rows: int


class Slab(NamedTuple):
    """Consecutive rows of the call that one pass of the kernels computes.

    One sub-chunk, or with the strategy "whole-call" as many as scratch has room for.
    """

    first_row: int
    rows: int


class Dispatch(NamedTuple):
    """One launch: the kernel, its logical extents, its parameters, the buffers it touches.

    grid holds `(extent, size)` pairs; how extents become workgroups is the executor's affair.
    """

    kernel: str
    grid: tuple[tuple[str, int], ...]
    first_row: int
    rows: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The recipe of one call (docs/operator.md section 5).

    geometry and rows say what it is for, strategy how the rows are gone through; `sub_chunks` cut
    the rows, `slabs` are those that are computed together, `buffers` is the table of all memory,
    `dispatches` the launches in order, all kernels for each slab. Equal arguments give equal plans.
    """

    geometry: Geometry
    rows: int
    strategy: Strategy
    sub_chunks: tuple[SubChunk, ...]
    slabs: tuple[Slab, ...]
    buffers: tuple[Buffer, ...]
    dispatches: tuple[Dispatch, ...]

    @classmethod
    def build(
        cls,
        geometry: Geometry,
        rows: int,
        *,
        strategy: Strategy = "sub-chunk",
        sub_chunk: int = MAX_SUB_CHUNK,
        scratch: int = MAX_SCRATCH,
        slab: int = MAX_SLAB,
    ) -> Plan:
        """The plan of `rows >= 0` rows in sub-chunks of at most `sub_chunk` (1 to 64) rows.

        strategy "sub-chunk" computes one sub-chunk after the other. None is longer than the
        smallest window, since it may evict only keys that were in the ring when it began.
        "whole-call" computes all together, in slabs of whole sub-chunks of 64 rows: as many as fit
        into `scratch` bytes and `slab` rows. Where not even one does, slabs and sub-chunks are of
        less rows, at least one.
        """
        if not isinstance(geometry, Geometry):
            raise TypeError(f"geometry must be a Geometry, got {type(geometry).__name__}")
        rows = integer("rows", rows, 0, MAX_ROWS)
        if strategy not in STRATEGIES:
            raise ValueError(
                f"strategy must be {' or '.join(map(repr, STRATEGIES))}, got {strategy!r}"
            )
        sub_chunk = integer("sub_chunk", sub_chunk, 1, MAX_SUB_CHUNK)
        scratch, slab = integer("scratch", scratch, 1), integer("slab", slab, 1)
        if strategy == "whole-call":
            if sub_chunk != MAX_SUB_CHUNK:
                raise ValueError(
                    f"sub_chunk must be {MAX_SUB_CHUNK} with strategy 'whole-call', got {sub_chunk}"
                )
            each = slab = _largest_slab(geometry, scratch, slab)
        else:
            each, slab = min(sub_chunk, *geometry.windows), 0
        # Small plans come again with every call; a large one costs little beside its rows, and
        # would take megabytes to keep.
        build = _cached if rows <= CACHED_SUB_CHUNKS * each else _build
        return build(geometry, rows, strategy, sub_chunk, slab)

    @property
    def scratch_parts(self) -> dict[str, tuple[int, ...]]:
        """What scratch has room for in a whole call: name -> shape; empty otherwise."""
        if self.strategy == "sub-chunk":
            return {}
        return scratch_parts(self.geometry, max((slab.rows for slab in self.slabs), default=0))

    def meta_after(self, meta: Meta) -> tuple[GroupMeta, ...]:
        """The meta that every executor must hold after this call, one entry a group.

        ValueError when a far count would leave 32 bits.
        """
        if len(meta) != self.geometry.groups:
            raise ValueError(
                f"meta must have one entry for each of {self.geometry.groups} groups, "
                f"got {len(meta)}"
            )
        # Groups of one window stand alike, and there may be hundreds of them in a batch.
        before = [
            (*group, window) for group, window in zip(meta, self.geometry.windows, strict=True)
        ]
        moved = {each: GroupMeta(*each[:3]).after(self.rows, each[3]) for each in set(before)}
        after = tuple(moved[each] for each in before)
        if max(group.far for group in after) >= 2**32:
            raise ValueError(
                f"rows must leave the far count below 2^32, got {self.rows} more after "
                f"{max(group[2] for group in meta)} evicted keys"
            )
        return after

    def to_json(self) -> str:
        """The plan as JSON text; `Plan.from_json` reads it back."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "geometry": self.geometry.to_dict(),
                "rows": self.rows,
                "strategy": self.strategy,
                "sub_chunks": [list(s) for s in self.sub_chunks],
                "slabs": [list(s) for s in self.slabs],
                "buffers": [
                    {**vars(b), "shape": None if b.shape is None else list(b.shape)}
                    for b in self.buffers
                ],
                "dispatches": [
                    {**d._asdict(), "grid": dict(d.grid), "reads": d.reads, "writes": d.writes}
                    for d in self.dispatches
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """The plan written by `to_json`.

        ValueError for text that is no plan, has another version, or contradicts itself: the
        buffers must be those of the geometry, sub-chunks and slabs must cover the rows in order.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as fault:
            raise ValueError(f"text must be JSON, got {text[:40]!r}: {fault}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"text must be an {FORMAT} document, got {text[:40]!r}")
        if data.get("version") != VERSION:
            raise ValueError(f"plan version must be {VERSION}, got {data.get('version')!r}")
        try:
            plan = cls(
                geometry=Geometry(**data["geometry"]),
                rows=integer("rows", data["rows"], 0, MAX_ROWS),
                strategy=data["strategy"],
                sub_chunks=tuple(SubChunk(*s) for s in data["sub_chunks"]),
                slabs=tuple(Slab(*s) for s in data["slabs"]),
                buffers=tuple(
                    Buffer(**{**b, "shape": None if b["shape"] is None else tuple(b["shape"])})
                    for b in data["buffers"]
                ),
                dispatches=tuple(
                    Dispatch(
                        **{
                            **d,
                            "grid": tuple((k, n) for k, n in d["grid"].items()),
                            "reads": tuple(d["reads"]),
                            "writes": tuple(d["writes"]),
                        }
                    )
                    for d in data["dispatches"]
                ),
            )
        except (KeyError, TypeError, AttributeError) as fault:
            raise ValueError(f"plan document is malformed: {fault}") from fault
        plan._check()
        return plan

    def _check(self) -> None:
        """ValueError unless the parts of the plan fit each other."""
        if self.strategy not in STRATEGIES:
            raise ValueError(f"plan strategy must be one of {STRATEGIES}, got {self.strategy!r}")
        limit = MAX_SUB_CHUNK
        if self.strategy == "sub-chunk":
            limit = min(limit, *self.geometry.windows)
        self._check_cover("sub-chunks", self.sub_chunks, limit)
        self._check_cover("slabs", self.slabs, self.rows)
        starts = {chunk.first_row for chunk in self.sub_chunks}
        if self.strategy == "sub-chunk" and tuple(map(tuple, self.slabs)) != self.sub_chunks:
            raise ValueError("plan slabs must be its sub-chunks with strategy 'sub-chunk'")
        if any(slab.first_row not in starts for slab in self.slabs):
            raise ValueError("plan slabs must begin where sub-chunks do")
        if self.buffers != _buffers(self.geometry, self.rows, self.strategy, self.slabs):
            raise ValueError("plan buffers must be the table of its geometry and rows")
        if self.dispatches != _dispatches(self.geometry, self.strategy, self.slabs):
            raise ValueError(
                "plan dispatches must be the kernels of its far field, in order, for each slab"
            )

    def _check_cover(self, what: str, parts: Sequence[SubChunk | Slab], limit: int) -> None:
        at = 0
        for first, rows in parts:
            if first != at or not 1 <= rows <= limit:
                raise ValueError(
                    f"plan {what} must cover the rows in order, 1 to {limit} at a time, "
                    f"got ({first}, {rows}) at row {at}"
                )
            at += rows
        if at != self.rows:
            raise ValueError(f"plan {what} must cover {self.rows} rows, got {at}")

    def __str__(self) -> str:
        return _table(self)


def _build(geometry: Geometry, rows: int, strategy: Strategy, sub_chunk: int, slab: int) -> Plan:
    step = min(sub_chunk, slab) if slab else min(sub_chunk, *geometry.windows)
    slab = slab or step
    chunks = tuple(SubChunk(at, min(step, rows - at)) for at in range(0, rows, step))
    slabs = tuple(Slab(at, min(slab, rows - at)) for at in range(0, rows, slab))
    return Plan(
        geometry,
        rows,
        strategy,
        chunks,
        slabs,
        _buffers(geometry, rows, strategy, slabs),
        _dispatches(geometry, strategy, slabs),
    )


_cached = lru_cache(maxsize=64)(_build)


@lru_cache(maxsize=256)
def _largest_slab(geometry: Geometry, scratch: int, most: int) -> int:
    """Rows of a slab, at most so many, whose scratch takes at most so many bytes."""

    whole = range(MAX_SUB_CHUNK, most + 1, MAX_SUB_CHUNK)
    if fits := bisect_right(whole, scratch, key=lambda rows: scratch_bytes(geometry, rows)):
        return whole[fits - 1]
    rows = MAX_SUB_CHUNK
    while rows > 1 and (rows > most or scratch_bytes(geometry, rows) > scratch):
        rows //= 2
    return rows


@lru_cache(maxsize=1024)
def scratch_bytes(geometry: Geometry, rows: int) -> int:
    """Bytes of scratch in a whole call, or a slab of one, of `rows` rows: all of its parts."""
    return 4 * sum(math.prod(shape) for shape in scratch_parts(geometry, rows).values())


def _buffers(
    geometry: Geometry, rows: int, strategy: Strategy, slabs: Sequence[Slab]
) -> tuple[Buffer, ...]:
    if strategy == "sub-chunk" or not slabs:
        return buffers(geometry, rows)
    # The first slab is the longest.
    return buffers(geometry, rows, scratch_bytes(geometry, slabs[0].rows) // 4)


def _dispatches(
    geometry: Geometry, strategy: Strategy, slabs: Sequence[Slab]
) -> tuple[Dispatch, ...]:
    sizes = {
        "groups": geometry.groups,
        "heads": geometry.heads,
        "landmarks": geometry.landmarks,
    }
    sequence = kernels(geometry, strategy)
    return tuple(
        Dispatch(
            kernel.name,
            tuple((e, {**sizes, **counts}[e]) for e in kernel.extents),
            first,
            rows,
            kernel.reads,
            kernel.writes,
        )
        for first, rows in slabs
        for counts in ({"rows": rows, "sub_chunks": -(-rows // MAX_SUB_CHUNK)},)
        for kernel in sequence
    )


def _table(plan: Plan) -> str:
    g = plan.geometry
    windows = str(g.windows[0]) if len(set(g.windows)) == 1 else ",".join(map(str, g.windows))
    whole = plan.strategy == "whole-call"
    lines = [
        f"Plan: {plan.rows} rows in {len(plan.sub_chunks)} sub-chunks, "
        + (f"{len(plan.slabs)} slabs, " if whole else "")
        + f"{len(plan.dispatches)} dispatches",
        f"strategy: {plan.strategy}",
        f"geometry: {g.groups} groups x {g.heads_per_group} heads, head_dim {g.head_dim}, "
        f"value_dim {g.value_dim}, window {windows}, sinks {g.sinks}, "
        f"far field {g.far.name}" + (f" ({g.landmarks} landmarks)" if g.landmarks else ""),
        "",
        *table(
            ("buffer", "binding", "shape", "dtype", "role", "bytes"),
            [
                (
                    b.name,
                    str(b.binding),
                    "kernel set's" if b.shape is None else str(list(b.shape)),
                    b.dtype,
                    b.role,
                    "-" if b.shape is None else f"{b.nbytes:,}",
                )
                for b in plan.buffers
            ],
            left=None,
        ),
        "",
    ]
    if parts := plan.scratch_parts:
        sizes = [
            (name, str(list(shape)), f"{4 * math.prod(shape):,}") for name, shape in parts.items()
        ]
        lines += [*table(("of scratch", "shape", "bytes"), sizes, left=None), ""]
    each = len(plan.dispatches) // max(1, len(plan.slabs))
    lines += [
        *table(
            ("kernel", "reads -> writes"),
            [
                (d.kernel, f"{' '.join(d.reads)} -> {' '.join(d.writes)}")
                for d in plan.dispatches[:each]
            ],
            left=None,
        ),
        "",
    ]
    shown, hidden = plan.dispatches, 0
    if len(plan.slabs) > 3:
        # Only the last slab can differ from the first: the rest would repeat it.
        shown = plan.dispatches[:each] + plan.dispatches[-each:]
        hidden = len(plan.slabs) - 2
    number = {slab.first_row: str(i) for i, slab in enumerate(plan.slabs)}
    rows = [
        (
            number[d.first_row],
            f"{d.first_row}..{d.first_row + d.rows - 1}",
            d.kernel,
            " x ".join(f"{size} {extent}" for extent, size in d.grid),
        )
        for d in shown
    ]
    what = "slab" if whole else "sub-chunk"
    launches = table((what, "rows", "kernel", "grid"), rows, left=None)
    if hidden:
        more = f"...        {hidden} more {what}s, the same {each} kernels each"
        launches.insert(1 + each, more)
    return "\n".join(lines + launches)
