"""What several test modules share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import o1core
from o1core.testing import Rows, random_rows

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
