"""Every case on every backend, cut in several ways, against the whole-history oracle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support import DEFECTS, SMALL, every_column, same_state, small_layer, small_rows

import o1core
from o1core import reference
from o1core.testing import (
    KNOWN_DEFECTS,
    Answer,
    Case,
    Oracle,
    Report,
    Rows,
    Steps,
    answer,
    cases,
    check,
    check_backend,
    check_output,
    check_same,
    check_same_steps,
    check_state,
    check_steps,
    random_rows,
    run_case,
)

TOTAL: dict[str, Report] = {}
# What the columns answered, for comparing them with each other.
ANSWERS: dict[tuple[str, str], Answer] = {}
STEPS: dict[tuple[str, str], Steps] = {}


@every_column
@pytest.mark.parametrize("case", cases(), ids=str)
def test_case(backend: str, hostile: o1core.O1Batch, case: Case) -> None:
    given = answer(hostile, case)
    TOTAL.setdefault(backend, Report()).add(check(case, given))
    ANSWERS[backend, case.name] = given


@every_column
@pytest.mark.parametrize("case", cases(), ids=str)
def test_kernel_by_kernel(backend: str, hostile: o1core.O1Batch, case: Case) -> None:
    """What each kernel writes, and that it writes nothing else."""
    steps = check_steps(hostile._executor, case)
    if steps is None:
        assert hostile.load(answer(hostile, case).sealed).exact_only
    else:
        assert {kernel for _, kernel, _ in steps.written} >= {"attend", "ring_commit", "meta"}
        STEPS[backend, case.name] = steps


@every_column
def test_steps_that_are_left_can_be_undone(engine: o1core.O1Batch) -> None:
    executor, layer = engine._executor, small_layer(engine)[0]
    state, (q, k, v) = layer.state(), small_layer(engine, rows=32)[1]
    plan = o1core.Plan.build(state.geometry, len(q))
    handle, twin = (executor.allocate(state.geometry) for _ in range(2))
    executor.write(handle, state.buffers())
    executor.write(twin, state.buffers())
    before = executor.read(handle)
    want, out = (np.full((len(q), 4, 12), np.nan, np.float32) for _ in range(2))
    for stop in range(1, 5):
        checkpoint = executor.checkpoint(handle, [plan])
        steps = executor.steps(plan, handle, q, k, v, out)
        assert steps is not None
        for _ in itertools.islice(steps, stop):
            pass
        del steps
        executor.rollback(handle, checkpoint)
        after = executor.read(handle)
        assert all(after[name].tobytes() == before[name].tobytes() for name in before)
    executor.run(plan, twin, q, k, v, want)
    executor.run(plan, handle, q, k, v, out)
    assert out.tobytes() == want.tobytes()
    after, wanted = executor.read(handle), executor.read(twin)
    assert all(after[name].tobytes() == wanted[name].tobytes() for name in wanted)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_pair(engines: dict[str, o1core.O1Batch], case: Case) -> None:
    """Backends agree with each other, within the bound that each has by itself."""
    right = [x for x in engines if case.name not in KNOWN_DEFECTS.get(x, ())]
    answers, steps = {}, {}
    for column in right:
        key = column, case.name
        answers[column] = ANSWERS.get(key) or answer(engines[column], case)
        steps[column] = STEPS.get(key) or check_steps(engines[column]._executor, case)
    pairs = list(itertools.combinations(right, 2))
    assert pairs
    for a, b in pairs:
        check_same(case, answers[a], answers[b])
        of_a, of_b = steps[a], steps[b]
        assert (of_a is None) == (of_b is None)
        if of_a is not None and of_b is not None:
            check_same_steps(of_a, of_b)


def test_known_defects_are_of_cases() -> None:
    """Of a case that is no more, the table of defects would go on speaking unnoticed."""
    names = {case.name for case in cases()}
    assert all(case is None or case in names for table in DEFECTS.values() for case in table)


@every_column
@pytest.mark.parametrize("case", [c for c in cases() if c.every == 1][::3], ids=str)
def test_case_in_other_pieces(engine: o1core.O1Batch, case: Case) -> None:
    total = sum(case.chunks)
    run_case(engine, case, chunks=(1, 2, 61, 3, total - 67) if total > 67 else (total,))


@every_column
def test_few_results_are_ambiguous(backend: str, engine: o1core.O1Batch) -> None:
    """Runs after the cases, each of which has a limit of 2% of its own."""
    if backend not in TOTAL:
        TOTAL[backend] = run_case(engine, cases()[0])
    total = TOTAL[backend]
    print(
        f"{total.ambiguous} of {total.results} results ambiguous, {total.undecided} undecided, "
        f"worst {total.worst:.3f} of its bound"
    )
    assert total.ambiguous <= 0.001 * total.results
    assert total.undecided <= 0.0005 * total.results


def test_a_case_that_decides_nothing_fails(engine: o1core.O1Batch) -> None:
    """A far field that is all rounding: the check itself must not pass it."""

    def same_landmarks() -> Rows:
        q, k, v = small_rows(280)
        q[:80] = q[0]
        return q, k, v

    def cancels(fixed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"mix": np.ones_like(fixed["mix"]) * np.where(np.arange(8) % 2, -1.0, 1.0)}

    case = Case("cancels", SMALL, same_landmarks, 80, (200,), cancels)
    with pytest.raises(AssertionError, match=r"cancels: .* results are ambiguous, more than 2%"):
        run_case(engine, case)


@every_column
@pytest.mark.parametrize(
    "name",
    ["plain", "mixed-windows", "half-full", "seals-itself", "no-landmarks", "massive-100-at-0"],
)
def test_memory_is_written_before_it_is_read(
    engine: o1core.O1Batch, poisoned_memory: None, name: str
) -> None:
    case = next(c for c in cases() if c.name == name)
    run_case(engine, case)
    run_case(engine, case, chunks=(1, 2, 61, sum(case.chunks) - 64))


@every_column
def test_same_bytes_twice(engine: o1core.O1Batch) -> None:
    first, rows = small_layer(engine)
    second, _ = small_layer(engine)
    assert first.extend(*rows).tobytes() == second.extend(*rows).tobytes()
    assert same_state(first.state(), second.state())


@every_column
@pytest.mark.parametrize("landmarks", [0, 8])
@pytest.mark.parametrize("rectifier", ["aggregate", "fm"])
def test_values_of_one_give_one(
    engine: o1core.O1Batch, landmarks: int, rectifier: o1core.Rectifier
) -> None:
    config = o1core.Config(landmarks, 32, 2, rectifier)
    q, k, v = random_rows(3, 400, groups=2, heads_per_group=3, peak=4.0)
    v[:] = 1
    layer = engine.seal(q[:100], k[:100], v[:100], config)
    np.testing.assert_allclose(layer.extend(q[100:], k[100:], v[100:]), 1, atol=1e-5)


@every_column
@pytest.mark.parametrize("case", [c for c in cases() if c.name.startswith("massive")], ids=str)
def test_massive_logits_in_a_chunk_give_one(engine: o1core.O1Batch, case: Case) -> None:
    q, k, v = case.rows()
    p = case.prompt
    v = np.ones_like(v)
    layer = engine.seal(q[:p], k[:p], v[:p], case.config)
    state = layer.state()
    positive = engine.load(state.replace(mix=np.abs(state.mix)))
    np.testing.assert_allclose(positive.extend(q[p:], k[p:], v[p:]), 1, atol=1e-5)
    # With the layer's own mix the far field cancels, and the bound follows that.
    oracle = Oracle(case.config, (q[:p], k[:p], v[:p]))
    oracle.append((q[p:], k[p:], v[p:]))
    check_output(layer.extend(q[p:], k[p:], v[p:]), oracle.expected(range(p, len(q))))


@every_column
def test_dropped_far_field_is_the_near_softmax(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    state = layer.state()
    dropped = engine.load(state.replace(mix=-np.abs(state.mix) * np.float32(1e20)))
    # Landmark logits far above the near ones must not raise the shift of a dropped far field.
    high = state.replace(
        mix=-np.abs(state.mix), k_landmarks=state.k_landmarks + np.float32(300) * rows[0][0, 0]
    )
    near_config = o1core.Config(0, SMALL.window, SMALL.sinks)
    q, k, v = small_rows(280)
    near = engine.seal(q[:80], k[:80], v[:80], near_config).extend(*rows)
    np.testing.assert_array_equal(dropped.extend(*rows), near)
    np.testing.assert_array_equal(engine.load(high).extend(*rows), near)


@every_column
@pytest.mark.parametrize("cut", [(200,), (1,) * 200, (64, 64, 72), (63, 1, 65, 0, 71)])
def test_splits_agree(engine: o1core.O1Batch, cut: tuple[int, ...]) -> None:
    """However a stream is cut, the rows stay within the bound of the same whole history."""
    layer, rows = small_layer(engine)
    q, k, v = small_rows(280)
    oracle = Oracle(SMALL, (q[:80], k[:80], v[:80]))
    oracle.append(rows)
    at, outs = 0, []
    for size in cut:
        outs.append(layer.extend(*(x[at : at + size] for x in rows)))
        at += size
    check_output(np.concatenate(outs), oracle.expected(range(80, 280)))
    check_state(layer.state(), oracle.state())
    assert layer.rows_seen == 280


@every_column
def test_no_rows(engine: o1core.O1Batch) -> None:
    layer, (q, k, v) = small_layer(engine)
    before = layer.state()
    assert layer.extend(q[:0], k[:0], v[:0]).shape == (0, 4, 12)
    assert same_state(before, layer.state())


@every_column
def test_conservation(engine: o1core.O1Batch) -> None:
    """With landmark queries of 0 every evicted key adds exactly 1 to each mass."""
    layer, rows = small_layer(engine)
    state = layer.state()
    far = state.meta[0, 2]
    assert far == 80 - 2 - 32
    counting = engine.load(
        state.replace(
            q_landmarks=np.zeros_like(state.q_landmarks),
            far_max=np.zeros_like(state.far_max),
            far_mass=np.full_like(state.far_mass, far),
        )
    )
    at = 0
    for size in (5, 70, 1, 64, 60):
        counting.extend(*(x[at : at + size] for x in rows))
        at += size
        after = counting.state()
        np.testing.assert_array_equal(after.far_mass, np.float32(far + at))
        np.testing.assert_array_equal(after.meta[:, 0] + after.meta[:, 2], 78 + at)


@every_column
def test_without_landmarks_it_is_sinks_and_window(engine: o1core.O1Batch) -> None:
    """Against a plain masked softmax, from the first row on and over narrower groups' windows."""
    config = o1core.Config(landmarks=0, window=20, sinks=3, windows=(20, 7))
    q, k, v = random_rows(2, 150, groups=2, heads_per_group=2)
    layer = engine.seal(q[:1], k[:1], v[:1], config)
    out = layer.extend(q[1:], k[1:], v[1:])
    assert not layer.exact_only
    for i in range(1, 150):
        for h in range(4):
            g = h // 2
            near = np.r_[0 : min(3, i + 1), max(3, i + 1 - config.windows[g]) : i + 1]  # type: ignore[index]
            logits = k[near, g].astype(float) @ q[i, h] / 4
            weights = np.exp(logits - logits.max())
            np.testing.assert_allclose(
                out[i - 1, h], weights @ v[near, g] / weights.sum(), atol=1e-5
            )


