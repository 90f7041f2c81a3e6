"""`o1core bench`: what it counts is right, and what is wrong has no figure."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import require_backend
from support import install_plugin

import o1core
from o1core import Config, Geometry, bench, cli
from o1core.bench import call_bytes, call_flops, exact, plot, turns
from o1core.bench.candidates import Candidate
from o1core.bench.figures import Figure, Results, Subject
from o1core.bench.run import Options, Shape, _Run
from o1core.cli import main
from o1core.exact import causal_attention
from o1core.layout import state_buffers
from o1core.testing import random_rows, sabotaged
from o1core_numpy import NumpyExecutor

Capsys = pytest.CaptureFixture[str]

TINY = "2x2x16:landmarks=8,window=32,sinks=2,value_dim=12"
SHAPE = Shape(TINY, 2, 2, 16, 12, Config(landmarks=8, window=32, sinks=2))
FEW = ["--geometry", TINY, "--repeats", "2", "--seal", "100", "--stream", "2000", "--quick"]


def run_bench(capsys: Capsys, *argv: str, code: int = 0) -> tuple[dict[str, Any], list[str]]:
    """What the command says with --json, and its lines on stderr."""
    assert main(["bench", *FEW, *argv, "--json"]) == code
    out, err = capsys.readouterr()
    found: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
    return found, err.splitlines()


def candidates(found: dict[str, Any]) -> set[str]:
    return {figure["candidate"] for figure in found["figures"]}


# Counted work -------------------------------------------------------------------------------------


def test_operations_are_those_of_the_definition() -> None:
    """Counted key by key, as docs/operator.md sections 3 and 4 go through them."""
    g = Geometry.of(2, 3, 6, value_dim=5, window=(9, 7), sinks=2, landmarks=4)
    count = 0

    def dot(width: int) -> None:
        nonlocal count
        count += 2 * width

    for group in range(g.groups):
        for _ in range(g.heads_per_group):
            for _ in range(g.landmarks):  # of the key that the row evicts
                dot(g.head_dim)  # its landmark logit
                dot(g.value_dim)  # its share of the numerator
            for _ in range(g.sinks + g.windows[group]):
                dot(g.head_dim)
                dot(g.value_dim)
            for _ in range(g.landmarks):
                dot(g.head_dim)  # F_a
                dot(g.landmarks)  # u_b
                dot(g.value_dim)  # its share of N
    assert call_flops(g, 1) == count
    assert call_flops(g, 100) == 100 * count
    usual = Geometry.of(1, 1, 256)
    assert call_flops(usual, 1) == 202_752  # of docs/performance.md


@pytest.mark.parametrize("rows", [1, 30, 33, 200])
def test_bytes_are_those_of_the_arrays(rows: int) -> None:
    """What is read, and what differs afterwards in the arrays of an executor."""
    executor = NumpyExecutor.open()
    q, k, v = random_rows(1, 100 + rows, groups=2, heads_per_group=3, head_dim=8, value_dim=5)
    config = Config(landmarks=4, window=32, sinks=3)
    layer = o1core.O1Batch(executor, fallback=None).seal(q[:100], k[:100], v[:100], config)
    before = executor.read(layer._at.handle)
    out = layer.extend(q[100:], k[100:], v[100:])
    after = executor.read(layer._at.handle)
    moved = sum(x[100:].nbytes for x in (q, k, v)) + out.nbytes
    for name, array in before.items():
        moved += array.nbytes
        if name.startswith("ring"):
            moved += int((array != after[name]).any(axis=-1).sum()) * array[0, 0].nbytes
        elif not np.array_equal(array, after[name]):
            moved += array.nbytes
    assert call_bytes(layer.geometry, rows) == moved


# The whole command --------------------------------------------------------------------------------


def check_figures(found: dict[str, Any], rows: set[int]) -> None:
    """Every figure is one, and its rates are those of its own seconds."""
    g = SHAPE.geometry
    rates = {s["name"]: {r["unit"]: r["per_second"] for r in s["rates"]} for s in found["subjects"]}
    for figure in found["figures"]:
        assert 1 <= len(figure["seconds"]) <= 2
        assert min(figure["seconds"]) > 0
        assert figure["min"] <= figure["median"] <= figure["max"]
        assert figure["min"] == min(figure["seconds"])
        assert figure["rows"] in rows | {100}
        if "flops_per_s" in figure:
            flops = call_flops(g, figure["rows"]) / figure["median"]
            assert figure["flops_per_s"] == pytest.approx(flops)
            moved = call_bytes(g, figure["rows"]) / figure["median"]
            assert figure["bytes_per_s"] == pytest.approx(moved)
            best = rates[figure["candidate"]]
            assert ("share_of_product" in figure) == ("FLOP/s" in best)
            if best:
                assert figure["share_of_product"] == pytest.approx(flops / best["FLOP/s"])
                assert figure["share_of_copy"] == pytest.approx(moved / best["B/s"])
    assert found["geometries"][TINY]["flops_per_row"] == call_flops(g, 1)
    assert found["geometries"][TINY]["state_bytes"] == sum(b.nbytes for b in state_buffers(g))


def test_numpy(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "find_spec", lambda name: None)
    found, errors = run_bench(capsys, "--backends", "numpy", "--rows", "1,70")
    assert found["passed"]
    assert errors == found["errors"] == []
    check_figures(found, {1, 70})
    numpy = [f for f in found["figures"] if f["candidate"] == "numpy"]
    assert {(f["section"], f["way"], f["rows"], f["context"]) for f in numpy} == {
        *(("rows", "arrays", rows, None) for rows in (1, 70)),
        *(("context", "arrays", rows, at) for rows in (1, 70) for at in (1024, 2000)),
        ("seal", "arrays", 100, None),
        ("extend", "arrays", 100, None),
    }
    assert all(f["streamed"] >= f["context"] for f in numpy if f["section"] == "context")
    others = [f for f in found["figures"] if f["candidate"] != "numpy"]
    assert {(f["candidate"], f["section"], f["rows"], f["context"]) for f in others} == {
        *(("serial reference", "rows", rows, None) for rows in (1, 70)),
        *(("exact, numpy float32", "context", rows, 1024) for rows in (1, 70)),
    }


def test_wgpu_and_the_table(capsys: Capsys) -> None:
    require_backend("wgpu")
    argv = ["--backends", "wgpu,wgpu-sub-chunk", "--rows", "3", "--contexts", "none"]
    found, _ = run_bench(capsys, *argv)
    check_figures(found, {3})
    for name in ("wgpu", "wgpu-sub-chunk"):
        ways = [
            f["way"] for f in found["figures"] if (f["candidate"], f["section"]) == (name, "rows")
        ]
        assert ways == ["wait", "resident", "pipelined", "device clock", "arrays"]
    assert main(["bench", *FEW, *argv, "--stream", "0", "--seal", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split() for line in lines if line.startswith("3  ")]
    assert len(shown) == 2 * 5 + 1  # the ways of both, and the reference
    assert all(float(words[-7].strip("(")) > 0 for words in shown if "clock" in words)
    assert any(line.startswith("ceilings") for line in lines)


def test_taichi_is_measured_on_its_device(capsys: Capsys) -> None:
    require_backend("taichi")
    argv = ["--backends", "taichi", "--rows", "3", "--contexts", "none", "--stream", "0"]
    found, _ = run_bench(capsys, *argv)
    check_figures(found, {3})
    ways = [f["way"] for f in found["figures"] if f["section"] == "rows"]
    assert ways == ["wait", "resident", "pipelined", "arrays", "arrays"]
    assert "taichi has no clock of the device" in found["notes"]


def test_default_candidates_run_on_no_cpu_but_numpy(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from o1core import registry

    monkeypatch.setattr(registry, "why_not_auto", lambda name, device=None: f"{name} is slow")
    found, _ = run_bench(
        capsys, "--rows", "2", "--contexts", "none", "--stream", "0", "--seal", "0"
    )
    assert candidates(found) == {"numpy", "serial reference"}
    for subject in found["subjects"]:
        assert not subject["named"]
        if subject["name"] != "numpy":
            (reason,) = subject["reasons"]
            assert "--backends" in reason or "not installed" in reason


# What is wrong ------------------------------------------------------------------------------------

PLUGIN = '''
import numpy as np
from o1core.meter import Meter, Resident
from o1core_numpy import NumpyExecutor


class Faulty(NumpyExecutor):
    name = "faulty"

    def run(self, plan, handle, q, k, v, out):
        meta = super().run(plan, handle, q, k, v, out)
        {fault}
        return meta

    def meter(self):
        return {meter}


class Forgetful(Meter):
    """Arrays of the host are right, but on its device it gives zeros."""

    def resident(self, layer, q, k, v):
        return Zeros(layer, (q, k, v))


class Zeros(Resident):
    def __init__(self, layer, rows):
        self.layer, self.rows = layer, rows

    def start(self):
        self.result = 0 * self.layer.extend(*self.rows)

    def wait(self):
        pass

    def out(self):
        return self.result
'''

FAULTS = {
    "always": ("out *= np.float32(1.001)", "Meter()"),
    "on its device": ("pass", "Forgetful()"),
    # Everything before has been timed by then.
    "after a while": ("out *= 1 if meta[0].far < 1500 else np.float32(1.001)", "Meter()"),
}


def install(site: Path, fault: str, meter: str = "Meter()") -> None:
    source = PLUGIN.format(fault=fault, meter=meter)
    install_plugin(site, "o1core_faulty", source, "faulty = o1core_faulty:Faulty")


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_candidate_has_no_figures(site: Path, capsys: Capsys, fault: str) -> None:
    install(site, *FAULTS[fault])
    argv = ["--backends", "numpy,faulty", "--rows", "2", "--contexts", "none", "--repeats", "3"]
    found, errors = run_bench(capsys, *argv, code=1)
    assert not found["passed"]
    assert candidates(found) == {"numpy", "serial reference"}
    (error,) = found["errors"]
    assert error.startswith(f"faulty, {TINY}: ")
    assert errors == [f"o1core: error: {error}"]
    assert main(["bench", *FEW, *argv]) == 1
    text = capsys.readouterr().out
    assert f"WRONG: {error}" in text
    assert not any("faulty" in line and "(" in line for line in text.splitlines()[4:-4])


def test_failing_candidate_keeps_what_was_measured(site: Path, capsys: Capsys) -> None:
    install(site, "if meta[0].far > 1500: raise RuntimeError('out of order')")
    argv = ["--backends", "numpy,faulty", "--rows", "2", "--contexts", "none"]
    found, _ = run_bench(capsys, *argv, code=1)
    assert found["errors"] == [f"faulty, {TINY}: RuntimeError: out of order"]
    sections = {f["section"] for f in found["figures"] if f["candidate"] == "faulty"}
    assert sections == {"rows", "context"}
    sections = {f["section"] for f in found["figures"] if f["candidate"] == "numpy"}
    assert sections == {"rows", "context", "seal", "extend"}


def test_every_sabotage_is_caught() -> None:
    inner = NumpyExecutor.open()
    executors = {"right": inner, **sabotaged(inner)}
    named = [
        Candidate(Subject(name, "numpy"), x, o1core.O1Batch(x, fallback=None), x.meter())
        for name, x in executors.items()
    ]
    results = Results()
    options = Options([SHAPE], [70], None, [], stream=0, sealed=0)
    run = _Run(options, SHAPE, results, named, None)
    run.check()
    assert [x.name for x in run.live] == ["right"]
    assert len(results.errors) == len(executors) - 1 >= 20


def test_absent_candidate_fails_the_run_and_costs_no_other(site: Path, capsys: Capsys) -> None:
    source = """
