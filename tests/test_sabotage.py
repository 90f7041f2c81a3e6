"""The suite can fail: executors that are wrong in one place are all caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import SUBSET, every_column

import o1core
from o1core.checks import F32
from o1core.layout import Meta
from o1core.testing import (
    Case,
    Hostile,
    cases,
    check_backend,
    check_handles,
    check_steps,
    sabotaged,
)
from o1core.testing.around import Around
from o1core_numpy import NumpyExecutor
from o1core_numpy.cohort import Cohort
from o1core_numpy.kernels import KERNELS, Call, Kernel


def with_kernels(**replaced: Kernel) -> NumpyExecutor:
    kind = type("Wrong", (NumpyExecutor,), {"kernels": {**KERNELS, **replaced}})
    executor: NumpyExecutor = kind()
    return executor


def after_attend(change: Callable[[Cohort, Call], None]) -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        KERNELS["attend"](c, call)
        change(c, call)

    return with_kernels(attend=attend)


def fill(value: float) -> NumpyExecutor:
    def change(c: Cohort, call: Call) -> None:
        call.out[:] = value

    return after_attend(change)


def reorder(*order: str) -> NumpyExecutor:
    class Reordered(NumpyExecutor):
        def run(self, plan: o1core.Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
            chunks = [
                [d for d in plan.dispatches if d.first_row == first] for first, _ in plan.sub_chunks
            ]
            dispatches = [
                d
                for chunk in chunks
                for d in sorted(
                    chunk, key=lambda d: order.index(d.kernel) if d.kernel in order else -1
                )
            ]
            wrong = dataclasses.replace(plan, dispatches=tuple(dispatches))
            return super().run(wrong, handle, q, k, v, out)

    return Reordered()


def ring_slot_off_by_one() -> NumpyExecutor:
    def ring_commit(c: Cohort, call: Call) -> None:
        KERNELS["ring_commit"](c, call)
        held = slice(c.start, c.start + min(c.meta.length + call.rows, c.window))
        c.keys[:, held] = np.roll(c.keys[:, held], 1, axis=1)
        c.values[:, held] = np.roll(c.values[:, held], 1, axis=1)

    return with_kernels(ring_commit=ring_commit)


def evicts_one_too_many() -> NumpyExecutor:
    def ring_commit(c: Cohort, call: Call) -> None:
        KERNELS["ring_commit"](c, call)
        c.start += 1

    return with_kernels(ring_commit=ring_commit)


def stale(name: str) -> NumpyExecutor:
    def far_commit(c: Cohort, call: Call) -> None:
        before = c.far
        KERNELS["far_commit"](c, call)
        c.far = {**c.far, name: before[name]}

    return with_kernels(far_commit=far_commit)


def no_far_commit() -> NumpyExecutor:
    return with_kernels(far_commit=lambda c, call: None)


def wrong_head_order() -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        KERNELS["attend"](c, dataclasses.replace(call, q=call.q[:, :, ::-1]))

    return with_kernels(attend=attend)


def wrong_group_order() -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        KERNELS["attend"](c, dataclasses.replace(call, v=call.v[:, ::-1]))

    return with_kernels(attend=attend)


def wrong_scale() -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        KERNELS["attend"](c, dataclasses.replace(call, q=call.q * np.float32(1.001)))

    return with_kernels(attend=attend)


def low_precision() -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        k = call.k.astype(np.float16).astype(np.float32)
        KERNELS["attend"](c, dataclasses.replace(call, k=k))

    return with_kernels(attend=attend)


def ignores_rectifier() -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        g = dataclasses.replace(call.geometry, rectifier="aggregate")
        KERNELS["attend"](c, dataclasses.replace(call, geometry=g))

    return with_kernels(attend=attend)


def reads_at_the_maximum_after_the_chunk() -> NumpyExecutor:
    """The seed's first defect: rows before a massive key are read relative to it."""

    def far_e(c: Cohort, call: Call) -> None:
        KERNELS["far_e"](c, call)
        if "far_max" in c.scratch:
            top = c.scratch["far_max"][:, None]
            c.scratch["logits"] = np.where(c.scratch["logits"] < top - 80, top, c.scratch["logits"])

    return with_kernels(far_e=far_e)


