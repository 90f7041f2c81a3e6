"""A kernel set: WGSL text, how a plan's dispatches become launches of it, and what it cannot do.

There are two. `OwnKernels` is `kernels.wgsl`; `GivenKernels` is a text of the user's that keeps the
interface of docs/operator.md section 6, as the original of the upstream engine does. Plan, state
buffers, inputs and output are the same for both; scratch and workgroups are their own.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import ClassVar, NamedTuple

from o1core.config import MAX_ROWS, Geometry
from o1core.layout import Strategy
from o1core.plan import MAX_SUB_CHUNK, STRATEGIES, Dispatch, Plan, Slab
from o1core_wgpu.interface import Interface, parse
from o1core_wgpu.source import Source

__all__ = ["MAX_WORKGROUPS", "GivenKernels", "KernelSet", "Launch", "OwnKernels"]

FM = 1 << 8
UNIFORM_WORDS = 12
"""Of the interface; o1core's own kernels are given more."""
MAX_WORKGROUPS = 65535
"""In one dimension, on every device."""


class Launch(NamedTuple):
    """One `dispatch_workgroups`, and the uniform it sees."""

    entry_point: str
    workgroups: tuple[int, int, int]
    uniform: bytes


class KernelSet(ABC):
    """WGSL that computes the operator, and the facts needed to launch it."""

    label: str
    text: str
    interface: Interface

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def storage_buffers(self) -> int:
        """The most storage buffers that one entry point binds."""
        return max(
            sum(self.interface.bindings[n].access != "uniform" for n in entry.bindings)
            for entry in self.interface.entry_points.values()
        )

    @abstractmethod
    def limits(self, g: Geometry) -> list[str]:
        """What the kernels cannot do with this geometry, whatever the device."""

    strategies: tuple[Strategy, ...] = ("sub-chunk",)

    trusted = False
    """Whether the kernels may run without wgpu's bounds checks: own ones, never a user's."""

    uniform_bytes: int = 4 * UNIFORM_WORDS
    """Bytes of the uniform."""

    completes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        f"o1b_{name}": (name,) for name in ("far_e", "attend", "far_commit", "ring_commit", "meta")
    }
    """The plan's kernels whose work is done once an entry point has run."""

    def most_rows(self, g: Geometry) -> int:
        """Rows of a slab whose launches stay within the grid of every device."""
        del g
        return MAX_ROWS

    @abstractmethod
    def scratch_bytes(self, plan: Plan) -> int:
        """Bytes of scratch that the slabs of a plan need."""

    @abstractmethod
    def launches(self, plan: Plan, slabs: Sequence[Slab]) -> list[Launch]:
        """The launches of consecutive slabs of a plan, with rows counted from their first."""


def _uniform(g: Geometry, first_row: int, rows: int) -> bytes:
    # For up to 255 sinks this is the interface's `sinks | rectifier << 8`; only o1core's own
    # kernels are given more, and look for the rest above.
    packed = (g.sinks & 255) | (FM if g.rectifier == "fm" else 0) | (g.sinks >> 8) << 9
    return struct.pack(
        "<6If5I",
        g.heads_per_group,
        g.landmarks,
        g.ring,
        packed,
        g.head_dim,
        g.value_dim,
        g.scale,
        rows,
        g.heads,
        g.groups,
        first_row,
        0,
    )


