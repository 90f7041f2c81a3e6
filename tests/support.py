"""What several test modules share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import o1core
from o1core.testing import Rows, cases, random_rows

# Columns of the matrix ------------------------------------------------------------------------

BACKENDS = ("numpy", "wgpu", "taichi")
ORIGINAL = "wgpu-original"
"""The backend wgpu with the kernels of the upstream engine, unmodified."""

every_column = pytest.mark.parametrize("backend", [*BACKENDS, ORIGINAL], indirect=True)

# Of the four rules in docs/operator.md section 4, the original keeps only the last.
FAR_MAXIMUM = (
    "the original reads all rows of a sub-chunk relative to the far maximum after it: those before "
    "a massive key vanish"
)
SHIFT = "the original leaves landmarks that contribute nothing in its shift: near weights underflow"
SHIFT_AND_SCALE = f"{SHIFT}, and so do mixed weights beside the row's largest landmark logit"

_CASES: dict[str | None, str] = {
    **dict.fromkeys(("dropped-far-above", "opposed-80"), SHIFT),
    **{f"survivor-{gap}-below": SHIFT for gap in (25, 29, 35)},
    **dict.fromkeys(("survivor-0-below", "opposed-100", "opposed-1000"), SHIFT_AND_SCALE),
    **{f"massive-{n}-at-{at}": FAR_MAXIMUM for n in (100, 10000, 100000) for at in (1, 40, 62, 63)},
    "massive-100-at-3-5-7-127": FAR_MAXIMUM,
    **{f"jumps-of-{step}": FAR_MAXIMUM for step in (30, 100)},
}
DEFECTS: dict[str, dict[str | None, str]] = {
    "test_case": _CASES,
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

# Golden files and small layers ----------------------------------------------------------------

GOLDEN = Path(__file__).parent / "data" / "golden"

Golden = tuple[o1core.Config, Rows, Rows, tuple[int, ...], dict[str, npt.NDArray[Any]]]


def golden(path: Path) -> Golden:
    """Config, prompt, rows, chunks and all arrays of a golden file."""
    arrays = dict(np.load(path))
    about = json.loads(arrays.pop("meta_json").tobytes())
    config = o1core.Config(
        landmarks=about["m"],
        window=about["w"],
        sinks=about["sink"],
        rectifier=about["rect"],
        windows=tuple(about["windows"]),
    )
    prompt = arrays["prompt_q"], arrays["prompt_k"], arrays["prompt_v"]
    rows = arrays["rows_q"], arrays["rows_k"], arrays["rows_v"]
    return config, prompt, rows, tuple(about["chunks"]), arrays


SMALL = o1core.Config(landmarks=8, window=32, sinks=2)


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
