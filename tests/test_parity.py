"""The matrix as a command and as functions: what it says is so, and what is wrong it finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REQUIRED
from support import install_plugin, same_state, small_layer

import o1core
from o1core import cli
from o1core.testing import Case, Matrix, Remote, cases, parity, sabotaged
from o1core_numpy import NumpyExecutor

FEW = [case for case in cases() if case.name in ("plain", "fm")]
SLOW = """
import numpy as np
from o1core_numpy import NumpyExecutor

class {name}(NumpyExecutor):
    name = "{backend}"
    {body}
"""


def plugin(site: Path, backend: str, body: str) -> None:
    source = SLOW.format(name="Executor", backend=backend, body=body.replace("\n", "\n    "))
    install_plugin(site, f"o1core_{backend}", source, f"{backend} = o1core_{backend}:Executor")


# This machine -------------------------------------------------------------------------------------


# Each kernel and each kind of state matters in one of them.
SOME = ("plain", "fm", "no-landmarks", "mixed-windows")


@pytest.fixture(scope="module")
def machine() -> Matrix:
    """All that runs here, arches and drivers of which a process has one as well."""
    return parity(only=[case for case in cases() if case.name in SOME], require=REQUIRED)


def test_every_backend_of_this_machine(machine: Matrix) -> None:
    assert machine.failures == []
    assert machine.passed
    columns = {column.name: column for column in machine.columns}
    ran = [name for name, column in columns.items() if column.ran]
    print(", ".join(f"{name} on {columns[name].device}" for name in ran))
    assert "numpy" in ran
    assert {"wgpu", "wgpu-original"} <= columns.keys()
    assert {"taichi-cpu", "taichi-vulkan", "taichi-cuda", "taichi-metal"} <= columns.keys()
    for name in REQUIRED:
        assert any(x == name or x.startswith(f"{name}-") for x in ran)
    assert set(machine.rows) == set(SOME)
    for row, cells in machine.rows.items():
        assert list(cells) == ran, row
        for cell in cells.values():
            assert cell.outcome == "passed"
            assert cell.worst is not None
            assert 0 < cell.worst <= 1
    pairs = {(a, b) for _, a, b in machine.pairs}
    assert len(pairs) == len(ran) * (len(ran) - 1) // 2
    assert len(machine.pairs) == len(pairs) * len(SOME)
    assert machine.report.results > 1_000 * len(ran)


def test_junit_has_the_same(machine: Matrix) -> None:
    suites = {suite.get("name"): suite for suite in ET.fromstring(machine.to_junit())}
    for column in machine.columns:
        tests = list(suites[column.name])
        if column.ran:
            assert [test.get("name") for test in tests] == list(machine.rows)
            assert not any(list(test) for test in tests)
        else:
            (skipped,) = (next(iter(test)) for test in tests)
            assert skipped.tag == "skipped"
            assert column.reasons[0] in skipped.get("message", "")
    assert suites["pairs"].get("tests") == str(len(machine.pairs))
    assert all(suite.get("failures") == "0" for suite in suites.values())


def test_quick_as_a_process(tmp_path: Path) -> None:
    junit = tmp_path / "parity.xml"
    env = {**os.environ, "O1CORE_REQUIRE": "numpy"}
    command = [sys.executable, "-m", "o1core", "parity", "--quick", "--backend", "numpy"]
    command += ["--json", "--junit", str(junit)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert data["passed"] is True
    assert data["failures"] == []
    assert [c["name"] for c in data["columns"]] == ["numpy"]
    quick = [case.name for case in cases() if case.quick]
    assert [row for row in data["rows"] if not row.startswith("stream-")] == quick
    assert len(data["rows"]) > len(quick)
    assert data["results"]["results"] > 10_000
    (suite,) = ET.parse(junit).getroot()
    assert suite.get("tests") == str(len(data["rows"]))


def test_the_original_with_its_known_defects(original_wgsl: str, tmp_path: Path) -> None:
    names = ("plain", "massive-100-at-40", "opposed-80")
    some = [case for case in cases() if case.name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("O1CORE_WGSL", original_wgsl)
        matrix = parity(["wgpu", "numpy"], only=some)
    outcomes = {row: cells["wgpu-original"].outcome for row, cells in matrix.rows.items()}
    assert outcomes == {"plain": "passed", "massive-100-at-40": "known", "opposed-80": "known"}
    assert all(cells["wgpu"].outcome == "passed" for cells in matrix.rows.values())
    assert matrix.passed
    text = str(matrix)
    assert "known: the original reads all rows" in text
    assert "2 known defects" in text
    suite = ET.fromstring(matrix.to_junit()).find("./testsuite[@name='wgpu-original']")
    assert suite is not None
    assert len(list(suite.iter("skipped"))) == 2


# What is wrong ------------------------------------------------------------------------------------


def outcome(matrix: Matrix, row: str, column: str) -> tuple[str, str]:
    cell = matrix.rows[row][column]
    return cell.outcome, cell.message


@pytest.mark.parametrize("fault", ["attend: -999", "attend: NaN", "far_commit: did not run"])
def test_a_wrong_backend_fails(fault: str) -> None:
    wrong = sabotaged(NumpyExecutor())[fault]
    matrix = parity([wrong, "numpy"], only=FEW)
    assert [column.name for column in matrix.columns] == ["numpy (given)", "numpy"]
    assert not matrix.passed
    assert all(cells["numpy"].outcome == "passed" for cells in matrix.rows.values())
    assert all(cells["numpy (given)"].outcome == "failed" for cells in matrix.rows.values())
    assert matrix.pairs == {}
    assert len(matrix.failures) == 2
    assert "FAIL" in str(matrix)
    assert "2 passed, 2 failed" in str(matrix)
    suite = ET.fromstring(matrix.to_junit()).find("./testsuite[@name='numpy (given)']")
    assert suite is not None
    assert suite.get("failures") == "2"
    assert all(failure.get("message") for failure in suite.iter("failure"))
    assert json.loads(matrix.to_json())["passed"] is False


def test_a_backend_that_ends_its_process_fails_alone(
    site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin(
        site,
        "mortal",
        "def run(self, *arguments):\n"
        "    import os\n"
        "    print('on stdout', flush=True)\n"
        "    os.write(2, b'driver: cannot go on\\n')\n"
        "    os._exit(3)",
    )
    matrix = parity(["mortal", "numpy"], only=FEW)
    for case in FEW:
        assert outcome(matrix, case.name, "numpy") == ("passed", "")
        kind, message = outcome(matrix, case.name, "mortal")
        assert kind == "failed"
        assert "the process of backend mortal ended with code 3: driver: cannot go on" in message
    assert capfd.readouterr() == ("", "")


def test_a_backend_that_hangs_fails_alone(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(site, "stuck", "def run(self, *arguments):\n    import time\n    time.sleep(600)")
    monkeypatch.setattr("o1core.testing.remote.Process.PATIENCE", 2.0)
    matrix = parity(["stuck", "numpy"], only=FEW)
    for case in FEW:
        assert outcome(matrix, case.name, "numpy") == ("passed", "")
        kind, message = outcome(matrix, case.name, "stuck")
        assert kind == "failed"
        assert "backend stuck gave no answer in 2 s, and was ended" in message


def test_a_backend_that_cannot_run_a_case_says_so(site: Path) -> None:
    plugin(
        site,
        "narrow",
        "def unsupported(self, plan):\n"
        "    fm = plan.geometry.rectifier == 'fm'\n"
        "    return ['rectifier must be aggregate, got fm'] if fm else []",
    )
    matrix = parity(["narrow"], only=FEW)
    assert outcome(matrix, "plain", "narrow") == ("passed", "")
    assert outcome(matrix, "fm", "narrow") == ("unsupported", "rectifier must be aggregate, got fm")
    assert matrix.passed
    assert "n/a: rectifier must be aggregate, got fm" in str(matrix)
    assert "1 passed, 0 failed, 0 known defects, 1 not supported" in str(matrix)
    nothing = parity(["narrow"], only=FEW[1:])
    assert nothing.failures == ["narrow ran no case: all are beyond its limits"]


def test_what_does_not_run_has_a_reason(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ["absent", "broken", "numpy"]
    monkeypatch.setattr("o1core.testing.matrix.registry.names", lambda: installed)
    plugin(
        site,
        "absent",
        "@classmethod\n"
        "def open(cls, device=None):\n"
        "    import o1core\n"
        "    raise o1core.BackendUnavailable('absent', ['there is no abacus: buy one'])",
    )
    plugin(site, "broken", "import no_such_package")
    matrix = parity(only=FEW[:1])
    reasons = {column.name: column.reasons for column in matrix.columns}
    assert reasons["numpy"] == ()
    assert reasons["absent"] == ("there is no abacus: buy one",)
    assert "no_such_package is not installed" in reasons["broken"][0]
    assert matrix.passed
    assert "there is no abacus: buy one" in str(matrix)
    named = parity(["absent", "numpy"], only=FEW[:1])
    assert named.missing == ["absent"]
    assert not named.passed
    assert "absent was required and did not run: absent: there is no abacus" in str(named)
    assert "<failure" in named.to_junit()
    required = parity(["numpy"], only=FEW[:1], require=["numpy", "abacus"])
    assert required.missing == ["abacus"]
    assert "abacus was required and did not run: it is not installed" in required.failures[0]
    assert "<failure" in required.to_junit()


def test_nothing_is_no_success() -> None:
    assert not Matrix(quick=False).passed
    assert parity(["numpy"], only=[]).failures == ["no case ran"]


def test_only_what_was_said_before_is_beyond_a_limit(site: Path) -> None:
    plugin(
        site,
        "evasive",
        "def run(self, plan, *arguments):\n"
        "    import o1core\n"
        "    raise o1core.BackendUnavailable('evasive', ['out of memory'])",
    )
    kind, message = outcome(parity(["evasive"], only=FEW), "plain", "evasive")
    assert kind == "failed"
    assert "out of memory" in message


def test_a_wrong_backend_taints_no_other(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams too: they are everyone's own, and move only between those that are right."""
    monkeypatch.setattr("o1core.testing.matrix.cases", lambda: FEW[:1])
    for name, body in {
        "mortal": "def run(self, *arguments):\n    import os\n    os._exit(3)",
        "narrow": "def unsupported(self, plan):\n    return ['no room']",
        "fair": "device = __import__('pathlib').Path('a path')\ndef read(self, handle):\n"
        "    import sys\n    assert sys.stdin.read() == ''\n    return super().read(handle)",
    }.items():
        plugin(site, name, body)
    matrix = parity(["numpy", "mortal", "narrow", "fair"], quick=True)
    assert {"stream-0", "stream-1"} < set(matrix.rows)
    for row, cells in matrix.rows.items():
        found = {name: cell.outcome for name, cell in cells.items()}
        want = {"numpy": "passed", "mortal": "failed", "narrow": "unsupported", "fair": "passed"}
        assert found == want, row
    assert {pair[1:] for pair in matrix.pairs} == {("fair", "numpy")}
    assert json.loads(matrix.to_json())["columns"][0]["device"]