class OwnKernels(KernelSet):
    """o1core's own: any geometry that fits the device, many sub-chunks at once.

    Each kernel takes all rows of a slab, of a sub-chunk or of a whole call, since the keys that
    these rows evict are known when it starts.
    """

    TILE, WIDE = 64, 128
    MAX_LANDMARKS = 256
    label = "o1core's own WGSL"
    strategies = STRATEGIES[::-1]
    trusted = True
    uniform_bytes = 4 * (UNIFORM_WORDS + 11)
    completes: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "o1b_logits": ("far_e",),
        "o1b_far_sums": ("far_sums",),
        "o1b_commit": ("far_commit", "ring_commit", "meta"),
        "o1b_attend": ("attend",),
    }

    def __init__(self) -> None:
        self.text = files("o1core_wgpu").joinpath("kernels.wgsl").read_text("utf-8")
        self.interface = parse(self.text)

    def limits(self, g: Geometry) -> list[str]:
        if g.landmarks <= self.MAX_LANDMARKS:
            return []
        return [f"landmarks must be at most {self.MAX_LANDMARKS}, got {g.landmarks}"]

    def _parts(self, g: Geometry, rows: int) -> dict[str, int]:
        """The parts of scratch for a slab of `rows` rows, in quads, as kernels.wgsl has them."""
        blocks, tiles = _tiles(rows, self.TILE), self._query_tiles(g, rows)
        marks = g.heads_per_group * _tiles(g.landmarks, 4)
        keys = g.groups * (g.sinks + g.ring + rows)
        far = g.groups * blocks * self.TILE * marks
        return {
            "rings": 2 * g.groups,
            "keys": keys * _tiles(g.head_dim, 4),
            "values": keys * _tiles(g.value_dim, 4),
            "far_logits": far,
            "far_peaks": far,
            "far_weights": far,
            "block_mass": g.groups * blocks * marks,
            "running": g.groups * blocks * marks * 4,
            "numerators": g.groups * blocks * marks * 4 * _tiles(g.value_dim, 4),
            "weights": g.groups * tiles * self._columns(g) * self.TILE // 4,
            "shares": g.groups * tiles * self.TILE // 4,
        }

    def _columns(self, g: Geometry) -> int:
        """Of a tile of queries: what a row can see, and what its tile sees beyond."""
        return g.landmarks + g.sinks + g.ring + self.TILE

    def _query_tiles(self, g: Geometry, rows: int) -> int:
        """Tiles of a group's queries: long calls give a head whole tiles, shorter ones quads."""
        quantum = 4 if rows < self.TILE else self.TILE
        return _tiles(g.heads_per_group * _tiles(rows, quantum) * quantum, self.TILE)

    def most_rows(self, g: Geometry) -> int:
        # One dimension counts tiles of queries by tiles of columns, another the keys side by side.
        wides = _tiles(max(self._columns(g), g.value_dim), self.WIDE)
        parts = self.TILE // 4  # of a tile, in which weights has it at most
        tiles = MAX_WORKGROUPS // max(parts, wides) // (g.heads_per_group + 1)
        return max(1, min(tiles * self.TILE, MAX_WORKGROUPS - g.sinks - g.ring))

    def scratch_bytes(self, plan: Plan) -> int:
        rows = max(slab.rows for slab in plan.slabs)
        return 16 * sum(self._parts(plan.geometry, rows).values())

    def launches(self, plan: Plan, slabs: Sequence[Slab]) -> list[Launch]:
        start = slabs[0].first_row
        return [
            launch
            for first_row, rows in slabs
            for launch in self._of_slab(plan.geometry, first_row - start, rows)
        ]

    def _of_slab(self, g: Geometry, first_row: int, rows: int) -> list[Launch]:
        starts = accumulate(self._parts(g, rows).values(), initial=0)
        uniform = _uniform(g, first_row, rows) + struct.pack("<11I", *list(starts)[:-1])
        return [Launch(entry_point, grid, uniform) for entry_point, grid in self._grids(g, rows)]

    def _grids(self, g: Geometry, rows: int) -> list[tuple[str, tuple[int, int, int]]]:
        """The launches of a slab: entry points and workgroups, as kernels.wgsl names them."""
        blocks, tiles = _tiles(rows, self.TILE), self._query_tiles(g, rows)
        marks = _tiles(g.heads_per_group * _tiles(g.landmarks, 4), self.TILE // 4)
        values = _tiles(g.value_dim, self.WIDE)
        far_logits = marks * _tiles(rows, self.WIDE)
        logits = far_logits + tiles * _tiles(self._columns(g), self.WIDE)
        # Quads of rows that a workgroup has side by side, so that their landmarks fit its memory.
        side = next(x for x in (8, 4, 2, 1) if x == 1 or x * _tiles(g.landmarks, 4) * 4 <= 256)
        launches = [
            ("o1b_gather", (g.sinks + g.ring + rows, g.groups, 1)),
            ("o1b_logits", (logits, g.groups, 1)),
            ("o1b_far_sums", (values * marks, blocks, g.groups)),
            ("o1b_commit", (1 + min(rows, g.ring) + g.heads_per_group * g.landmarks, g.groups, 1)),
            ("o1b_weights", (tiles * 16 // side, g.groups, 1)),
            ("o1b_attend", (values * tiles, g.groups, 1)),
        ]
        return [launch for launch in launches if 0 not in launch[1]]


class GivenKernels(KernelSet):
    """Kernels with the grids and the scratch of the upstream engine, within declared limits."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.label = str(source)
        self.text = source.text
        self.interface = source.interface

    def limits(self, g: Geometry) -> list[str]:
        most = self.source.limits
        sub_chunk = min(MAX_SUB_CHUNK, *g.windows)
        asked = {
            "landmarks": (g.landmarks, most.landmarks),
            "head_dim": (g.head_dim, most.head_dim),
            "groups": (g.groups, most.groups),
            "sinks": (g.sinks, most.sinks),
            "sinks + window": (g.sinks + g.ring, most.near),
            "rows of a sub-chunk": (sub_chunk, most.sub_chunk),
        }
        return [
            f"{field} must be at most {limit}, got {value}"
            for field, (value, limit) in asked.items()
            if value > limit
        ]

    def scratch_bytes(self, plan: Plan) -> int:
        g = plan.geometry
        return 4 * g.heads * g.landmarks * (2 * self.source.limits.sub_chunk + 2)

    def launches(self, plan: Plan, slabs: Sequence[Slab]) -> list[Launch]:
        start, end = slabs[0].first_row, slabs[-1].first_row + slabs[-1].rows
        return [
            self._launch(plan.geometry, dispatch, dispatch.first_row - start)
            for dispatch in plan.dispatches
            if start <= dispatch.first_row < end
        ]

    def _launch(self, g: Geometry, dispatch: Dispatch, first_row: int) -> Launch:
        grid = {
            "far_e": (g.heads * g.landmarks, 1, 1),
            "attend": (g.heads, dispatch.rows, 1),
            "far_commit": (g.heads * g.landmarks, 1, 1),
            "ring_commit": (g.groups, dispatch.rows, 1),
            "meta": (1, 1, 1),
        }[dispatch.kernel]
        return Launch(f"o1b_{dispatch.kernel}", grid, _uniform(g, first_row, dispatch.rows))


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


@cache
def own_kernels() -> OwnKernels:
    """o1core's own kernel set, read once."""
    return OwnKernels()
