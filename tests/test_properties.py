"""Random geometries, splits and detours between all backends, against the whole-history oracle."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import o1core
from o1core.testing import (
    DETOURS,
    Case,
    Rows,
    Stream,
    random_rows,
    random_stream,
    run_case,
    run_stream,
)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    groups = draw(st.integers(1, 3))
    windows = st.lists(st.integers(1, 90), min_size=groups, max_size=groups).map(tuple)
    call = st.tuples(st.sampled_from(DETOURS), st.integers(0, 130))
    return Stream(
        config=o1core.Config(
            landmarks=draw(st.sampled_from([0, 4, 5, 8, 16])),
            window=draw(st.integers(1, 90)),
            sinks=draw(st.integers(0, 6)),
            rectifier=draw(st.sampled_from(["aggregate", "fm"])),
            windows=draw(st.none() | windows),
            ridge=draw(st.sampled_from([1e-6, 1e-2])),
        ),
        seed=draw(st.integers(0, 2**20)),
        prompt=draw(st.integers(0, 160)),
        calls=tuple(draw(st.lists(call, min_size=1, max_size=6))),
        groups=groups,
        heads_per_group=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 20)),
        value_dim=draw(st.integers(1, 20)),
        peak=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        drift=draw(st.sampled_from([0.0, 2.0])),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(stream=streams())
def test_any_stream(hostile: o1core.O1Batch, stream: Stream) -> None:
    run_stream(hostile, stream)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(stream=streams(), order=st.randoms(use_true_random=False))
def test_any_stream_that_moves(
    engines: dict[str, o1core.O1Batch], stream: Stream, order: random.Random
) -> None:
    """From backend to backend in mid-stream, with other detours in between."""
    columns = list(engines.values())
    order.shuffle(columns)
    calls = tuple(
        ("move" if i % 2 else detour, rows) for i, (detour, rows) in enumerate(stream.calls)
    )
    run_stream(columns[0], dataclasses.replace(stream, calls=calls), columns[1:])


def test_random_streams_have_every_detour() -> None:
    for seed in range(4):
        stream = random_stream(seed)
        assert stream == random_stream(seed)
        assert {detour for detour, _ in stream.calls} == set(DETOURS)
    assert random_stream(0) != random_stream(1)


@pytest.mark.parametrize("backend", ["numpy"], indirect=True)
def test_a_move_that_loses_something_is_caught(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = (("none", 100), ("move", 30))
    stream = Stream(o1core.Config(8, 20, 2), 0, 80, calls)  # type: ignore[arg-type]
    with o1core.O1Batch("numpy") as other:
        run_stream(engine, stream, [other])
        load = other.load
        for name in ("ring_v", "far_num", "mix"):

            def loses(state: o1core.LayerState, name: str = name) -> o1core.Layer:
                return load(state.replace(**{name: state.arrays[name] * 0}))

            monkeypatch.setattr(other, "load", loses)
            with pytest.raises(AssertionError):
                run_stream(engine, stream, [other])


def test_numerators_that_cancel(engine: o1core.O1Batch) -> None:
    """Queries of 0: a numerator is a plain sum of 230 values, and here nearly 0."""
    config = o1core.Config(4, 1, 2, windows=(7, 1))
    sizes = {"groups": 2, "heads_per_group": 1, "head_dim": 3, "value_dim": 1, "peak": 0.0}
    calls: Any = (("none", 130), ("move", 52))
    run_stream(engine, Stream(config, 5426, 101, calls, **sizes))  # type: ignore[arg-type]


def test_ill_conditioned_mix(engine: o1core.O1Batch) -> None:
    """Landmark logits from -17 to 14: the inverse of the Gram matrix is too inaccurate for them.

    The oracle once took it, and blamed every backend.
    """
    windows = (65, 2, 1, 200, 64, 17, 17, 2, 65, 65, 17, 1, 2, 17, 65, 17, 17, 64, 1, 64)

    def rows() -> Rows:
        return random_rows(725782, 278, groups=20, head_dim=2, value_dim=16, peak=8.0, drift=3.0)

    config = o1core.Config(130, 100, 64, windows=windows)
    run_case(engine, Case("ill-conditioned", config, rows, 174, (2, 2, 100)))


@pytest.mark.parametrize(
    ("landmarks", "window", "prompt", "seed", "shape"),
    [
        (16, 88, 195, 729587095, {"groups": 3}),
        (64, 50, 256, 644106383, {"groups": 2, "head_dim": 2}),
        (8, 33, 187, 814781650, {"groups": 3, "head_dim": 8}),
    ],
)
def test_extreme_landmark_logits(
    engine: o1core.O1Batch,
    landmarks: int,
    window: int,
    prompt: int,
    seed: int,
    shape: dict[str, Any],
) -> None:
    """No float64 knows the small entries of such a mix; rows follow from what the layer has."""
    config = o1core.Config(landmarks, window, 0)
    sizes = {"head_dim": 16, "value_dim": 4, "peak": 20.0, "drift": 10.0, **shape}
    run_stream(engine, Stream(config, seed, prompt, (("none", 20), ("none", 20)), **sizes))