@every_column
def test_batch_is_the_sequences_one_by_one(engine: o1core.O1Batch) -> None:
    config = o1core.Config(8, 32, 2, windows=(32, 50))
    sequences = [random_rows(s, 240, groups=2, heads_per_group=2, value_dim=9) for s in range(3)]
    stacked = [np.stack(x) for x in zip(*sequences, strict=True)]
    for prompt in (100, 10):
        q, k, v = (x[:, :prompt] for x in stacked)
        layer = engine.seal(q, k, v, config)
        assert layer.batch == 3
        out = layer.extend(*(x[:, prompt:] for x in stacked))
        assert out.shape == (3, 240 - prompt, 4, 9)
        for i, (q, k, v) in enumerate(sequences):
            one = engine.seal(q[:prompt], k[:prompt], v[:prompt], config)
            want = one.extend(q[prompt:], k[prompt:], v[prompt:])
            np.testing.assert_allclose(out[i], want, rtol=0, atol=1e-5)
        again = engine.load(layer.state())
        assert again.batch == 3
        assert again.extend(*(x[:, :2] for x in stacked)).shape == (3, 2, 4, 9)


def test_serial_reference_agrees_with_the_oracle() -> None:
    """The two definitions share no code; the reference is the one people read."""
    for name in ("plain", "fm", "mixed-windows", "seals-itself", "no-landmarks", "alternating"):
        case = next(c for c in cases() if c.name == name)
        q, k, v = case.rows()
        p = case.prompt
        prompt = q[:p], k[:p], v[:p]
        serial = reference.seal(*prompt, case.config)
        oracle = Oracle(case.config, prompt)
        if case.alter is not None:
            fixed = oracle.fixed()
            fixed.update({n: x.astype(np.float32) for n, x in case.alter(fixed).items()})
            oracle = Oracle(case.config, prompt, fixed)
            for n, group in enumerate(serial.groups):
                for h, head in enumerate(group.heads):
                    head.mix = fixed["mix"][n, h].astype(np.float64)
        out = serial.extend(q[p:], k[p:], v[p:])
        oracle.append((q[p:], k[p:], v[p:]))
        expected = oracle.expected(range(p, len(q)))
        error = np.abs(out - expected.out).max(axis=-1)
        assert (error <= 1e-3 * expected.bound).mean() > 0.99
        assert (error <= 0.1 * expected.bound)[~expected.ambiguous].all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("prompt", [80, 20])
def test_reference_goes_on_from_a_state(
    engine: o1core.O1Batch, dtype: type[np.floating[Any]], prompt: int
) -> None:
    layer, rows = small_layer(engine, prompt=prompt, rows=120)
    oracle = Oracle(SMALL, tuple(x[:prompt] for x in small_rows(prompt + 120)))  # type: ignore[arg-type]
    oracle.append(rows)
    out = reference.load(layer.state(), dtype).extend(*rows)
    assert out.dtype == dtype
    check_output(out.astype(np.float32), oracle.expected(range(prompt, prompt + 120)))


def test_check_backend_runs_the_table(backend: str) -> None:
    reports = check_backend(backend, cases()[:2])
    assert [*reports] == ["plain", "one-head"]
    assert all(0 < r.worst <= 1 for r in reports.values())
