"""Importing o1core is quiet: no output, no GPU library, nothing created; the tree stays clean."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

import o1core

LOUD = (
    *("wgpu", "taichi", "quadrants", "torch", "rich", "safetensors"),
    *("o1core_numpy", "o1core_wgpu"),
)


def run(code: str, folder: Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Runs it with the folder as home, and the environment changed; None removes a variable."""
    changed = {**os.environ, "PYTHONWARNINGS": "error", "HOME": str(folder), **changes}
    env = {name: value for name, value in changed.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-B", "-c", code], capture_output=True, text=True, cwd=folder, env=env
    )


def test_import_is_quiet(tmp_path: Path) -> None:
    code = "import sys, json, o1core; json.dump(sorted(sys.modules), sys.stderr)"
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    modules = json.loads(done.stderr)
    assert not [m for m in modules if m.partition(".")[0] in LOUD]
    assert not list(tmp_path.iterdir())


USE = """
from o1core.testing import random_rows
q, k, v = random_rows(0, 400)
with o1core.O1Batch(BACKEND, fallback=None) as engine:
    engine.seal(q, k, v).extend(q, k, v)
"""


def test_use_is_quiet(tmp_path: Path) -> None:
    done = run("import o1core; BACKEND = 'numpy'" + USE, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("backend", "headless"), [("wgpu", False), ("wgpu", True), ("auto", True)])
def test_use_of_a_gpu_is_quiet(gpu: Any, tmp_path: Path, backend: str, headless: bool) -> None:
    """Drivers complain on stderr of a session without a display or a folder for its files."""
    # They keep compiled kernels in the home, which therefore stays what it is.
    changes: dict[str, str | None] = {"HOME": os.environ.get("HOME")}
    if headless:
        changes |= dict.fromkeys(("XDG_RUNTIME_DIR", "DISPLAY", "WAYLAND_DISPLAY"))
    done = run(f"import o1core; BACKEND = {backend!r}" + USE, tmp_path, **changes)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_the_numpy_settings_of_a_host_are_left_alone(tmp_path: Path) -> None:
    code = (
        "import numpy as np\n"
        "before = np.geterr(), np.get_printoptions()\n"
        "import o1core\n"
        "from o1core.testing import random_rows\n"
        "q, k, v = random_rows(0, 400)\n"
        "o1core.O1Batch().seal(q, k, v).extend(q, k, v)\n"
        "assert before == (np.geterr(), np.get_printoptions())\n"
    )
    assert run(code, tmp_path).returncode == 0


def test_public_names_exist_and_are_documented() -> None:
    for name in o1core.__all__:
        thing = getattr(o1core, name)
        if isinstance(thing, type) or hasattr(thing, "__file__"):
            assert thing.__doc__, name
    for kind in (o1core.O1Batch, o1core.Layer, o1core.LayerState, o1core.Plan, o1core.Executor):
        for name, member in vars(kind).items():
            if not name.startswith("_") and callable(member):
                assert getattr(member, "__doc__", None), f"{kind.__name__}.{name}"


def test_no_packages_where_pytest_would_mistake_them() -> None:
    for folder in (ROOT / "backends", ROOT / "tests", *(ROOT / "backends").iterdir()):
        assert not (folder / "__init__.py").exists()
    assert not list((ROOT / "backends").glob("*.py"))
    assert not list((ROOT / "backends").glob("*/*.py"))


def test_docstrings_cite_sections_that_exist() -> None:
    sections = (ROOT / "docs" / "operator.md").read_text()
    cited: set[str] = set()
    for path in [*(ROOT / "o1core").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]:
        cited.update(re.findall(r"operator\.md sections? (\d+)", path.read_text()))
    assert cited
    for number in cited:
        assert f"\n## {number}. " in sections
