"""What several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

import o1core
from o1core import Geometry
from o1core.testing import KNOWN_DEFECTS, Rows, cases, random_rows
from o1core.testing.known import FAR_MAXIMUM, SHIFT

# Columns of the matrix ------------------------------------------------------------------------

BACKENDS = ("numpy", "wgpu", "taichi")
SUB_CHUNK = ("wgpu-sub-chunk", "taichi-sub-chunk")
"""Backends that take whole calls by themselves, with the other strategy."""
ORIGINAL = "wgpu-original"
"""The backend wgpu with the kernels of the upstream engine, unmodified."""
COLUMNS = (*BACKENDS, *SUB_CHUNK, ORIGINAL)

every_column = pytest.mark.parametrize("backend", COLUMNS, indirect=True)


def backend_of(column: str) -> str:
    """The backend that a column of the matrix runs."""
    return column.partition("-")[0]


_CASES: dict[str | None, str] = dict(KNOWN_DEFECTS[ORIGINAL].items())
DEFECTS: dict[str, dict[str | None, str]] = {
    "test_case": _CASES,
    "test_kernel_by_kernel": _CASES,
    "test_handles": _CASES,
    # Cut differently, this massive key too has rows before it.
    "test_case_in_other_pieces": {**_CASES, "massive-100-at-64-100": FAR_MAXIMUM},
    # With the layer's own mix, some rows drop their far field.
    "test_massive_logits_in_a_chunk_give_one": {
        **_CASES,
        **{f"massive-{x}": SHIFT for x in ("100-at-0", "100-at-64-100", "10000-at-0")},
    },
    "test_dropped_far_field_is_the_near_softmax": {None: SHIFT},
}
"""What fails with the original, by test and case, and the defect that shows."""

# Few cases, chosen so that each kernel and each rule of the operator matters in one of them.
_FEW = ("plain", "fm", "alternating", "mixed-windows", "half-full", "massive-100-at-40", "no-sinks")
SUBSET = [case for case in cases() if case.name in _FEW]

# Small layers ---------------------------------------------------------------------------------

SMALL = o1core.Config(landmarks=8, window=32, sinks=2)


# Edges of quads, tiles and windows; for what is counted without being run.
GEOMETRIES = [
    Geometry.of(
        groups, heads, head_dim, value_dim=values, window=window, sinks=sinks, landmarks=landmarks
    )
    for groups, heads in ((1, 1), (2, 6), (3, 5))
    for head_dim, values in ((1, 3), (16, 12), (251, 256))
    for window, sinks in ((1, 0), (63, 5), (200, 255))
    for landmarks in (0, 5, 32, 65)
]
ROW_COUNTS = (1, 2, 5, 63, 64, 65, 200, 1000)


def small_rows(rows: int) -> Rows:
    """Rows of 2 groups x 2 heads, the same ones for the same count."""
    return random_rows(5, rows, groups=2, heads_per_group=2, value_dim=12)


def small_layer(
    engine: o1core.O1Batch, config: o1core.Config = SMALL, *, prompt: int = 80, rows: int = 200
) -> tuple[o1core.Layer, Rows]:
    """A sealed layer of 2 groups x 2 heads and rows to extend it with."""
    q, k, v = small_rows(prompt + rows)
    layer = engine.seal(q[:prompt], k[:prompt], v[:prompt], config)
    return layer, (q[prompt:], k[prompt:], v[prompt:])


def same_state(a: o1core.LayerState, b: o1core.LayerState) -> bool:
    """Equal bit for bit, NaN payloads and signs of zero included."""
    return set(a.arrays) == set(b.arrays) and all(
        a.arrays[n].tobytes() == b.arrays[n].tobytes() for n in a.arrays
    )


def install_plugin(folder: Path, module: str, source: str, entry: str) -> None:
    """A distribution as pip would leave it: a module and its metadata, nothing else."""
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.5\n")
    (info / "entry_points.txt").write_text(f"[o1core.backends]\n{entry}\n")
