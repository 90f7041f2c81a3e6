"""A kernel set: WGSL text, how a plan's dispatches become launches of it, and what it cannot do.

There are two. `OwnKernels` is `kernels.wgsl`; `GivenKernels` is a text of the user's that keeps the
interface of docs/operator.md section 6, as the original of the upstream engine does. Plan, state
buffers, inputs and output are the same for both; scratch and workgroups are their own.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from o1core.config import MAX_ROWS, Geometry
from o1core.layout import Strategy
from o1core.plan import MAX_SUB_CHUNK, STRATEGIES, Dispatch, Plan, Slab
from o1core_wgpu.interface import Interface, parse
from o1core_wgpu.source import Source

__all__ = ["MAX_WORKGROUPS", "GivenKernels", "KernelSet", "Launch", "OwnKernels"]

FM = 1 << 8
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

    ROWS, COLUMNS, BLOCK, BAND, PADS = 32, 64, 64, 100, 3
    MAX_LANDMARKS = 192
    label = "o1core's own WGSL"
    strategies = STRATEGIES[::-1]

    def __init__(self) -> None:
        self.text = files("o1core_wgpu").joinpath("kernels.wgsl").read_text("utf-8")
        self.interface = parse(self.text)

    def limits(self, g: Geometry) -> list[str]:
        if g.landmarks <= self.MAX_LANDMARKS:
            return []
        return [f"landmarks must be at most {self.MAX_LANDMARKS}, got {g.landmarks}"]

    def _floats(self, g: Geometry, rows: int) -> int:
        """Scratch of a slab of `rows` rows, as kernels.wgsl lays it out."""
        plane = g.heads * g.landmarks
        keys = rows + self.PADS
        blocks = _tiles(keys, self.BLOCK)
        row = _tiles(g.sinks, 4) * 4 + g.ring + self.BAND + g.landmarks
        far = plane * (2 * keys + 2 + (3 + g.value_dim) * blocks)
        return far + g.heads * self._padded(rows) * row

    def _padded(self, rows: int) -> int:
        return rows if rows < self.ROWS else _tiles(rows, self.ROWS) * self.ROWS

    def most_rows(self, g: Geometry) -> int:
        # The rows of all heads are one dimension of the tiles, and rows another of ring_commit.
        return min(MAX_WORKGROUPS, MAX_WORKGROUPS * self.ROWS // g.heads_per_group - self.ROWS)

    def scratch_bytes(self, plan: Plan) -> int:
        return 4 * self._floats(plan.geometry, max(slab.rows for slab in plan.slabs))

    def launches(self, plan: Plan, slabs: Sequence[Slab]) -> list[Launch]:
        start = slabs[0].first_row
        return [
            launch
            for first_row, rows in slabs
            for launch in self._of_slab(plan.geometry, first_row - start, rows)
        ]

    def _of_slab(self, g: Geometry, first_row: int, rows: int) -> list[Launch]:
        uniform = _uniform(g, first_row, rows)
        return [Launch(entry_point, grid, uniform) for entry_point, grid in self._grids(g, rows)]

    def _grids(self, g: Geometry, rows: int) -> list[tuple[str, tuple[int, int, int]]]:
        """The launches of a slab: entry points and workgroups, as kernels.wgsl names them."""
        blocks = _tiles(rows + self.PADS, self.BLOCK)
        marks = g.heads_per_group * g.landmarks
        down = _tiles(g.heads_per_group * self._padded(rows), self.ROWS)
        # A row's window, what the rows of its tile see beyond it, and the rest of a block.
        keys = g.ring + min(self.BAND, rows + 2 * self.PADS)
        columns = _tiles(_tiles(g.sinks, 4) * 4 + keys + g.landmarks, self.COLUMNS)
        wide = _tiles(g.value_dim, self.COLUMNS)
        far: list[tuple[str, tuple[int, int, int]]] = []
        if g.landmarks:
            far = [
                ("o1b_far_e", (_tiles(marks, self.ROWS), blocks, g.groups)),
                ("o1b_far_sums", (wide, _tiles(marks, self.ROWS), blocks * g.groups)),
                ("o1b_far_commit", (wide, marks, g.groups)),
            ]
        return [
            *far,
            ("o1b_attend_logits", (columns, down, g.groups)),
            ("o1b_attend_weights", (_tiles(rows, 4), g.heads_per_group, g.groups)),
            ("o1b_attend", (wide, down, g.groups)),
            ("o1b_ring_commit", (rows, g.groups, 1)),
            ("o1b_meta", (1, 1, 1)),
        ]


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
