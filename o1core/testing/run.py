"""Running cases: what a backend answers, whether that is right, and whether two agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.engine import Layer, O1Batch
from o1core.executor import Executor
from o1core.seal import seal
from o1core.state import LayerState
from o1core.testing.cases import Case, cases
from o1core.testing.comparison import (
    UNTOUCHED,
    Report,
    adopt,
    check_arrays,
    check_output,
    check_same_output,
    check_state,
)
from o1core.testing.oracle import CONSTANTS, Expected, Oracle, geometry_of

__all__ = ["Answer", "answer", "check", "check_backend", "check_same", "run_case", "start"]

AMBIGUOUS_SHARE = 0.02


@dataclass(frozen=True)
class Answer:
    """What a backend makes of a case: the output, the state after sealing and at the end."""

    out: F32
    sealed: LayerState
    final: LayerState


@dataclass(frozen=True)
class _Wanted:
    """What a case must give; worked out once, whatever the number of backends.

    sealed is what the core gives, since sealing is none of a backend's work, once the oracle has
    found it right; replaced are the arrays that the case alters after that.
    """

    sealed: LayerState
    replaced: dict[str, F32]
    rows: Expected
    final: dict[str, npt.NDArray[Any]]


@cache
def _wanted(case: Case) -> _Wanted:
    q, k, v = case.rows()
    last = case.prompt + sum(case.chunks)
    prompt, rest = slice(case.prompt), slice(case.prompt, last)
    sealed = _sealed(case, case.prompt)
    oracle = Oracle(case.config, (q[prompt], k[prompt], v[prompt]))
    check_state(sealed, oracle.state())
    replaced: dict[str, F32] = {}
    if case.alter is not None:
        given = {n: sealed.arrays[n].astype(np.float64) for n in CONSTANTS}
        replaced = {n: x.astype(np.float32) for n, x in case.alter(given).items()}
    adopt(oracle, sealed)
    oracle.append((q[rest], k[rest], v[rest]))
    if sealed.exact_only and oracle.sealed:
        adopt(oracle, _sealed(case, oracle.sealed_rows))
    if oracle.constants is not None:
        oracle.constants.update(replaced)
    rows = oracle.expected(case.prompt + i for i in case.checked)
    return _Wanted(sealed, replaced, rows, oracle.state())


def _sealed(case: Case, rows: int) -> LayerState:
    q, k, v = (x[:rows] for x in case.rows())
    return seal(q, k, v, case.config, geometry_of(case.config, (q, k, v), rows), None)


def start(case: Case) -> tuple[LayerState, Oracle] | None:
    """The state that the first row after the prompt meets, and an oracle that stands there.

    None for a layer that is not sealed by then.
    """
    want = _wanted(case)
    if want.sealed.exact_only:
        return None
    state = want.sealed.replace(**want.replaced)
    q, k, v = (x[: case.prompt] for x in case.rows())
    constants = {n: state.arrays[n] for n in CONSTANTS if n in state.arrays}
    return state, Oracle(case.config, (q, k, v), constants or None)


def answer(engine: O1Batch, case: Case, chunks: Sequence[int] | None = None) -> Answer:
    """Run a case on an engine, unchecked; chunks cuts its rows differently."""
    q, k, v = case.rows()
    prompt = slice(case.prompt)
    layer = engine.seal(q[prompt], k[prompt], v[prompt], case.config)
    sealed = _state(layer)
    if case.alter is not None:
        layer = engine.load(sealed.replace(**_wanted(case).replaced))
    outs, at = [], case.prompt
    for size in case.chunks if chunks is None else chunks:
        rows = slice(at, at + size)
        outs.append(layer.extend(q[rows], k[rows], v[rows]))
        at += size
    return Answer(np.concatenate(outs), sealed, _state(layer))


def _state(layer: Layer) -> LayerState:
    try:
        return layer.state()
    except ValueError as fault:
        raise AssertionError(f"backend {layer.backend} holds no possible state: {fault}") from fault


def check(case: Case, given: Answer) -> Report:
    """AssertionError unless an answer is right: output row by row, and both states."""
    want = _wanted(case)
    check_state(given.sealed, want.sealed.arrays, tuple(want.sealed.arrays))
    report = check_output(given.out[case.checked], want.rows, case.name)
    if report.ambiguous > max(1, AMBIGUOUS_SHARE * report.results):
        raise AssertionError(
            f"{case.name}: {report.ambiguous} of {report.results} results are ambiguous, "
            f"more than {AMBIGUOUS_SHARE:.0%}: the case checks too little"
        )
    # What sealing settled no kernel may touch.
    share = check_state(given.final, want.final, UNTOUCHED)
    report.worst = max(report.worst, share)
    if case.vectors is not None:
        report.worst = max(report.worst, _check_vectors(case, given))
    return report


def _check_vectors(case: Case, given: Answer) -> float:
    """Against the upstream engine: its states, and its output within the bound of the oracle's."""
    assert case.vectors is not None
    arrays = case.vectors()
    check_output(arrays["out"][case.checked], _wanted(case).rows, "out of the golden file")
    worst = 0.0
    for prefix, state in (("sealed_", given.sealed), ("final_", given.final)):
        want = {n.removeprefix(prefix): x for n, x in arrays.items() if n.startswith(prefix)}
        if not want:
            raise AssertionError(f"{case.name} must have arrays {prefix}*, got {', '.join(arrays)}")
        worst = max(worst, check_arrays(state.arrays, want))
    return worst


def check_same(case: Case, a: Answer, b: Answer) -> Report:
    """AssertionError unless the answers of two backends agree: outputs, and states at the end."""
    report = check_same_output(a.out[case.checked], b.out[case.checked], _wanted(case).rows)
    share = check_state(a.final, b.final.arrays, UNTOUCHED)
    report.worst = max(report.worst, share)
    return report


def run_case(engine: O1Batch, case: Case, chunks: Sequence[int] | None = None) -> Report:
    """One case on one engine: outputs row by row, and the state after sealing and at the end.

    AssertionError naming what differs; otherwise how close the worst came to its bound. chunks cuts
    the same rows differently.
    """
    return check(case, answer(engine, case, chunks))


def check_backend(
    backend: str | Executor, only: Iterable[Case] | None = None, *, device: Any = None
) -> dict[str, Report]:
    """Every case on a backend, without fallback: `{case: report}`, or AssertionError."""
    with O1Batch(backend, fallback=None, device=device) as engine:
        return {case.name: run_case(engine, case) for case in (cases() if only is None else only)}
