"""The vectors of the upstream engine that are not in the table, or cut as the table does not."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support import every_column

import o1core
from o1core.testing import Case, cases, golden_case, run_case

SMALL = [case for case in cases() if case.vectors is not None]


def test_small_vectors_are_in_the_table() -> None:
    assert len(SMALL) == 8


@every_column
@pytest.mark.parametrize("cut", ["whole", "ones", "odd"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small_vectors_cut_differently(engine: o1core.O1Batch, case: Case, cut: str) -> None:
    total = sum(case.chunks)
    first = {"whole": (), "ones": (1,) * min(total, 90), "odd": (7, 17, 3)}[cut]
    run_case(engine, case, (*first, total - sum(first)))


@every_column
@pytest.mark.parametrize("name", ["model_like", "production"])
def test_large_vectors(engine: o1core.O1Batch, shared: Path, name: str) -> None:
    run_case(engine, golden_case(shared / "golden" / f"{name}.npz"))


@pytest.mark.parametrize("prefix", ["sealed_", "final_"])
@pytest.mark.parametrize("backend", ["numpy"], indirect=True)
def test_a_wrong_vector_is_noticed(engine: o1core.O1Batch, prefix: str) -> None:
    """The comparison with upstream's arrays is one: of other arrays it complains."""
    case = SMALL[0]
    assert case.vectors is not None
    arrays = case.vectors()
    names = [name for name in arrays if name.startswith(prefix)]
    assert len(names) >= 6
    for name in [*names, "out"]:
        changed = arrays[name].copy()
        changed[...] += np.array(1, changed.dtype)
        wrong = dataclasses.replace(case, vectors=partial(dict, {**arrays, name: changed}))
        with pytest.raises(AssertionError, match=name.removeprefix(prefix)):
            run_case(engine, wrong)


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