def test_names_that_begin_alike(site: Path) -> None:
    """A backend's own name comes first; what is not one is a variant."""
    plugin(site, "numpy-mine".replace("-", "_"), "")
    install = site / "o1core_numpy_mine-1.5.dist-info" / "entry_points.txt"
    install.write_text("[o1core.backends]\nnumpy-mine = o1core_numpy_mine:Executor\n")
    module = site / "o1core_numpy_mine.py"
    module.write_text(module.read_text().replace('"numpy_mine"', '"numpy-mine"'))
    matrix = parity(["numpy-mine", "numpy"], only=FEW[:1])
    assert [column.name for column in matrix.columns] == ["numpy", "numpy-mine"]
    assert matrix.passed


def test_columns_and_cases_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"columns must have different names, got numpy \(given\)"):
        parity([NumpyExecutor(), NumpyExecutor()], only=FEW)
    with pytest.raises(ValueError, match="cases must have different names, got plain twice"):
        parity(["numpy"], only=[FEW[0], FEW[0]])
    with pytest.raises(TypeError, match="got a str"):
        parity("numpy", only=FEW)
    with pytest.raises(TypeError, match="got 3"):
        parity([3], only=FEW)  # type: ignore[list-item]


def test_the_working_directory_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    assert parity(["numpy"], only=FEW[:1]).passed


