"""Kernel after kernel: what each writes is right, and nothing else has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.config import Geometry
from o1core.executor import Executor
from o1core.layout import state_buffers
from o1core.plan import MAX_SUB_CHUNK, Plan
from o1core.testing.around import cleared
from o1core.testing.cases import Case
from o1core.testing.comparison import (
    UNTOUCHED,
    Report,
    check_arrays,
    check_output,
    check_same_output,
)
from o1core.testing.oracle import Expected, Rows
from o1core.testing.run import start

__all__ = ["Steps", "check_same_steps", "check_steps", "state_arrays"]

STEP_ROWS, STEP_SUB_CHUNKS = 2 * MAX_SUB_CHUNK + 2, 5
"""How much of a case is run kernel by kernel, at most."""

Array = npt.NDArray[Any]


class Steps:
    """What the kernels of a backend wrote in a case: arrays by sub-chunk, kernel and name."""

    def __init__(self) -> None:
        self.report = Report()
        self.written: dict[tuple[int, str, str], Array] = {}
        self.expected: dict[int, Expected] = {}


def check_steps(executor: Executor, case: Case) -> Steps | None:
    """Run the first rows of a case kernel by kernel (see `Executor.steps`).

    After each stop, what the plan says its kernels write must be right, and all else bit for bit
    what it was. AssertionError if not; None if the executor cannot stop, or the case has no sealed
    layer to run.
    """
    begun = start(case)
    if begun is None:
        return None
    state, _ = begun
    g = state.geometry
    handle = executor.allocate(g)
    executor.write(handle, state.buffers())
    steps = Steps()
    for sub_chunk in _sub_chunks(case):
        steps.expected[sub_chunk.first_row] = sub_chunk.expected
        plan = executor.plan(g, len(sub_chunk.rows[0]))
        if not _check_sub_chunk(executor, handle, plan, sub_chunk, steps):
            return None
    return steps


@dataclass(frozen=True)
class _SubChunk:
    first_row: int
    rows: Rows
    expected: Expected
    state: Mapping[str, Array]


@cache
def _sub_chunks(case: Case) -> tuple[_SubChunk, ...]:
    """The rows that are run, and what they and the state after them must be."""
    begun = start(case)
    assert begun is not None
    oracle, found = begun[1], []
    q, k, v = case.rows()
    most = min(MAX_SUB_CHUNK, *oracle.geometry.windows)
    last = min(sum(case.chunks), STEP_ROWS, STEP_SUB_CHUNKS * most)
    for at in range(0, last, most):
        part = slice(case.prompt + at, case.prompt + min(at + most, last))
        rows = q[part], k[part], v[part]
        oracle.append(rows)
        expected = oracle.expected(range(part.start, part.stop))
        found.append(_SubChunk(at, rows, expected, oracle.state()))
    return tuple(found)


def _check_sub_chunk(
    executor: Executor,
    handle: Any,
    plan: Plan,
    sub_chunk: _SubChunk,
    steps: Steps,
) -> bool:
    g, left = plan.geometry, {d.kernel: d for d in plan.dispatches}
    at, wanted = sub_chunk.first_row, sub_chunk.state
    before = executor.read(handle)
    out = np.full((plan.rows, g.heads, g.value_dim), np.nan, np.float32)
    stops = executor.steps(plan, handle, *sub_chunk.rows, out)
    if stops is None:
        return False
    meta = np.array(wanted["meta"])
    after = np.concatenate((meta, np.array(g.windows, np.uint32)[:, None]), axis=1)
    written: set[str] = set()
    for names in stops:
        found = executor.read(handle)
        arrays = state_arrays(g, found, after)
        for name in names:
            if name not in left:
                raise AssertionError(f"{name} must run once, and be of the plan: {sorted(left)}")
            writes = set(left.pop(name).writes)
            written |= writes
            if "out" in writes:
                label = f"out of rows {at}..{at + plan.rows - 1}"
                steps.report.add(check_output(out, steps.expected[at], label))
                steps.written[at, name, "out"] = out.copy()
            mine = [n for n, buffer in _buffer_of(g).items() if buffer in writes]
            try:
                share = check_arrays(arrays, {n: wanted[n] for n in mine}, UNTOUCHED)
            except AssertionError as fault:
                raise AssertionError(f"after {name}, sub-chunk at row {at}: {fault}") from None
            steps.report.worst = max(steps.report.worst, share)
            steps.written.update({(at, name, n): arrays[n] for n in mine})
        for buffer in before:
            if buffer not in written and found[buffer].tobytes() != before[buffer].tobytes():
                raise AssertionError(
                    f"{' and '.join(names)}, sub-chunk at row {at}: {buffer} has changed, which "
                    "the plan has another kernel write, or none"
                )
        if "out" not in written and not np.isnan(out).all():
            raise AssertionError(f"{' and '.join(names)}: out was written before attend")
    if left:
        raise AssertionError(f"steps must run every kernel, but did not run {', '.join(left)}")
    return True


@lru_cache(maxsize=64)
def _buffer_of(g: Geometry) -> dict[str, str]:
    """The arrays of a `LayerState`, and the buffers that they lie in."""
    whole = {b.name: np.zeros(b.shape or (), b.dtype) for b in state_buffers(g)}
    names = {n: n for n in ("meta", "ring_k", "ring_v", "sink_k", "sink_v")}
    for buffer in g.far.buffers(g):
        # Whichever arrays a mark in the buffer shows up in.
        marked = {**whole, buffer.name: np.ones_like(whole[buffer.name])}
        names |= {n: buffer.name for n, x in g.far.unpack(marked).items() if x.any()}
    return names


def state_arrays(g: Geometry, buffers: Mapping[str, Array], meta: Array) -> dict[str, Array]:
    """Buffers as the arrays of a `LayerState`, without what lies in slots that hold no key.

    meta says which do; it may be another than the buffer of that name.
    """
    held = cleared(buffers, meta)
    near = {n: held[n] for n in ("ring_k", "ring_v", "sink_k", "sink_v")}
    return {"meta": held["meta"][:, :3], **near, **g.far.unpack(held)}


def check_same_steps(a: Steps, b: Steps) -> Report:
    """AssertionError unless the kernels of two backends wrote the same, each within its bound."""
    report = Report()
    if a.written.keys() != b.written.keys():
        raise AssertionError(f"kernels differ: {sorted(a.written.keys() ^ b.written.keys())}")
    by_kernel: dict[tuple[int, str], dict[str, tuple[Array, Array]]] = {}
    for (at, kernel, name), array in a.written.items():
        by_kernel.setdefault((at, kernel), {})[name] = array, b.written[at, kernel, name]
    for (at, kernel), arrays in by_kernel.items():
        label = f"after {kernel}, sub-chunk at row {at}"
        if (outs := arrays.pop("out", None)) is not None:
            report.add(check_same_output(*outs, a.expected[at], label))
        first, second = ({n: pair[i] for n, pair in arrays.items()} for i in (0, 1))
        try:
            share = check_arrays(first, second, UNTOUCHED)
        except AssertionError as fault:
            raise AssertionError(f"{label}: {fault}") from None
        report.worst = max(report.worst, share)
    return report
