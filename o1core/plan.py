"""`Plan`: what a call of n rows does, as plain data that any executor can run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from o1core.checks import integer
from o1core.config import MAX_ROWS, Geometry
from o1core.layout import Buffer, GroupMeta, Meta, buffers, kernels
from o1core.text import table

__all__ = ["Dispatch", "Plan", "SubChunk"]

MAX_SUB_CHUNK = 64
"""Rows a sub-chunk may have; the kernels' scratch is made for it (docs/operator.md section 5)."""

CACHED_SUB_CHUNKS = 16
FORMAT, VERSION = "o1core-plan", 1


class SubChunk(NamedTuple):
    """Consecutive rows of the call that are computed together."""

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

    geometry and rows say what it is for; `sub_chunks` cut the rows, `buffers` is the table of all
    memory, `dispatches` the launches in order. Equal arguments give equal plans.
    """

    geometry: Geometry
    rows: int
    sub_chunks: tuple[SubChunk, ...]
    buffers: tuple[Buffer, ...]
    dispatches: tuple[Dispatch, ...]

    @classmethod
    def build(cls, geometry: Geometry, rows: int, *, sub_chunk: int = MAX_SUB_CHUNK) -> Plan:
        """The plan of `rows >= 0` rows in sub-chunks of at most `sub_chunk` (1 to 64) rows.

        A sub-chunk is never longer than the smallest window, since it may evict only keys that
        were in the ring when it began.
        """
        if not isinstance(geometry, Geometry):
            raise TypeError(f"geometry must be a Geometry, got {type(geometry).__name__}")
        rows = integer("rows", rows, 0, MAX_ROWS)
        sub_chunk = integer("sub_chunk", sub_chunk, 1, MAX_SUB_CHUNK)
        # Small plans come again with every call; a large one costs little beside its rows, and
        # would take megabytes to keep.
        build = _cached if rows <= CACHED_SUB_CHUNKS * min(sub_chunk, *geometry.windows) else _build
        return build(geometry, rows, sub_chunk)

    def meta_after(self, meta: Meta) -> tuple[GroupMeta, ...]:
        """The meta that every executor must hold after this call, one entry a group.

        ValueError when a far count would leave 32 bits.
        """
        if len(meta) != self.geometry.groups:
            raise ValueError(
                f"meta must have one entry for each of {self.geometry.groups} groups, "
                f"got {len(meta)}"
            )
        after = tuple(
            GroupMeta(*group).after(self.rows, window)
            for group, window in zip(meta, self.geometry.windows, strict=True)
        )
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
                "sub_chunks": [list(s) for s in self.sub_chunks],
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
        buffers must be those of the geometry and the sub-chunks must cover the rows in order.
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
                sub_chunks=tuple(SubChunk(*s) for s in data["sub_chunks"]),
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
        if self.buffers != buffers(self.geometry, self.rows):
            raise ValueError("plan buffers must be the table of its geometry and rows")
        limit = min(MAX_SUB_CHUNK, *self.geometry.windows)
        at = 0
        for first, rows in self.sub_chunks:
            if first != at or not 1 <= rows <= limit:
                raise ValueError(
                    f"plan sub-chunks must cover the rows in order, 1 to {limit} at a time, "
                    f"got ({first}, {rows}) at row {at}"
                )
            at += rows
        if at != self.rows:
            raise ValueError(f"plan sub-chunks must cover {self.rows} rows, got {at}")
        if self.dispatches != _dispatches(self.geometry, self.sub_chunks):
            raise ValueError(
                "plan dispatches must be the kernels of its far field, in order, for each sub-chunk"
            )

    def __str__(self) -> str:
        return _table(self)


def _build(geometry: Geometry, rows: int, sub_chunk: int) -> Plan:
    step = min(sub_chunk, *geometry.windows)
    chunks = tuple(SubChunk(at, min(step, rows - at)) for at in range(0, rows, step))
    return Plan(geometry, rows, chunks, buffers(geometry, rows), _dispatches(geometry, chunks))


_cached = lru_cache(maxsize=64)(_build)


def _dispatches(geometry: Geometry, chunks: Sequence[SubChunk]) -> tuple[Dispatch, ...]:
    sizes = {
        "groups": geometry.groups,
        "heads": geometry.heads,
        "landmarks": geometry.landmarks,
    }
    sequence = kernels(geometry)
    return tuple(
        Dispatch(
            kernel.name,
            tuple((e, rows if e == "rows" else sizes[e]) for e in kernel.extents),
            first,
            rows,
            kernel.reads,
            kernel.writes,
        )
        for first, rows in chunks
        for kernel in sequence
    )


def _table(plan: Plan) -> str:
    g = plan.geometry
    windows = str(g.windows[0]) if len(set(g.windows)) == 1 else ",".join(map(str, g.windows))
    lines = [
        f"Plan: {plan.rows} rows in {len(plan.sub_chunks)} sub-chunks, "
        f"{len(plan.dispatches)} dispatches",
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
    each = len(plan.dispatches) // max(1, len(plan.sub_chunks))
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
    if len(plan.sub_chunks) > 3:
        # Only the last sub-chunk can differ from the first: the rest would repeat it.
        shown = plan.dispatches[:each] + plan.dispatches[-each:]
        hidden = len(plan.sub_chunks) - 2
    number = {chunk.first_row: str(i) for i, chunk in enumerate(plan.sub_chunks)}
    rows = [
        (
            number[d.first_row],
            f"{d.first_row}..{d.first_row + d.rows - 1}",
            d.kernel,
            " x ".join(f"{size} {extent}" for extent, size in d.grid),
        )
        for d in shown
    ]
    launches = table(("sub-chunk", "rows", "kernel", "grid"), rows, left=None)
    if hidden:
        more = f"...        {hidden} more sub-chunks, the same {each} kernels each"
        launches.insert(1 + each, more)
    return "\n".join(lines + launches)
