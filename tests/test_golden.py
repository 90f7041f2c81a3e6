"""The vectors of the upstream engine: sealed state, output, final state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import GOLDEN, every_column, golden

import o1core
from o1core.testing import Oracle, check_output, check_state

SMALL = sorted(GOLDEN.glob("*.npz"))
LARGE = ("model_like", "production")
STATE = (
    "meta",
    "ring_k",
    "ring_v",
    "sink_k",
    "sink_v",
    "k_landmarks",
    "q_landmarks",
    "mix",
    "far_max",
    "far_mass",
    "far_num",
)


def check(engine: o1core.O1Batch, path: Path, cut: str) -> None:
    config, prompt, rows, chunks, arrays = golden(path)
    total = len(rows[0])
    layer = engine.seal(*prompt, config)
    check_state(layer.state(), {n: arrays[f"sealed_{n}"] for n in STATE})
    sizes = {"given": chunks, "whole": (total,), "ones": (1,) * min(total, 90), "odd": (7, 61, 3)}
    outs, at = [], 0
    for size in (*sizes[cut], total):
        piece = slice(at, at + size)
        outs.append(layer.extend(*(x[piece] for x in rows)))
        at = min(at + size, total)
    out = np.concatenate(outs)

    oracle = Oracle(config, prompt)
    oracle.append(rows)
    expected = oracle.expected(range(len(prompt[0]), len(prompt[0]) + total))
    check_output(arrays["out"], expected, "upstream's own output")
    check_output(out, expected)
    check_state(layer.state(), oracle.state())
    final = [n for n in STATE if f"final_{n}" in arrays]
    assert len(final) == 6
    state = layer.state()
    check_state(state, {n: arrays.get(f"final_{n}", state.arrays[n]) for n in STATE})


@every_column
@pytest.mark.parametrize("cut", ["given", "whole", "ones", "odd"])
@pytest.mark.parametrize("path", SMALL, ids=lambda p: p.stem)
def test_small_vectors(engine: o1core.O1Batch, path: Path, cut: str) -> None:
    check(engine, path, cut)


@every_column
@pytest.mark.parametrize("name", LARGE)
def test_large_vectors(engine: o1core.O1Batch, shared: Path, name: str) -> None:
    check(engine, shared / "golden" / f"{name}.npz", "given")


@every_column
@pytest.mark.parametrize(("key", "sinks"), [("out", None), ("out_sink0", 0)])
def test_whole_matrix_vectors(
    engine: o1core.O1Batch, shared: Path, key: str, sinks: int | None
) -> None:
    """Upstream's float64 mathematics on whole matrices; upstream itself passes at 1e-3."""
    data = json.loads((shared / "golden" / "nystrom_golden.json").read_text())
    config = o1core.Config(
        landmarks=data["m"], window=data["w"], sinks=data["sink"] if sinks is None else sinks
    )
    q, k, v = (np.array(data[n], np.float32).reshape(data["t"], 1, -1) for n in "qkv")
    p = data["p"]
    layer = engine.seal(q[:p], k[:p], v[:p], config)
    out = layer.extend(q[p:], k[p:], v[p:])
    want = np.array(data[key]).reshape(data["t"], 1, -1)[p:]
    error = np.abs(out - want)
    assert error.max() < 1e-5
    assert error.mean() < 1e-6


def test_small_vectors_are_all_here() -> None:
    assert len(SMALL) == 8
