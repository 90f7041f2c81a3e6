"""O1Batch and Layer: all or nothing, snapshots and forks, fallback, plug-ins."""

from __future__ import annotations

import copy
import pickle
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import SMALL, install_plugin, same_state, small_layer, small_rows

import o1core
from o1core import Plan
from o1core.testing import cases, check_backend
from o1core_numpy import NumpyExecutor
from o1core_numpy.cohort import Cohort
from o1core_numpy.kernels import KERNELS, Call

# All or nothing -----------------------------------------------------------------------------


class Failing(NumpyExecutor):
    """Raises in a kernel of the given sub-chunk, counted from when it is armed."""

    fault: type[BaseException] = RuntimeError
    kernel = "far_commit"
    left = -1

    def __init__(self) -> None:
        super().__init__()
        self.kernels = {**KERNELS, self.kernel: self.failing}  # type: ignore[misc]

    def failing(self, c: Cohort, call: Call) -> None:
        if self.left == 0:
            raise self.fault("armed")
        self.left -= 1
        KERNELS[self.kernel](c, call)


def failing(kernel: str, fault: type[BaseException]) -> Failing:
    return type("Failing", (Failing,), {"kernel": kernel, "fault": fault})()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("cut", [(1, 1), (40, 32), (200, 32), (200, 0), (200, 150)])
def test_a_failed_call_changes_nothing(
    kernel: str, fault: type[BaseException], cut: tuple[int, int]
) -> None:
    """Cut: rows of the call, and how many of them had been done when it failed."""
    rows_of_call, done = cut
    executor = failing(kernel, fault)
    engine = o1core.O1Batch(executor)
    layer, (q, k, v) = small_layer(engine, rows=300)
    twin = layer.fork()
    # Walk the ring some way round, so that the next call also has to move its linear memory.
    for size in (60, 7, 33):
        layer.extend(q[:size], k[:size], v[:size])
        twin.extend(q[:size], k[:size], v[:size])
    before = layer.state()
    executor.left = done // 32
    with pytest.raises(fault, match="armed"):
        layer.extend(q[:rows_of_call], k[:rows_of_call], v[:rows_of_call])
    executor.left = -1
    assert same_state(layer.state(), before)
    assert layer.rows_seen == twin.rows_seen == 180
    assert layer.extend(q, k, v).tobytes() == twin.extend(q, k, v).tobytes()
    assert same_state(layer.state(), twin.state())


@pytest.mark.parametrize("left", range(4))
def test_a_failure_while_sealing_itself_changes_nothing(left: int) -> None:
    executor = failing("meta", KeyboardInterrupt)
    engine = o1core.O1Batch(executor)
    layer, rows = small_layer(engine, prompt=20)
    before, nbytes = layer.state(), layer.nbytes
    executor.left = left
    with pytest.raises(KeyboardInterrupt):
        layer.extend(*rows)
    executor.left = -1
    assert layer.exact_only
    assert layer.nbytes == nbytes
    assert same_state(layer.state(), before)
    layer.extend(*rows)
    assert not layer.exact_only


def test_an_executor_that_lies_changes_nothing() -> None:
    class Liar(NumpyExecutor):
        lies = False

        def run(self, *arguments: Any) -> Any:
            meta = super().run(*arguments)
            return [m._replace(head=0) for m in meta] if self.lies else meta

    executor = Liar()
    layer, rows = small_layer(o1core.O1Batch(executor))
    before = layer.state()
    executor.lies = True
    with pytest.raises(RuntimeError, match=r"holds meta .* where the plan predicts"):
        layer.extend(*rows)
    assert same_state(layer.state(), before)


