"""Streams: a layer extended in random pieces, with detours, and moved between backends midway."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from o1core.config import Config
from o1core.engine import Layer, O1Batch
from o1core.state import LayerState
from o1core.testing.cases import random_rows
from o1core.testing.comparison import EXACT, UNTOUCHED, Report, adopt, check_output, check_state
from o1core.testing.oracle import Oracle, Rows

__all__ = ["DETOURS", "Detour", "Stream", "random_stream", "run_stream"]

Detour = Literal["none", "fork", "restore", "durable", "save", "move"]
"""What happens before a call.

fork: a fork goes on in the layer's place, while the layer and a fork of the fork take other rows.
restore, durable: other rows come first and are undone by a snapshot, on the device or on the host,
twice. save: the layer goes through a file. move: its state
goes on in the next engine.
"""

DETOURS: tuple[Detour, ...] = get_args(Detour)


@dataclass(frozen=True)
class Stream:
    """A sequence and how it comes: a prompt, then calls, each after a detour.

    shape are the sizes of `random_rows`; peak and drift as there.
    """

    config: Config
    seed: int
    prompt: int
    calls: tuple[tuple[Detour, int], ...]
    groups: int = 1
    heads_per_group: int = 1
    head_dim: int = 16
    value_dim: int = 16
    peak: float = 1.0
    drift: float = 0.0

    def rows(self) -> Rows:
        """All rows, those of the prompt first."""
        return random_rows(
            self.seed,
            self.prompt + sum(rows for _, rows in self.calls),
            groups=self.groups,
            heads_per_group=self.heads_per_group,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            peak=self.peak,
            drift=self.drift,
        )


def random_stream(seed: int) -> Stream:
    """A small stream; the same seed gives the same one."""
    rng = np.random.default_rng((seed, 0))

    def integer(first: int, last: int) -> int:
        return int(rng.integers(first, last + 1))

    groups = integer(1, 3)
    windows = tuple(integer(1, 90) for _ in range(groups)) if integer(0, 1) else None
    # The detours in random order, so that all are there.
    detours: list[Detour] = [DETOURS[i] for i in rng.permutation(len(DETOURS))]
    return Stream(
        config=Config(
            landmarks=int(rng.choice([0, 4, 5, 8, 16])),
            window=integer(1, 90),
            sinks=integer(0, 6),
            rectifier="fm" if integer(0, 1) else "aggregate",
            windows=windows,
            ridge=float(rng.choice([1e-6, 1e-2])),
        ),
        seed=seed,
        prompt=integer(0, 160),
        calls=tuple((detour, integer(0, 130)) for detour in detours),
        groups=groups,
        heads_per_group=integer(1, 3),
        head_dim=integer(1, 20),
        value_dim=integer(1, 20),
        peak=float(rng.choice([0.0, 0.5, 1.0, 3.0])),
        drift=float(rng.choice([0.0, 2.0])),
    )


def run_stream(engine: O1Batch, stream: Stream, others: Sequence[O1Batch] = ()) -> Report:
    """Run a stream; moves visit the other engines in turn, and come back.

    AssertionError unless every row is within its bound and the state right at the end and after
    each move; otherwise how close the worst row came.
    """
    q, k, v = stream.rows()
    prompt = slice(stream.prompt)
    layer = engine.seal(q[prompt], k[prompt], v[prompt], stream.config)
    oracle = Oracle(stream.config, (q[prompt], k[prompt], v[prompt]))
    engines = cycle((*others, engine))
    outs, at, waiting = [], stream.prompt, True
    for detour, size in stream.calls:
        if waiting and oracle.sealed:
            adopt(oracle, layer.state())
            waiting = False
        if detour == "move":
            check_state(layer.state(), oracle.state(), EXACT if waiting else UNTOUCHED)
            engine = next(engines)
        layer = _detour(engine, layer, detour)
        rows = slice(at, at + size)
        outs.append(layer.extend(q[rows], k[rows], v[rows]))
        oracle.append((q[rows], k[rows], v[rows]))
        at += size
    if waiting and oracle.sealed:
        adopt(oracle, layer.state())
    report = check_output(np.concatenate(outs), oracle.expected(range(stream.prompt, at)))
    report.worst = max(report.worst, check_state(layer.state(), oracle.state(), UNTOUCHED))
    return report


def _detour(engine: O1Batch, layer: Layer, detour: Detour) -> Layer:
    g = layer.geometry
    groups = g.groups // (layer.batch or 1)
    sizes = {"groups": groups, "heads_per_group": g.heads_per_group, "head_dim": g.head_dim}
    others = [random_rows(i, 5, value_dim=g.value_dim, **sizes) for i in (0, 1)]
    if detour == "fork":
        # Both go on: what one does must not show in the other.
        fork = layer.fork()
        layer.extend(*others[0])
        fork.fork().extend(*others[1])
        return fork
    if detour in ("restore", "durable"):
        snapshot = layer.snapshot(durable=detour == "durable")
        for rows in others:
            layer.extend(*rows)
            layer.restore(snapshot)
    elif detour == "save":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layer.safetensors"
            layer.state().save(path)
            return engine.load(LayerState.load(path))
    elif detour == "move":
        return engine.load(layer.state())
    return layer
