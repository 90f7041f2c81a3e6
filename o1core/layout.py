"""Buffers and kernels as plain data: the vocabulary that plan, executors and state share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy.typing as npt

    from o1core.config import Geometry

__all__ = [
    "Buffer",
    "GroupMeta",
    "Kernel",
    "Meta",
    "Role",
    "Strategy",
    "as_meta",
    "buffers",
    "kernels",
    "scratch_parts",
    "state_buffers",
    "up_to",
]

Role = Literal["state", "sealed", "input", "scratch", "output"]
"""state: written by the kernels; sealed: written once, when the layer is sealed or loaded."""

Strategy = Literal["sub-chunk", "whole-call"]
"""Sub-chunk after sub-chunk, or all of them together (docs/operator.md section 5)."""

MAX_SUB_CHUNK = 64
"""Rows a sub-chunk may have; kernels are made for it (docs/operator.md section 5)."""


@dataclass(frozen=True)
class Buffer:
    """One row of the buffer table (docs/operator.md section 6).

    shape is in elements; that of scratch is `None` where its size belongs to the kernel set, and
    else what a kernel set may use at most. binding is the slot of the WGSL interface.
    """

    name: str
    binding: int
    shape: tuple[int, ...] | None
    dtype: Literal["float32", "uint32"]
    role: Role

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer; both dtypes take four a number, and scratch counts as 0."""
        if self.shape is None:
            return 0
        size = 4
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class Kernel:
    """A kernel of the plan: its name, the extents of its grid, the buffers it reads and writes."""

    name: str
    extents: tuple[Literal["rows", "groups", "heads", "landmarks", "sub_chunks"], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class GroupMeta(NamedTuple):
    """Where a group's ring stands: filled slots, slot of the oldest key, keys gone far."""

    length: int
    head: int
    far: int

    def after(self, rows: int, window: int) -> GroupMeta:
        """The same group once `rows` more rows were pushed (docs/operator.md section 3)."""
        evicted = max(0, self.length + rows - window)
        return GroupMeta(
            min(self.length + rows, window), (self.head + evicted) % window, self.far + evicted
        )


Meta = Sequence[GroupMeta]


def as_meta(rows: npt.NDArray[Any]) -> list[GroupMeta]:
    """What the buffer `meta` says; it also holds the groups' windows."""
    return [GroupMeta(*group[:3]) for group in rows.tolist()]


def state_buffers(g: Geometry) -> tuple[Buffer, ...]:
    """Everything a layer carries from call to call; the far field's rows come from its kind."""
    return (
        Buffer("meta", 0, (g.groups, 4), "uint32", "state"),
        Buffer("ring_k", 1, (g.groups, g.ring, g.head_dim), "float32", "state"),
        Buffer("ring_v", 2, (g.groups, g.ring, g.value_dim), "float32", "state"),
        Buffer("sink_k", 3, (g.groups, g.sinks, g.head_dim), "float32", "sealed"),
        Buffer("sink_v", 4, (g.groups, g.sinks, g.value_dim), "float32", "sealed"),
        *g.far.buffers(g),
    )


def buffers(g: Geometry, rows: int, scratch: int | None = None) -> tuple[Buffer, ...]:
    """The whole table for a call of `rows` rows; scratch in elements, if it is known."""
    return (
        *state_buffers(g),
        Buffer("q", 10, (rows, g.heads, g.head_dim), "float32", "input"),
        Buffer("k", 11, (rows, g.groups, g.head_dim), "float32", "input"),
        Buffer("v", 12, (rows, g.groups, g.value_dim), "float32", "input"),
        Buffer("scratch", 13, None if scratch is None else (scratch,), "float32", "scratch"),
        Buffer("out", 14, (rows, g.heads, g.value_dim), "float32", "output"),
    )


def scratch_parts(g: Geometry, rows: int) -> dict[str, tuple[int, ...]]:
    """What the kernels of a whole call tell each other, for `rows` rows: name -> shape.

    An upper bound for every kernel set. Tiles are made of 64 queries: rows of one head, or of
    several of a group where there are less than 64 rows. Rows count in fours then, and in tiles
    from 64 on, as numbers of a row or key count in fours.
    """
    sub_chunks = -(-rows // MAX_SUB_CHUNK)
    quantum = 4 if rows < MAX_SUB_CHUNK else MAX_SUB_CHUNK
    rows = up_to(rows, quantum)
    tiles = -(-g.heads_per_group * rows // MAX_SUB_CHUNK)
    near = g.sinks + g.ring + rows
    return {
        "rings": (g.groups, 8),
        "keys": (g.groups, g.landmarks + near, up_to(g.head_dim, 4)),
        "values": (g.groups, near, up_to(g.value_dim, 4)),
        **g.far.scratch_parts(g, rows, sub_chunks),
        "weights": (g.groups, tiles, g.landmarks + near - rows + MAX_SUB_CHUNK, MAX_SUB_CHUNK),
        "shares": (g.groups, tiles, MAX_SUB_CHUNK),
    }


def up_to(size: int, multiple: int) -> int:
    """The least multiple that is not below size."""
    return -(-size // multiple) * multiple


def kernels(g: Geometry, strategy: Strategy) -> tuple[Kernel, ...]:
    """The kernels of one sub-chunk, or of a whole call, in order.

    The order is part of the contract. Sub-chunk by sub-chunk, attend reads the far numerator from
    before the sub-chunk, and far_commit reads ring rows that ring_commit overwrites; in a whole
    call, attend reads what far_commit left in scratch for each sub-chunk.
    """
    near = ("meta", "ring_k", "ring_v", "sink_k", "sink_v", "q", "k", "v")
    before, after = g.far.around_attend[strategy]
    writes = ("out",) if strategy == "sub-chunk" else ("scratch", "out")
    return (
        *before,
        Kernel("attend", ("heads", "rows"), (*near, *g.far.attend_reads[strategy]), writes),
        *after,
        Kernel("ring_commit", ("groups", "rows"), ("meta", "k", "v"), ("ring_k", "ring_v")),
        Kernel("meta", ("groups",), ("meta",), ("meta",)),
    )