def test_non_finite_results_are_a_fault_of_the_backend() -> None:
    class Broken(NumpyExecutor):
        def run(self, plan: Plan, handle: Any, q: Any, k: Any, v: Any, out: Any) -> Any:
            meta = super().run(plan, handle, q, k, v, out)
            out[-1] = np.nan
            return meta

    layer, rows = small_layer(o1core.O1Batch(Broken()))
    before = layer.state()
    with pytest.raises(RuntimeError, match="returned NaN or infinity for finite rows"):
        layer.extend(*rows)
    assert same_state(layer.state(), before)


class Plain(NumpyExecutor):
    """Without the numpy backend's own copy, checkpoint and rollback: the derived ones."""

    copy = o1core.Executor.copy
    checkpoint = o1core.Executor.checkpoint
    rollback = o1core.Executor.rollback


def test_derived_verbs_do_the_same() -> None:
    class FailingPlain(Plain, Failing):
        kernel = "meta"

    executor = FailingPlain()
    layer, rows = small_layer(o1core.O1Batch(executor))
    twin = layer.fork()
    before = layer.state()
    executor.left = 2
    with pytest.raises(RuntimeError, match="armed"):
        layer.extend(*rows)
    executor.left = -1
    assert same_state(layer.state(), before)
    assert layer.extend(*rows).tobytes() == twin.extend(*rows).tobytes()


# Snapshots and forks ------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [80, 20])
def test_snapshot_restore_fork(engine: o1core.O1Batch, prompt: int) -> None:
    layer, (q, k, v) = small_layer(engine, prompt=prompt)
    snapshot = layer.snapshot()
    fork = layer.fork()
    first = layer.extend(q, k, v)
    assert snapshot.rows_seen == fork.rows_seen == prompt
    for _ in range(2):
        layer.restore(snapshot)
        assert layer.rows_seen == prompt
        assert layer.exact_only == (prompt == 20)
        assert layer.extend(q, k, v).tobytes() == first.tobytes()
    fork.extend(q[:50], k[:50], v[:50])
    fork.restore(snapshot)
    assert fork.extend(q, k, v).tobytes() == first.tobytes()


def test_foreign_snapshots_are_refused(engine: o1core.O1Batch) -> None:
    layer, _ = small_layer(engine)
    with o1core.O1Batch("numpy") as other:
        stranger, _ = small_layer(other)
        with pytest.raises(ValueError, match="snapshot must come from a layer of this engine"):
            layer.restore(stranger.snapshot())
    different, _ = small_layer(engine, o1core.Config(8, 16, 2))
    with pytest.raises(ValueError, match="snapshot must come from a layer of the same settings"):
        layer.restore(different.snapshot())
    with pytest.raises(TypeError, match="snapshot must be a Snapshot, got LayerState"):
        layer.restore(layer.state())  # type: ignore[arg-type]


