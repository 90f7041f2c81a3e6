"""Layers side by side: copies stand alone, what was undone never happened, a repeat is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.executor import Executor
from o1core.layout import as_meta
from o1core.plan import MAX_SUB_CHUNK, Plan
from o1core.testing.around import cleared
from o1core.testing.cases import Case
from o1core.testing.comparison import check_arrays, check_output
from o1core.testing.oracle import Rows
from o1core.testing.run import start
from o1core.testing.steps import state_arrays

__all__ = ["check_handles"]

ROWS = MAX_SUB_CHUNK + 6
"""Of a call: more than one sub-chunk."""

Buffers = dict[str, npt.NDArray[Any]]


def check_handles(executor: Executor, case: Case) -> None:
    """AssertionError unless an executor keeps the states of layers apart and can take calls back.

    A call is undone and repeated, which must give the same bytes; so must a copy that was made
    before; and a layer goes on after another one ran, to rows and a state that the oracle finds
    right. Nothing is checked of a case without a sealed layer, or without rows.
    """
    begun = start(case)
    rows = min(sum(case.chunks) // 2, ROWS)
    if begun is None or rows == 0:
        return
    state, oracle = begun
    g = state.geometry
    first, second = (_rows(case, at, rows) for at in (0, rows))
    plan = executor.plan(g, rows)
    handle = executor.allocate(g)
    executor.write(handle, state.buffers())
    before = _held(executor, handle)
    twin = executor.copy(handle, g)
    checkpoint = executor.checkpoint(handle, [plan])
    out = _run(executor, plan, handle, first)
    after = _held(executor, handle)
    _same(_held(executor, twin), before, "a copy, once its original has moved on")
    executor.rollback(handle, checkpoint)
    _same(_held(executor, handle), before, "a layer whose call was undone")
    for name, one in (("a call that is repeated", handle), ("the call on a copy", twin)):
        if _run(executor, plan, one, first).tobytes() != out.tobytes():
            raise AssertionError(f"{name} must give the same bytes")
        _same(_held(executor, one), after, f"the state after {name}")
    _check_many_far_keys(executor, plan, state.buffers(), first, out)
    # Of another layer, which differs in all that sealing settled.
    stranger = executor.allocate(g)
    fixed = {b.name for b in plan.buffers if b.role == "sealed"}
    changed = {n: x * np.float32(0.5) if n in fixed else x for n, x in state.buffers().items()}
    executor.write(stranger, changed)
    q, k, v = (np.ascontiguousarray(x[::-1]) for x in second)
    for one in (twin, stranger):
        _run(executor, plan, one, (q, k, v))
    oracle.append(first)
    oracle.append(second)
    out = _run(executor, plan, handle, second)
    at = case.prompt + rows
    check_output(out, oracle.expected(range(at, at + rows)), "out, after another layer's call,")
    wanted = oracle.state()
    meta = np.array([(*row, w) for row, w in zip(wanted["meta"], g.windows, strict=True)])
    check_arrays(state_arrays(g, executor.read(handle), meta), wanted)


def _check_many_far_keys(
    executor: Executor, plan: Plan, buffers: Buffers, rows: Rows, want: npt.NDArray[np.float32]
) -> None:
    """After a long stream: only whether there are far keys matters, but all must be counted."""
    meta = buffers["meta"].copy()
    meta[:, 2] += np.uint32(2**31) * (meta[:, 2] > 0)
    handle = executor.allocate(plan.geometry)
    executor.write(handle, {**buffers, "meta": meta})
    if _run(executor, plan, handle, rows).tobytes() != want.tobytes():
        raise AssertionError("the count of far keys must change nothing but the count")
    after = list(plan.meta_after(as_meta(meta)))
    for found in (as_meta(executor.read(handle)["meta"]), list(executor.meta(handle))):
        if found != after:
            raise AssertionError(f"meta must be {after} after many far keys, got {found}")


def _rows(case: Case, at: int, rows: int) -> Rows:
    part = slice(case.prompt + at, case.prompt + at + rows)
    q, k, v = (x[part] for x in case.rows())
    return q, k, v


def _run(executor: Executor, plan: Plan, handle: Any, rows: Rows) -> npt.NDArray[np.float32]:
    g = plan.geometry
    out = np.full((plan.rows, g.heads, g.value_dim), np.nan, np.float32)
    executor.run(plan, handle, *rows, out)
    return out


def _held(executor: Executor, handle: Any) -> Buffers:
    """The state of a handle, without what lies in slots that hold no key."""
    buffers = executor.read(handle)
    return cleared(buffers, buffers["meta"])


def _same(found: Buffers, wanted: Buffers, what: str) -> None:
    for name, array in wanted.items():
        if found[name].tobytes() != array.tobytes():
            raise AssertionError(f"{what}: {name} must be bit for bit what it was")