from o1core.errors import BackendUnavailable
from o1core_numpy import NumpyExecutor

class Absent(NumpyExecutor):
    name = "absent"

    @classmethod
    def open(cls, device=None):
        raise BackendUnavailable("absent", ["it has gone fishing"])
"""
    install_plugin(site, "o1core_absent", source, "absent = o1core_absent:Absent")
    argv = ["--rows", "2", "--contexts", "none", "--stream", "0", "--seal", "0"]
    found, _ = run_bench(capsys, "--backends", "absent,numpy", *argv, code=1)
    assert found["errors"] == ["absent did not run: it has gone fishing"]
    assert "numpy" in candidates(found)
    found, _ = run_bench(capsys, "--backends", "absent", *argv, code=1)
    assert found["errors"][-1] == "nothing was measured"


# Exact attention ----------------------------------------------------------------------------------


@pytest.fixture(params=["numpy", "torch"])
def exact_of(request: pytest.FixtureRequest) -> type[exact.Exact]:
    if request.param == "numpy":
        return exact.NumpyExact
    pytest.importorskip("torch")  # an extra of nothing that the tests need
    return exact.TorchExact


def test_exact_attention_is_checked(
    exact_of: type[exact.Exact], monkeypatch: pytest.MonkeyPatch
) -> None:
    g = SHAPE.geometry
    rows, context = 7, 50
    monkeypatch.setattr(
        exact, "find_spec", lambda name: None if exact_of is exact.NumpyExact else name
    )
    rival = exact.open_exact(g, rows, context)
    assert isinstance(rival, exact_of)
    for case in ((1, 50), (7, 50), (7, 7)):
        found = dict(rival.works(*case))
        assert found
        for work in found.values():
            assert not isinstance(work, Exception), work
            assert work() > 0

    def late(*arguments: Any, first_row: int, **options: Any) -> Any:
        """Off by one: each row sees a key less."""
        out = causal_attention(*arguments, first_row=first_row - 1, **options)
        return out[:-1]

    monkeypatch.setattr(exact, "causal_attention", late)
    if exact_of is exact.TorchExact:
        right = exact.TorchExact._matmul
        monkeypatch.setattr(exact.TorchExact, "_matmul", lambda *x: right(*x).roll(1, dims=2))
    (fault,) = dict(rival.works(7, 50)).values()
    assert isinstance(fault, AssertionError)


# Turns --------------------------------------------------------------------------------------------


def test_candidates_take_turns() -> None:
    order: list[str] = []

    def work(name: str) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            if name == "b" and len(order) > 4:
                raise RuntimeError("enough")
            return float(len(order))

        return run

    seconds, failed = turns.in_turns({x: work(x) for x in "abc"}, 3, 1e9)
    assert "".join(order) == "abcabcacac"
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "c": 3}
    assert seconds["a"] == (4, 7, 9)  # the first turn does not count
    assert [str(fault) for fault in failed.values()] == ["enough"]


def test_repetitions_end_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1
        return now

    clock = SimpleNamespace(perf_counter=tick, process_time=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(turns, "time", clock)
    seconds, _ = turns.in_turns({"a": turns.clocked(lambda: None, calls=4)}, 100, 20)
    assert set(seconds["a"]) == {0.25}
    assert turns.LEAST < len(seconds["a"]) < 20
    seconds, _ = turns.in_turns({"a": lambda: 1.0}, 100, 0)
    assert len(seconds["a"]) == turns.LEAST


def test_threads_that_go_on_spinning_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cpu, spinning = 0.0, 0.0, 0.0
    order: list[str] = []

    def sleep(seconds: float) -> None:
        nonlocal now, cpu, spinning
        order.append(".")
        now += seconds
        cpu += min(seconds, spinning)
        spinning = max(0.0, spinning - seconds)

    def quiet() -> float:
        order.append("q")
        return 1.0

    def restless() -> float:
        nonlocal spinning
        order.append("r")
        spinning = 2.5 * turns.STILL_SECONDS
        return 1.0

    clock = SimpleNamespace(perf_counter=lambda: now, process_time=lambda: cpu, sleep=sleep)
    monkeypatch.setattr(turns, "time", clock)
    turns.in_turns({"quiet": quiet, "restless": restless}, 2, 1e9)
    assert "".join(order) == "q.r....qr....qr...."


# Arguments and files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--rows 0", "--rows must be between 1 and 1048576, got 0"),
        ("--rows 4,x", "must be integers separated by commas, got '4,x'"),
        ("--contexts 0", "--contexts must be between 1 and 1048576, got 0"),
        ("--geometry 4x6", "--geometry must be GROUPSxHEADSxDIM[:KEY=N,...], got '4x6'"),
        ("--geometry 4x6x8:window", "--geometry must be GROUPSxHEADSxDIM[:KEY=N,...]"),
        ("--geometry 4x6x8:slots=3", "KEY must be one of value_dim, landmarks, window, sinks"),
        ("--geometry 4x6x8:landmarks=3", "landmarks must be 0 (no far field) or at least 4, got 3"),
        ("--geometry 0x6x8", "--geometry 0x6x8: groups must be between 1 and 65536, got 0"),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--stream -1", "--stream must be at least 0, got -1"),
        ("--seal -1", "--seal must be at least 0, got -1"),
        ("--backends numpy,,wgpu", "--backends must be names, got 'numpy,,wgpu'"),
        ("--backends abacus", "no backend of that name is installed"),
        ("--backends numpy-fast", "backend numpy has no such variant"),
        ("--wgsl nowhere.wgsl", "--wgsl nowhere.wgsl must be a file that is there"),
        ("--plot nowhere", "--plot nowhere must be a folder that is there"),
    ],
)
def test_bad_arguments(capsys: Capsys, argv: str, said: str) -> None:
    assert main(["bench", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("o1core: error: ")
    assert said in line


def test_plots_need_matplotlib_before_anything_is_measured(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "bench", pytest.fail)
    assert main(["bench", "--plot", str(tmp_path)]) == 2
    assert "pip install 'o1core[bench]'" in capsys.readouterr().err


def test_plots(tmp_path: Path) -> None:
    results = Results(geometries={TINY: SHAPE.geometry, "empty": SHAPE.geometry})
    for rows, context in ((1, 64), (1, 128), (8, 64)):
        for name, seen in (("numpy", context), ("exact, torch float32 (flash)", None)):
            results.figures += [
                Figure(TINY, "rows", rows, name, "resident", (1e-3, 2e-3)),
                Figure(TINY, "context", rows, name, "resident", (1e-3,), context, seen),
            ]
    written = plot.plots(results, tmp_path)
    plain = "2x2x16-landmarks-8-window-32-sinks-2-value-dim-12"
    assert [x.name for x in written] == [f"rows-{plain}.png", f"context-{plain}.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_given_wgsl_is_named_for_the_run_alone(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kernels.wgsl"
    file.write_text("")
    monkeypatch.setenv("O1CORE_WGSL", "before")
    seen: list[str] = []

    def measure(options: Options, watch: Any) -> Results:
        seen.append(os.environ["O1CORE_WGSL"])
        return Results()

    monkeypatch.setattr(bench, "bench", measure)
    assert main(["bench", "--wgsl", str(file), "--json"]) == 0
    capsys.readouterr()
    assert seen == [str(file)]
    assert os.environ["O1CORE_WGSL"] == "before"


# The meter of wgpu --------------------------------------------------------------------------------


def test_ceiling_kernels_compute_what_they_say(gpu: Any) -> None:
    from o1core_wgpu.meter import Copy, Product

    rng = np.random.default_rng(1)
    # Small whole numbers, so that every order of summation gives the same.
    a, b = rng.integers(-8, 9, (2, 256, 256)).astype(np.float32)
    product = Product(gpu, a, b)
    product.start()
    np.testing.assert_array_equal(product.out().reshape(a.shape), a.T @ b)
    copy = Copy(gpu, a)
    copy.start()
    np.testing.assert_array_equal(copy.out(), a.reshape(-1))
    product.wait()
    with pytest.raises(RuntimeError, match="where a ceiling is 1"):
        product.expect(1)


def test_device_clock_runs_the_call(gpu: Any) -> None:
    if "timestamp-query" not in gpu.device.features:
        pytest.skip("this adapter has no timestamps")
    q, k, v = random_rows(1, 300, groups=2, heads_per_group=2)
    with o1core.O1Batch("wgpu", fallback=None) as engine:
        layer = engine.seal(q[:200], k[:200], v[:200])
        want = layer.fork().extend(q[200:], k[200:], v[200:])
        meter = engine._executor.meter()
        resident = meter.resident(layer, q[200:], k[200:], v[200:])
        assert resident is not None
        assert resident.has_clock
        assert resident.device_seconds() > 0
        np.testing.assert_array_equal(resident.out(), want)
        assert layer.rows_seen == 300