def test_threads_take_turns(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    want = layer.fork().extend(*rows).tobytes()
    forks = [layer.fork() for _ in range(6)]
    results: list[bytes] = []

    def work(fork: o1core.Layer) -> None:
        results.append(fork.extend(*rows).tobytes())

    threads = [threading.Thread(target=work, args=(fork,)) for fork in forks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [want] * 6


def test_what_a_layer_says(engine: o1core.O1Batch) -> None:
    layer, _ = small_layer(engine)
    assert (layer.config, layer.rows_seen, layer.batch, layer.exact_only) == (
        SMALL,
        80,
        None,
        False,
    )
    assert (layer.backend, layer.device) == (engine.backend, engine.device)
    assert repr(layer).startswith(f"<Layer on {engine.backend}: 2 groups x 2 heads, nystrom far")
    assert repr(engine) == f"O1Batch(backend={engine.backend!r}, device={engine.device!r})"


def test_defaults_and_wrong_kinds(engine: o1core.O1Batch) -> None:
    _, (q, k, v) = small_layer(engine)
    assert engine.seal(q, k, v).config == o1core.Config()
    with pytest.raises(TypeError, match="config must be a Config, got dict"):
        engine.seal(q, k, v, {"window": 3})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state must be a LayerState, got str"):
        engine.load("file")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="windows must name one window for each of the 2 groups"):
        engine.seal(q, k, v, o1core.Config(windows=(1, 2, 3)))


def test_a_closed_engine_says_so() -> None:
    engine = o1core.O1Batch("numpy")
    layer, rows = small_layer(engine)
    snapshot = layer.snapshot()
    engine.close()
    engine.close()
    calls: list[Callable[[], Any]] = [
        lambda: layer.extend(*rows),
        layer.state,
        layer.snapshot,
        layer.fork,
        lambda: layer.restore(snapshot),
        lambda: engine.seal(*rows),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this engine is closed"):
            call()


def test_only_what_it_opened_is_closed() -> None:
    class Counting(NumpyExecutor):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    executor = Counting()
    with o1core.O1Batch(executor):
        pass
    assert executor.closed == 0


def test_a_copied_layer_is_a_fork(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    want = layer.fork().extend(*rows).tobytes()
    for twin in (copy.copy(layer), copy.deepcopy(layer)):
        assert twin.extend(*rows).tobytes() == want
    assert layer.extend(*rows).tobytes() == want


def test_a_failure_after_the_last_kernel_changes_nothing(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of a batch is put together after the run: still inside the call."""
    rows = [np.stack((x, x)) for x in small_rows(200)]
    q, k, v = (x[:, :80] for x in rows)
    layer = engine.seal(q, k, v, SMALL)
    before = layer.state()

    def fails(out: Any, batch: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("o1core.engine._unfold", fails)
        with pytest.raises(MemoryError):
            layer.extend(*(x[:, 80:] for x in rows))
    assert same_state(layer.state(), before)


def test_long_calls_leave_nothing_behind(engine: o1core.O1Batch) -> None:
    """A window of 1 makes a plan of one sub-chunk a row; keeping those would be a leak."""
    layer, (q, k, v) = small_layer(engine, o1core.Config(8, 1, 0), rows=400)
    layer.extend(q[:300], k[:300], v[:300])
    tracemalloc.start()
    try:
        for size in range(300, 312):
            layer.extend(q[:size], k[:size], v[:size])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000  # a dozen such plans take 7 MB


def test_a_refused_sealing_leaves_the_layer_exact(engine: o1core.O1Batch) -> None:
    q, k, v = small_rows(60)
    q, k = np.full_like(q, 9), np.full_like(k, -9)
    layer = engine.seal(q[:5], k[:5], v[:5], SMALL)
    layer.extend(q[5:42], k[5:42], v[5:42])
    before = layer.state()
    with pytest.raises(ValueError, match="mixing matrix does not fit float32"):
        layer.extend(q[42:], k[42:], v[42:])
    assert layer.exact_only
    assert same_state(layer.state(), before)


def test_sealing_over_a_nan_is_refused(engine: o1core.O1Batch) -> None:
    q, k, v = small_rows(60)
    k[3] = np.nan
    with pytest.raises(ValueError, match="q and k must be finite to seal"):
        engine.seal(q, k, v, SMALL, check_finite=False)


# Choosing a backend -------------------------------------------------------------------------


def test_auto(no_auto_gpu: None) -> None:
    with o1core.O1Batch() as engine:
        assert engine.backend == "numpy"
        assert engine.reason == "auto chose numpy"
        assert engine.device.startswith("CPU (numpy ")


def test_auto_takes_a_gpu_that_is_none_of_the_cpu(gpu: Any) -> None:
    with o1core.O1Batch() as engine:
        if gpu.software:
            assert engine.backend == "numpy"
            assert f"wgpu has only a software adapter ({gpu.name})" in engine.reason
        else:
            assert engine.backend == "wgpu"
            assert engine.device == gpu.name


def test_fallback_is_never_silent(planned: str) -> None:
    with pytest.warns(
        o1core.BackendFallbackWarning, match=f"numpy took over: .*'{planned}'"
    ) as seen:
        engine = o1core.O1Batch(planned)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert engine.backend == "numpy"
    assert planned in engine.reason
    with pytest.raises(o1core.BackendUnavailable, match=f"no {planned} backend") as caught:
        o1core.O1Batch(planned, fallback=None)
    assert caught.value.backend == planned
    assert len(caught.value.reasons) == 1


def test_a_name_nobody_has_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"'nunpy' cannot be used: no backend of that name"):
        o1core.O1Batch("nunpy")
    with pytest.raises(o1core.UnknownBackend, match=r"installed: .*numpy") as caught:
        o1core.O1Batch("nunpy", fallback=None)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.reasons) == (str(caught.value), caught.value.reasons)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"backend": 3}, TypeError, "backend must be a name or an Executor object, got int"),
        ({"backend": NumpyExecutor}, TypeError, "backend must be a name or an Executor object"),
        ({"fallback": 3}, TypeError, "fallback must be a backend's name or None, got 3"),
        ({"backend": "numpy", "device": "gpu"}, ValueError, "device must be None or 'cpu'.*'gpu'"),
        ({"backend": NumpyExecutor(), "device": "cpu"}, ValueError, "device must be None when"),
    ],
)
def test_wrong_choices(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        o1core.O1Batch(**arguments)


class Limited(NumpyExecutor):
    """Runs windows up to 20 only."""

    name = "limited"

    def unsupported(self, plan: Plan) -> list[str]:
        widest = max(plan.geometry.windows)
        return [f"windows must be at most 20, got {widest}"] if widest > 20 else []


def test_a_layer_beyond_the_limits_falls_back_with_a_warning() -> None:
    engine = o1core.O1Batch(Limited())
    with pytest.warns(o1core.BackendFallbackWarning, match="at most 20, got 32") as seen:
        layer, rows = small_layer(engine)
    assert seen[0].filename == small_layer.__code__.co_filename
    assert not isinstance(layer._executor, Limited)
    assert layer.extend(*rows).shape == (200, 4, 12)
    within = o1core.Config(8, 16, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside, _ = small_layer(engine, within)
    assert isinstance(inside._executor, Limited)
    strict = o1core.O1Batch(Limited(), fallback=None)
    with pytest.raises(o1core.BackendUnavailable, match="windows must be at most 20, got 32"):
        small_layer(strict)


def test_limits_of_the_later_geometry_count_too() -> None:
    """A short prompt starts exact-only; that the sealed layer will not fit must show at once."""

    class NoLandmarks(NumpyExecutor):
        def unsupported(self, plan: Plan) -> list[str]:
            return ["no landmarks here"] if plan.geometry.landmarks else []

    with pytest.raises(o1core.BackendUnavailable, match="no landmarks here"):
        small_layer(o1core.O1Batch(NoLandmarks(), fallback=None), prompt=10)


def test_a_call_beyond_the_limits_changes_nothing() -> None:
    class Short(NumpyExecutor):
        def unsupported(self, plan: Plan) -> list[str]:
            return [f"rows must be at most 100, got {plan.rows}"] if plan.rows > 100 else []

    layer, rows = small_layer(o1core.O1Batch(Short()))
    before = layer.state()
    with pytest.raises(o1core.BackendUnavailable, match="rows must be at most 100, got 200"):
        layer.extend(*rows)
    assert same_state(layer.state(), before)
    layer.extend(*(x[:100] for x in rows))


def test_far_count_stays_in_32_bits(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    state = layer.state()
    meta = state.meta.copy()
    meta[:, 2] = 2**32 - 150
    old = engine.load(state.replace(meta=meta))
    before = old.state()
    with pytest.raises(ValueError, match=r"far count below 2\^32"):
        old.extend(*rows)
    assert same_state(old.state(), before)


# Backends of others -------------------------------------------------------------------------

DUMMY = '''
from o1core_numpy import NumpyExecutor

class DummyExecutor(NumpyExecutor):
    """A stranger's backend: same numbers, its own name and device."""
    name = "dummy"
    auto_rank = -1
    def __init__(self):
        super().__init__()
        self.device = "a dummy"
'''


def info_of(name: str) -> o1core.BackendInfo:
    return next(info for info in o1core.backends() if info.name == name)


def test_a_stranger_plugs_in_by_entry_point_alone(site: Path, no_auto_gpu: None) -> None:
    install_plugin(site, "dummy_backend", DUMMY, "dummy = dummy_backend:DummyExecutor")
    found = info_of("dummy")
    assert (found.usable, found.device, found.source) == (True, "a dummy", "dummy_backend 1.5")
    with o1core.O1Batch("dummy", fallback=None) as engine:
        assert (engine.backend, engine.device) == ("dummy", "a dummy")
        layer, rows = small_layer(engine)
        with o1core.O1Batch("numpy") as ours:
            moved = ours.load(layer.state())
            assert moved.extend(*rows).tobytes() == layer.extend(*rows).tobytes()
    check_backend("dummy", cases()[:1])
    with o1core.O1Batch() as engine:
        assert engine.backend == "numpy"  # a plug-in that does not ask for it is not taken by auto


@pytest.mark.parametrize(
    ("source", "entry", "reason"),
    [
        (
            "import a_gpu_library_nobody_has\n",
            "dummy = dummy_backend:X",
            "a_gpu_library_nobody_has is not installed: pip install 'o1core[dummy]'",
        ),
        ("import dummy_backend.inner\n", "dummy = dummy_backend:X", "ModuleNotFoundError"),
        ("1 / 0\n", "dummy = dummy_backend:X", "it failed with ZeroDivisionError: division by"),
        ("X = 3\n", "dummy = dummy_backend:X", "is not an o1core.Executor subclass"),
        ("X = 3\n", "dummy = dummy_backend:Y", "it failed with AttributeError"),
        (
            DUMMY.replace("super().__init__()", "raise OSError('no driver')"),
            "dummy = dummy_backend:DummyExecutor",
            "it failed with OSError: no driver",
        ),
    ],
)
def test_why_a_stranger_is_not_usable(site: Path, source: str, entry: str, reason: str) -> None:
    install_plugin(site, "dummy_backend", source, entry)
    found = info_of("dummy")
    assert not found.usable
    assert reason in found.reasons[0]
    with pytest.raises(o1core.BackendUnavailable, match="dummy"):
        o1core.O1Batch("dummy", fallback=None)
    with pytest.warns(o1core.BackendFallbackWarning, match="numpy took over"):
        o1core.O1Batch("dummy")


def test_auto_says_when_a_backend_is_broken(site: Path, no_auto_gpu: None) -> None:
    install_plugin(site, "dummy_backend", "1 / 0\n", "dummy = dummy_backend:X")
    with pytest.warns(o1core.BackendFallbackWarning, match="broken backend: .*ZeroDivisionError"):
        engine = o1core.O1Batch()
    assert engine.backend == "numpy"
    assert "ZeroDivisionError" in engine.reason


def test_auto_passes_over_software_adapters(site: Path, no_auto_gpu: None) -> None:
    source = DUMMY + "    auto_rank = 9\n    software = True\n"
    install_plugin(site, "dummy_backend", source, "dummy = dummy_backend:DummyExecutor")
    with o1core.O1Batch() as engine:
        assert engine.backend == "numpy"
        assert "dummy has only a software adapter (a dummy)" in engine.reason
    with o1core.O1Batch("dummy") as engine:
        assert engine.backend == "dummy"


def test_auto_takes_the_best_rank(site: Path, no_auto_gpu: None) -> None:
    source = DUMMY + "    auto_rank = 9\n"
    install_plugin(site, "dummy_backend", source, "dummy = dummy_backend:DummyExecutor")
    with o1core.O1Batch() as engine:
        assert engine.backend == "dummy"
