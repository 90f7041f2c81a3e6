"""Random geometries, splits and detours, against the whole-history oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import o1core
from o1core.testing import Oracle, check_output, check_state, random_rows

Detours = st.lists(st.sampled_from(["", "save", "fork", "restore"]), min_size=1, max_size=6)


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    groups = draw(st.integers(1, 3))
    windows = draw(
        st.none() | st.lists(st.integers(1, 90), min_size=groups, max_size=groups).map(tuple)
    )
    return {
        "config": o1core.Config(
            landmarks=draw(st.sampled_from([0, 4, 5, 8, 16])),
            window=draw(st.integers(1, 90)),
            sinks=draw(st.integers(0, 6)),
            rectifier=draw(st.sampled_from(["aggregate", "fm"])),
            windows=windows,
            ridge=draw(st.sampled_from([1e-6, 1e-2])),
        ),
        "shape": {
            "groups": groups,
            "heads_per_group": draw(st.integers(1, 3)),
            "head_dim": draw(st.integers(1, 20)),
            "value_dim": draw(st.integers(1, 20)),
            "peak": draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
            "drift": draw(st.sampled_from([0.0, 2.0])),
        },
        "prompt": draw(st.integers(0, 160)),
        "chunks": draw(st.lists(st.integers(0, 130), min_size=1, max_size=5)),
        "seed": draw(st.integers(0, 2**20)),
    }


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=layers(), detours=Detours, dirty=st.booleans())
@pytest.mark.filterwarnings("ignore::o1core.BackendFallbackWarning")
def test_any_stream(
    engine: o1core.O1Batch, case: dict[str, Any], detours: list[str], dirty: bool
) -> None:
    config, prompt, total = case["config"], case["prompt"], sum(case["chunks"])
    q, k, v = random_rows(case["seed"], prompt + total, **case["shape"])
    layer = engine.seal(q[:prompt], k[:prompt], v[:prompt], config)
    oracle = Oracle(config, (q[:prompt], k[:prompt], v[:prompt]))
    outs, at = [], prompt
    for i, size in enumerate(case["chunks"]):
        detour = detours[i % len(detours)]
        if detour == "save":
            layer = engine.load(layer.state())
        elif detour == "fork":
            layer = layer.fork()
        elif detour == "restore":
            snapshot = layer.snapshot()
            layer.extend(q[:5], k[:5], v[:5])
            layer.restore(snapshot)
        rows = q[at : at + size], k[at : at + size], v[at : at + size]
        outs.append(layer.extend(*rows))
        oracle.append(rows)
        at += size
    check_output(np.concatenate(outs), oracle.expected(range(prompt, at)))
    check_state(layer.state(), oracle.state())
