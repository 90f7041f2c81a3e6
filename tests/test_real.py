"""A real model's layer: the captured q, k and v of the demo."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import o1core
from o1core.exact import causal_attention
from o1core.testing import Rows


@pytest.fixture(scope="module")
def capture() -> dict[str, npt.NDArray[Any]]:
    (path,) = (
        x
        for x in resources.files("o1core").joinpath("data").iterdir()
        if x.name.startswith("smollm2-135m-layer")
    )
    with resources.as_file(path) as file:
        return dict(np.load(file))


@pytest.fixture(scope="module")
def rows(capture: dict[str, npt.NDArray[Any]]) -> Rows:
    return (
        capture["q"].astype(np.float32),
        capture["k"].astype(np.float32),
        capture["v"].astype(np.float32),
    )


def test_the_capture_says_what_it_is(capture: dict[str, npt.NDArray[Any]]) -> None:
    source = json.loads(capture["source"].item())
    text = json.dumps(source)
    assert "SmolLM2-135M-Instruct" in text
    assert "Apache-2.0" in text
    assert "pydoc_data.topics" in text
    assert capture["q"].dtype == np.float16
    assert capture["q"].shape == (2560, 9, 64)


def test_a_window_over_everything_is_exact_attention(engine: o1core.O1Batch, rows: Rows) -> None:
    q, k, v = (x[:900] for x in rows)
    config = o1core.Config(window=900)
    layer = engine.seal(q[:100], k[:100], v[:100], config)
    assert layer.exact_only
    exact = causal_attention(q, k, v, scale=1 / 8, first_row=100, dtype=np.float64)
    np.testing.assert_allclose(layer.extend(q[100:], k[100:], v[100:]), exact, atol=2e-5)
    assert layer.exact_only
