"""The rows that are measured, and what a candidate has to make of them first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core import reference
from o1core.checks import F32
from o1core.config import Config, Geometry
from o1core.engine import Layer, O1Batch
from o1core.state import LayerState
from o1core.testing.cases import random_rows
from o1core.testing.comparison import UNTOUCHED, adopt, check_output, check_state
from o1core.testing.oracle import Expected, Oracle, Rows

__all__ = ["STANDING_ROWS", "Start", "Truth", "agree", "check_standing", "topical_rows"]

TOPIC = 0.6
"""Size of what the rows of a topic have in common, relative to their noise."""
TOPICS = 32
PROMPT = 1024
SAMPLE = 8
"""Rows of a call that are held against the oracle."""
STANDING_ROWS = 2
"""Rows for `check_standing`, which computes them one by one."""
TOLERANCE = 1e-4
"""Largest difference between two right answers on such rows, relative to the largest number: that
of docs/operator.md section 9 for sums over many keys."""


@lru_cache(maxsize=16)
def topical_rows(g: Geometry, seed: int, count: int, prompt: int = PROMPT) -> Rows:
    """Noise around topics that follow each other, each for the length of a landmark's segment.

    Of noise alone every segment has the same mean, and the far field becomes a difference of large
    numbers that two right candidates need not agree on.
    """
    q, k, v = random_rows(
        seed,
        count,
        groups=g.groups,
        heads_per_group=g.heads_per_group,
        head_dim=g.head_dim,
        value_dim=g.value_dim,
    )
    topics = np.random.default_rng(0).standard_normal((TOPICS, g.head_dim))
    at = np.arange(count) // max(1, prompt // (g.landmarks or TOPICS)) % TOPICS
    topic = (TOPIC * topics[at])[:, None].astype(np.float32)
    return q + topic, k + topic, v


class Start:
    """A sealed layer's state, from which every candidate goes on, and its prompt."""

    def __init__(self, config: Config, g: Geometry) -> None:
        self.config, self.geometry = config, g
        rows = max(PROMPT, 2 * config.seal_rows, 8 * config.landmarks)
        self.prompt = topical_rows(g, 1, rows, rows)
        with O1Batch("numpy", fallback=None) as engine:
            self.state: LayerState = engine.seal(*self.prompt, config).state()


@dataclass
class Truth:
    """What one call of some rows must give: all results up to rounding, some by the oracle."""

    rows: Rows
    out: F32
    sample: list[int]
    expected: Expected
    state: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, start: Start, count: int) -> Truth:
        rows = topical_rows(start.geometry, 2, count)
        oracle = Oracle(start.config, start.prompt)
        adopt(oracle, start.state)
        oracle.append(rows)
        # The first and the last row, and those around the end of a sub-chunk, are among them.
        spread = np.linspace(0, count - 1, SAMPLE - 4).round().astype(int).tolist()
        sample = sorted({*spread, *(i for i in (1, 63, 64, 65) if i < count)})
        expected = oracle.expected(len(start.prompt[0]) + i for i in sample)
        with O1Batch("numpy", fallback=None) as engine:
            out = engine.load(start.state).extend(*rows)
        check_output(out[sample], expected, "out of the numpy backend")
        return cls(rows, out, sample, expected, oracle.state())

    def check(self, out: npt.NDArray[Any], layer: Layer) -> None:
        """AssertionError unless the output of a call is right, and the state it left."""
        if out.shape != self.out.shape:
            raise AssertionError(f"out must have shape {self.out.shape}, got {out.shape}")
        check_output(out[self.sample], self.expected)
        agree(out, self.out)
        check_state(layer.state(), self.state, UNTOUCHED)


def agree(out: npt.NDArray[Any], want: npt.NDArray[Any]) -> None:
    """AssertionError unless two outputs are equal up to rounding."""
    error = np.abs(out - want).max() / np.abs(want).max()
    if not error <= TOLERANCE:
        raise AssertionError(
            f"out differs by {error:.2g} of the largest value, allowed is {TOLERANCE:g}"
        )


def check_standing(layer: Layer, rows: Rows) -> None:
    """AssertionError unless a layer, wherever it stands, goes on as its state says it must."""
    q, k, v = rows
    want = reference.load(layer.state(), np.float64).extend(q, k, v)
    agree(layer.fork().extend(q, k, v), want)