@pytest.mark.skipif(sys.platform == "win32", reason="an interrupt is no signal there")
def test_an_interrupt_ends_the_matrix(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is still undone on the way out, in a process that may not answer any more."""
    plugin(site, "stuck", "def run(self, *arguments):\n    import time\n    time.sleep(600)")
    timer = threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        parity(["stuck"], only=FEW)
    assert time.monotonic() - begun < 60
    timer.join()


# The command --------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("O1CORE_REQUIRE", raising=False)

    def few(backends: Any = None, *, quick: bool = False, **options: Any) -> Matrix:
        return parity(backends, only=FEW, **options)

    monkeypatch.setattr(cli, "parity", few)


def test_command(short: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    junit = tmp_path / "parity.xml"
    assert cli.main(["parity", "--backend", "numpy", "--junit", str(junit)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split() == ["worst", "error", "over", "its", "bound", "numpy"]
    assert [line.split()[0] for line in lines[1:3]] == ["plain", "fm"]
    assert 0 < float(lines[1].split()[1]) < 1
    assert "2 passed, 0 failed, 0 known defects, 0 not supported" in lines[-1]
    assert ET.parse(junit).getroot().find("testsuite") is not None


def test_command_fails(
    short: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    plugin(
        site,
        "wrong",
        "def run(self, plan, handle, q, k, v, out):\n"
        "    meta = super().run(plan, handle, q, k, v, out)\n    out[:] = -999\n    return meta",
    )
    assert cli.main(["parity", "--backend", "wrong"]) == 1
    out, err = capsys.readouterr()
    assert "FAIL" in out
    assert err == "o1core: error: parity failed: 2 failures\n"
    monkeypatch.setenv("O1CORE_REQUIRE", "numpy, abacus")
    assert cli.main(["parity", "--backend", "numpy", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["missing"] == ["abacus"]
    assert err == "o1core: error: parity failed: 1 failures\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "abacus"], "no backend of that name is installed"),
        (["--junit", "/no/such/folder/x.xml"], "--junit /no/such/folder/x.xml: there is no folder"),
        (["--junit", "/"], "--junit / must be a file, and is a folder"),
        (["--bogus"], "unrecognized arguments"),
    ],
)
def test_command_refuses(
    short: None, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["parity", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


# Another process ----------------------------------------------------------------------------------


@pytest.fixture
def remote() -> Iterator[Remote]:
    executor = Remote("numpy", {})
    yield executor
    executor.close()


def test_another_process_does_the_same(remote: Remote) -> None:
    here, there = o1core.O1Batch("numpy"), o1core.O1Batch(remote, fallback=None)
    a, rows = small_layer(here)
    b, _ = small_layer(there)
    assert there.device == here.device
    snapshots = a.snapshot(), b.snapshot()
    for at in (0, 1, 70):
        part = [x[at : at + 70] for x in rows]
        assert a.extend(*part).tobytes() == b.extend(*part).tobytes()
        assert same_state(a.state(), b.state())
    fork = b.fork()
    a.restore(snapshots[0])
    b.restore(snapshots[1])
    assert same_state(a.state(), b.state())
    assert not same_state(fork.state(), b.state())


def test_what_goes_wrong_there_is_told_here(remote: Remote) -> None:
    layer, rows = small_layer(o1core.O1Batch(remote, fallback=None))
    before = layer.state()
    with pytest.raises(RuntimeError, match="AttributeError"):
        remote._ask("no_such_verb")
    with pytest.raises(RuntimeError, match="KeyError"):
        remote._ask("read", 10**6)
    assert same_state(layer.state(), before)
    with pytest.raises(ValueError, match="device must be None or 'cpu'"):
        Remote("numpy", {"device": "gpu"})
    with pytest.raises(o1core.UnknownBackend):
        Remote("abacus", {})
    remote._process._process.kill()
    with pytest.raises(RuntimeError, match="the process of backend numpy ended with code"):
        layer.extend(*rows)


def test_what_is_no_longer_held_is_let_go(remote: Remote) -> None:
    engine = o1core.O1Batch(remote, fallback=None)
    layer, rows = small_layer(engine)
    for _ in range(5):
        layer.fork().extend(*rows)
    assert remote._ask("held") <= 6


def test_poisoned_rows_do_not_leak_here(remote: Remote) -> None:
    layer, rows = small_layer(o1core.O1Batch(remote, fallback=None))
    assert np.isfinite(layer.extend(*rows)).all()
    case: Case = FEW[0]
    assert parity([remote], only=[case]).passed