def forgets_the_far_field() -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        far, c.far = c.far, {}
        KERNELS["attend"](c, call)
        c.far = far

    return with_kernels(attend=attend)


def keeps_a_negative_far_field() -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        far = c.far
        c.far = {**far, "mix_scaled": np.abs(far["mix_scaled"])}
        KERNELS["attend"](c, call)
        c.far = far

    return with_kernels(attend=attend)


def forgets_the_sinks() -> NumpyExecutor:
    def attend(c: Cohort, call: Call) -> None:
        sink_k, c.sink_k = c.sink_k, np.zeros_like(c.sink_k)
        c.sinks_before = -1
        KERNELS["attend"](c, call)
        c.sink_k = sink_k

    return with_kernels(attend=attend)


def says_a_wrong_meta() -> NumpyExecutor:
    def meta(c: Cohort, call: Call) -> None:
        KERNELS["meta"](c, call)
        c.meta = c.meta._replace(far=c.meta.far + 1)

    return with_kernels(meta=meta)


def does_nothing() -> NumpyExecutor:
    class Idle(NumpyExecutor):
        def run(self, plan: o1core.Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
            return plan.meta_after([c.meta for c in handle.cohorts for _ in range(len(c.sink_k))])

    return Idle()


SABOTAGE: dict[str, Callable[[], NumpyExecutor]] = {
    "zeros": lambda: fill(0.0),
    "nan": lambda: fill(np.nan),
    "minus-999": lambda: fill(-999.0),
    "does-nothing": does_nothing,
    "ring-slot-off-by-one": ring_slot_off_by_one,
    "evicts-one-too-many": evicts_one_too_many,
    "swapped-commits": lambda: reorder("far_e", "attend", "ring_commit", "far_commit", "meta"),
    "attend-after-far-commit": lambda: reorder(
        "far_e", "far_commit", "attend", "ring_commit", "meta"
    ),
    "meta-first": lambda: reorder("meta", "far_e", "attend", "far_commit", "ring_commit"),
    "stale-far-mass": lambda: stale("far_mass"),
    "stale-far-num": lambda: stale("far_num"),
    "stale-far-max": lambda: stale("far_max"),
    "no-far-commit": no_far_commit,
    "wrong-head-order": wrong_head_order,
    "wrong-group-order": wrong_group_order,
    "wrong-scale": wrong_scale,
    "low-precision": low_precision,
    "ignores-rectifier": ignores_rectifier,
    "maximum-after-the-chunk": reads_at_the_maximum_after_the_chunk,
    "forgets-the-far-field": forgets_the_far_field,
    "keeps-a-negative-far-field": keeps_a_negative_far_field,
    "forgets-the-sinks": forgets_the_sinks,
    "says-a-wrong-meta": says_a_wrong_meta,
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_wrong_executor_is_caught(name: str) -> None:
    executor = SABOTAGE[name]()
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        check_backend(executor, SUBSET)
    print(f"{name}: {caught.value}")


def test_the_same_check_passes_what_is_right() -> None:
    check_backend(with_kernels(), SUBSET)
    check_backend(reorder("far_e", "attend", "far_commit", "ring_commit", "meta"), SUBSET)


# On every backend -----------------------------------------------------------------------------

# One that every column passes, and in which all kernels and groups matter.
PLAIN = next(case for case in cases() if case.name == "plain")
FAULTS = [*sabotaged(NumpyExecutor())]


def test_there_are_faults_of_every_kernel() -> None:
    of = {fault.partition(":")[0] for fault in FAULTS}
    assert of >= {"far_e", "attend", "far_commit", "ring_commit", "meta"}
    assert len(FAULTS) >= 20


@every_column
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_on_every_backend(engine: o1core.O1Batch, fault: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        check_backend(sabotaged(engine._executor)[fault], [PLAIN])
    print(f"{fault}: {caught.value}")


@every_column
def test_the_same_check_passes_every_backend(engine: o1core.O1Batch) -> None:
    check_backend(Around(engine._executor), [PLAIN])


# Memory ---------------------------------------------------------------------------------------


class Careless(Around):
    """Does one thing that only hostile memory shows."""

    def __init__(self, inner: o1core.Executor, what: str) -> None:
        super().__init__(inner)
        self.what = what

    def run(self, plan: o1core.Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
        if self.what == "reads a row past the end":
            beyond = np.lib.stride_tricks.as_strided(q, (len(q) + 1, *q.shape[1:]))
            q = q + 0 * beyond[1:]
        if self.what == "multiplies free slots by 0":
            v = v + 0 * self.inner.read(handle)["ring_v"].sum()
        meta = self.inner.run(plan, handle, q, k, v, out)
        if self.what == "writes a row past the end":
            np.lib.stride_tricks.as_strided(out, (len(out) + 1, *out.shape[1:]))[-1] = 0
        return meta


class Forgetful(NumpyExecutor):
    """Leaves the last row of the output as it finds it."""

    def run(self, plan: o1core.Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
        whole = np.empty_like(out)
        meta = super().run(plan, handle, q, k, v, whole)
        out[:-1] = whole[:-1]
        return meta


class KeepsFreeSlots(NumpyExecutor):
    """Reads back what lies in free slots, as a device does."""

    def write(self, handle: Any, buffers: Any) -> None:
        super().write(handle, buffers)
        handle.written = buffers["ring_v"].copy()

    def read(self, handle: Any) -> Any:
        return {**super().read(handle), "ring_v": handle.written}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("reads a row past the end", "must be finite|NaN"),
        ("multiplies free slots by 0", "must be finite|NaN"),
        ("writes a row past the end", "wrote outside of out"),
    ],
)
def test_hostile_memory_shows_what_is_careless(what: str, message: str) -> None:
    case = next(case for case in cases() if case.name == "half-full")
    inner: o1core.Executor = NumpyExecutor()
    if "slots" in what:
        inner = KeepsFreeSlots()
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_backend(Hostile(Careless(inner, what)), [case])


def test_hostile_memory_shows_what_is_not_written() -> None:
    with pytest.raises(RuntimeError, match="NaN"):
        check_backend(Hostile(Forgetful()), [PLAIN])


# Steps ----------------------------------------------------------------------------------------


class Steps(Around):
    """Another executor's steps with something wrong at a stop, or between two."""

    def __init__(self, inner: o1core.Executor, wrong: str) -> None:
        super().__init__(inner)
        self.wrong = wrong
        self.names: tuple[str, ...] = ()

    def read(self, handle: Any) -> Any:
        state = self.inner.read(handle)
        if self.wrong == "far_e moves the ring" and self.names == ("far_e",):
            state["ring_k"][0, 0] += 1
        if self.wrong == "far_commit is off" and "far_commit" in self.names:
            state["far_num"] *= np.float32(1.001)
        return state

    def steps(self, plan: o1core.Plan, handle: Any, *rows: F32) -> Iterator[tuple[str, ...]]:
        stops, out = self.inner.steps(plan, handle, *rows), rows[-1]
        assert stops is not None
        if self.wrong == "out too early":
            out[:] = 0
        for self.names in stops:
            if self.names == ("far_e",) and self.wrong == "not a word of far_e":
                continue
            if self.names == ("far_e",) and self.wrong == "far_e twice":
                yield self.names
            if self.names == ("attend",) and self.wrong == "attend is off":
                out[0, 0, 0] += 1
            yield self.names


@every_column
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("out too early", "out was written before attend"),
        ("not a word of far_e", "did not run far_e"),
        ("far_e twice", "far_e must run once"),
        ("far_e moves the ring", "far_e, sub-chunk at row 0: ring_k has changed"),
        ("attend is off", "out of rows 0..63 row 0 head 0 is off"),
        ("far_commit is off", "after far_commit.*, sub-chunk at row 0: far_num"),
    ],
)
def test_wrong_steps_are_caught(engine: o1core.O1Batch, wrong: str, message: str) -> None:
    assert check_steps(engine._executor, PLAIN) is not None
    with pytest.raises(AssertionError, match=message):
        check_steps(Steps(engine._executor, wrong), PLAIN)


# Handles --------------------------------------------------------------------------------------


class Handles(Around):
    """Something wrong in what an executor keeps of layers, and of earlier calls."""

    def __init__(self, inner: o1core.Executor, wrong: str) -> None:
        super().__init__(inner)
        self.wrong = wrong
        self.calls = 0
        self.kept: list[F32] = []

    def copy(self, handle: Any, geometry: o1core.Geometry) -> Any:
        if self.wrong == "copies share":
            return handle
        twin = self.inner.copy(handle, geometry)
        if self.wrong == "copies lack values":
            state = self.inner.read(twin)
            state["ring_v"] *= 0
            self.inner.write(twin, state)
        return twin

    def rollback(self, handle: Any, checkpoint: Any) -> None:
        state = self.inner.read(handle)
        if self.wrong != "undoes nothing":
            self.inner.rollback(handle, checkpoint)
        if self.wrong == "undoes all but the ring":
            undone = self.inner.read(handle)
            self.inner.write(handle, {**undone, "ring_k": state["ring_k"]})

    def run(self, plan: o1core.Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
        self.calls += 1
        if self.wrong == "reads old rows" and self.kept:
            v = v + 0 * self.kept[0].mean(dtype=np.float32)
        if self.wrong == "writes old outputs" and self.kept:
            self.kept[0][...] = 0
        meta = self.inner.run(plan, handle, q, k, v, out)
        if self.wrong == "never the same twice":
            out += self.calls * np.spacing(out)
        self.kept = {"reads old rows": [v], "writes old outputs": [out]}.get(self.wrong, [])
        return meta


@every_column
@pytest.mark.parametrize("case", SUBSET, ids=str)
def test_handles(hostile: o1core.O1Batch, case: Case) -> None:
    check_handles(hostile._executor, case)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("copies share", "a copy, once its original has moved on: "),
        ("copies lack values", "a copy, once its original has moved on: ring_v"),
        ("undoes nothing", "a layer whose call was undone: "),
        ("undoes all but the ring", "a layer whose call was undone: ring_k"),
        ("never the same twice", "a call that is repeated must give the same bytes"),
        ("reads old rows", "must be finite|same bytes"),
        ("writes old outputs", "wrote to the output of an earlier call"),
    ],
)
def test_wrong_handles_are_caught(wrong: str, message: str) -> None:
    check_handles(Hostile(NumpyExecutor()), PLAIN)
    with pytest.raises(AssertionError, match=message):
        check_handles(Hostile(Handles(NumpyExecutor(), wrong)), PLAIN)


class OneScratch(NumpyExecutor):
    """Far maxima of one layer are taken over by the next."""

    def run(self, plan: o1core.Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
        before, self.handle = getattr(self, "handle", handle), handle
        if before is not handle:
            for mine, other in zip(handle.cohorts, before.cohorts, strict=True):
                mine.far = {**mine.far, "far_mass": other.far["far_mass"]}
        return super().run(plan, handle, q, k, v, out)


def test_layers_that_share_what_they_should_not_are_caught() -> None:
    with pytest.raises(AssertionError):
        check_handles(OneScratch(), PLAIN)
