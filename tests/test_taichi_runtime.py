"""The taichi backend's runtime: quiet, shared politely with a host, and safe where it is not."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT

LANGUAGE = next((x for x in ("taichi", "quadrants") if importlib.util.find_spec(x)), "")
PREFIX = {"taichi": "TI_", "quadrants": "QD_", "": ""}[LANGUAGE]
CACHE = {"taichi": "ticache", "quadrants": "qdcache", "": ""}[LANGUAGE]
STARTS = f"[{LANGUAGE.capitalize()}] Starting on arch="

pytestmark = pytest.mark.skipif(not LANGUAGE, reason="taichi is not installed")

USE = """
import numpy as np
from o1core.errors import BackendUnavailable
from o1core_taichi import devices, language, runtime
from o1core_taichi.language import ti
from o1core_taichi.runtime import RuntimeGoneError, open_runtime, why_not_auto

def program():
    current = ti.lang.impl.get_runtime()
    return current._prog if hasattr(current, "_prog") else current.prog

def refused(kind, call, *words):
    try:
        call()
    except kind as fault:
        for word in words:
            assert word in str(fault), (word, str(fault))
    else:
        raise AssertionError("it was not refused")

@ti.kernel
def third(a: ti.types.ndarray(dtype=ti.f32, ndim=1), b: ti.types.ndarray(dtype=ti.f32, ndim=1)):
    for i in a:
        b[i] = a[i] / 3.0

@ti.kernel
def theirs(a: ti.types.ndarray(dtype=ti.f32, ndim=1), b: ti.types.ndarray(dtype=ti.f32, ndim=1)):
    for i in a:
        b[i] = a[i] / 3.0

NUMBERS = np.linspace(0.1, 2, 64, dtype=np.float32)
EXACT = NUMBERS / np.float32(3)
"""

LAUNCH = """
a, b = opened.array(ti.f32, 64), opened.array(ti.f32, (64,))
with opened.using():
    a.from_numpy(NUMBERS)
    third(a, b)
    got = b.to_numpy()
assert np.abs(got - EXACT).max() < 2**-23, got - EXACT
assert opened.arch != "cpu" or (got == EXACT).all()  # GPUs need not divide exactly
"""

ARCHES = ["cpu", "vulkan"]

Changes = Mapping[str, str | None]
ALONE = {"TI_SKIP_VERSION_CHECK": "ON"}
"""For a host's own ti.init(), which otherwise asks a server."""


class Place:
    """A folder to run scripts in: kernels must be in a file, and home and cwd start empty."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.cwd = folder / "cwd"
        self.temporary = folder / "tmp"
        self.script = folder / "script.py"
        for new in (self.home, self.cwd, self.temporary):
            new.mkdir()

    def run(
        self, code: str, changes: Changes = types.MappingProxyType({}), before: str = USE
    ) -> str:
        """Runs it, which must be silent on stderr; its stdout. None removes a variable."""
        self.script.write_text(before + textwrap.dedent(code))
        folders = [ROOT, ROOT / "backends" / "taichi", ROOT / "backends" / "numpy"]
        changed: dict[str, str | None] = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            **dict.fromkeys(("XDG_RUNTIME_DIR", "DISPLAY", "WAYLAND_DISPLAY")),
            **changes,
        }
        env = {name: value for name, value in changed.items() if value is not None}
        done = subprocess.run(
            [sys.executable, self.script],
            capture_output=True,
            text=True,
            cwd=self.cwd,
            env=env,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert not list(self.cwd.iterdir())
        assert not list(self.temporary.iterdir())
        return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="session")
def vulkan() -> bool:
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return False
    return True


@pytest.fixture(params=ARCHES)
def arch(request: pytest.FixtureRequest, vulkan: bool) -> str:
    if request.param == "vulkan" and not vulkan:
        pytest.skip("there is no Vulkan")
    return str(request.param)


# The language -------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", [True, False])
def test_its_import_changes_nothing(place: Place, home: bool) -> None:
    code = """
    import os, signal, sys
    def state():
        handlers = [signal.getsignal(s) for s in signal.valid_signals()]
        with open("/proc/self/status") as f:
            caught = next(int(x.split()[1], 16) for x in f if x.startswith("SigCgt"))
        # Of the C library's own signals the first thread installs handlers.
        return dict(os.environ), handlers, caught & (1 << 31) - 1, sys.stdout, sys.getdlopenflags()
    before = state()
    import o1core_taichi.language
    assert "taichi" in sys.modules or "quadrants" in sys.modules
    assert before == state()
    """
    if not sys.platform.startswith("linux"):
        code = "import o1core_taichi.language"
    assert place.run(code, {} if home else {"HOME": None}, before="") == ""
    assert not list(place.home.iterdir())


def test_the_variable_chooses_the_language(place: Place) -> None:
    (place.script.parent / "quadrants.py").write_text("")  # importable where a script is
    code = """
    import importlib.util, os, sys, types
    chosen = lambda value: (os.environ.update(O1CORE_TAICHI=value), language.choose())[1]
    assert chosen("quadrants") == "quadrants"
    assert chosen("") == language.NAME                  # in use already
    sys.modules.pop("taichi", None)
    installed = importlib.util.find_spec
    importlib.util.find_spec = lambda name: None
    sys.modules["quadrants"] = types.ModuleType("quadrants")
    assert chosen("") == "quadrants"                    # the host's
    del sys.modules["quadrants"]
    refused(ModuleNotFoundError, lambda: chosen(""), "taichi", "quadrants")
    for value in ("", "taichi", "quadrants"):
        try:
            chosen(value)
        except ModuleNotFoundError as fault:
            assert fault.name == (value or "taichi")
    importlib.util.find_spec = lambda name: name == "taichi" or None
    assert chosen("") == "taichi"
    importlib.util.find_spec = lambda name: name == "quadrants" or None
    assert chosen("") == "quadrants"
    refused(BackendUnavailable, lambda: chosen("Taichi"),
            "O1CORE_TAICHI must be 'taichi' or 'quadrants', got 'Taichi'")
    """
    if LANGUAGE == "quadrants":
        (place.script.parent / "quadrants.py").unlink()
    place.run(code, {"O1CORE_TAICHI": LANGUAGE})


# Opening ------------------------------------------------------------------------------------------


def test_it_opens_quietly_and_once(place: Place, arch: str) -> None:
    code = f"""
    import os, signal
    before = dict(os.environ), [signal.getsignal(s) for s in signal.valid_signals()]
    opened = open_runtime({arch!r})
    assert before == (dict(os.environ), [signal.getsignal(s) for s in signal.valid_signals()])
    assert "print" not in vars(ti.lang.misc)
    assert opened.arch == {arch!r} and not opened.adopted and not opened.gone
    assert language.NAME in opened.name and language.VERSION in opened.name
    assert opened.software == ({arch!r} == "cpu" or "llvmpipe" in opened.name)
    assert ("(software, " in opened.name) == (opened.software and {arch!r} != "cpu")
    assert not ti.lang.impl.current_cfg().fast_math
    assert open_runtime() is opened and open_runtime({arch!r}) is opened
    other = "cpu" if {arch!r} == "vulkan" else "vulkan"
    refused(BackendUnavailable, lambda: open_runtime(other), "one runtime a process", other)
    refused(ValueError, lambda: open_runtime("gpu"), "'cuda', 'vulkan', 'metal', 'cpu' for")
    refused(ValueError, lambda: why_not_auto("CPU"), "'CPU'")
    refused(TypeError, lambda: open_runtime(0), "got 0")
    """
    assert place.run(code + textwrap.indent(LAUNCH, "    ")) == ""
    # Compiled kernels are kept in the language's own place, and it did not look for a new version.
    kept = [p.name for p in place.home.rglob("*") if p.is_file()]
    assert kept
    assert "version_info" not in kept


def test_denormal_numbers_stay_what_they_are(place: Place, arch: str) -> None:
    """The language's init would make them 0 in the thread that calls it, for numpy too."""
    code = f"""
    small = np.full(4, 1e-40, np.float32)
    def kept():
        assert (small * np.float32(0.5) != 0).all()
    kept()
    opened = open_runtime({arch!r})
    kept()
    """
    assert place.run(code + textwrap.indent(LAUNCH + "kept()", "    ")) == ""


def test_what_is_not_there_is_refused_and_not_replaced(place: Place) -> None:
    code = """
    import sys
    refused(BackendUnavailable, lambda: open_runtime("cuda"), "no CUDA device", "driver")
    refused(BackendUnavailable, lambda: open_runtime("vulkan"), "no Vulkan device", "driver")
    if sys.platform != "darwin":
        refused(BackendUnavailable, lambda: open_runtime("metal"), "Metal", "macOS")
        assert "CPU" in why_not_auto()
    assert program() is None
    opened = open_runtime()
    assert opened.arch in ("cpu", "metal")
    """
    hidden = dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), "/nonexistent")
    assert place.run(code, {"CUDA_VISIBLE_DEVICES": "", **hidden}) == ""


def test_a_driver_that_fails_is_a_reason(place: Place) -> None:
    """What looks like a device and is none: nothing runs elsewhere, and nothing is left behind."""
    code = """
    devices.cuda_name = lambda: "A GPU"
    assert why_not_auto() == "" and program() is None
    refused(BackendUnavailable, lambda: open_runtime(), "cannot start on 'cuda'")
    assert program() is None
    assert open_runtime("cpu").arch == "cpu"
    """
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a CUDA device")
    assert place.run(code) == ""


def test_the_languages_own_variables(place: Place, arch: str) -> None:
    changes = {
        f"{PREFIX}ARCH": "x64" if arch == "cpu" else arch,
        f"{PREFIX}DEFAULT_FP": "64",
        f"{PREFIX}DEFAULT_IP": "64",
        f"{PREFIX}FAST_MATH": "1",
        f"{PREFIX}LOG_LEVEL": "trace",
    }
    code = f"""
    import os
    opened = open_runtime()
    assert opened.arch == {arch!r} and os.environ["{PREFIX}FAST_MATH"] == "1"
    """
    assert place.run(code + textwrap.indent(LAUNCH, "    "), changes).count("\n") == 0
    # The argument is stronger than the variable, and what kernels cannot run on is refused.
    code = """
    refused(BackendUnavailable, open_runtime, "ARCH must be one of", "got 'opengl'")
    assert open_runtime("cpu").arch == "cpu"
    """
    assert place.run(code, {f"{PREFIX}ARCH": "opengl"}) == ""


@pytest.mark.parametrize("where", ["no home", "home that is a file", "cache that is a file"])
def test_it_needs_no_home(place: Place, arch: str, where: str) -> None:
    """The language would end the process, some at its exit."""
    places: dict[str, Changes] = {
        "no home": {"HOME": None},
        "home that is a file": {"HOME": str(place.script)},
        "cache that is a file": {f"{PREFIX}OFFLINE_CACHE_FILE_PATH": str(place.script)},
    }
    code = f"""
    import os
    before = dict(os.environ)
    opened = open_runtime({arch!r})
    assert before == dict(os.environ)
    assert not ti.lang.impl.current_cfg().offline_cache
    """
    assert place.run(code + textwrap.indent(LAUNCH, "    "), places[where]) == ""


# A host's runtime ---------------------------------------------------------------------------------


def test_a_hosts_runtime_is_used_and_left_as_it_is(place: Place, arch: str) -> None:
    code = f"""
    ti.init(arch=ti.{arch}, fast_math=True, offline_cache=False, log_level=ti.WARN)
    before = program()
    field = ti.field(ti.f32, shape=3)
    field[1] = 7
    opened = open_runtime()
    assert opened.adopted and opened.arch == {arch!r} and program() is before
    assert open_runtime({arch!r}) is opened
    assert why_not_auto() != "" or not opened.software
    """
    after = """
    config = ti.lang.impl.current_cfg()
    assert config.fast_math
    with opened.using():
        assert not config.fast_math
        with opened.using():
            pass
        assert not config.fast_math
    try:
        with opened.using():
            raise KeyError
    except KeyError:
        assert config.fast_math
    theirs(a, b)
    if opened.arch == "cpu":  # some Vulkan drivers compute the same either way
        assert (b.to_numpy() != got).any()  # the host's kernels are as fast as it wants them
    third(a, b)
    assert (b.to_numpy() == got).all()  # ours stay as they were compiled
    assert field[1] == 7 and not ti._lib.core.logging_effective("info")
    """
    out = place.run(code + textwrap.indent(LAUNCH, "    ") + after, ALONE)
    assert out.startswith(STARTS)
    assert out.count("\n") == 1


def test_a_hosts_runtime_that_cannot_serve_is_refused(place: Place) -> None:
    code = """
    settings = {"arch": ti.cpu, "offline_cache": False}
    for setting, wrong in (("default_fp", ti.f64), ("default_ip", ti.i64)):
        ti.init(**settings, **{setting: wrong})
        theirs = program()
        refused(BackendUnavailable, open_runtime, setting, str(wrong), "leave")
        refused(BackendUnavailable, why_not_auto, setting)
        assert program() is theirs
    ti.init(**settings)
    refused(BackendUnavailable, lambda: open_runtime("vulkan"), "'cpu'", "'vulkan'", "init()")
    refused(BackendUnavailable, lambda: why_not_auto("vulkan"), "'cpu'", "'vulkan'")
    assert open_runtime("cpu").adopted
    runtime._shared = None
    runtime._arch_of_program = lambda: "opengl"
    refused(BackendUnavailable, open_runtime, "'opengl'", "cuda, vulkan, metal, cpu")
    if hasattr(ti._lib.core.Arch, "python"):
        ti.reset()
        ti.lang.impl.get_runtime()._arch = ti.python  # as its init does where torch is installed
        refused(BackendUnavailable, open_runtime, "plain Python")
    """
    place.run(code, ALONE)


def test_a_host_that_begins_anew(place: Place, arch: str) -> None:
    code = f"""
    import gc
    opened = open_runtime({arch!r})
    """
    after = f"""
    ti.init(arch=ti.{arch}, offline_cache=False)
    assert opened.gone
    def use():
        with opened.using():
            raise AssertionError
    for call in (opened.require_live, use, lambda: opened.array(ti.f32, 3)):
        refused(RuntimeGoneError, call, "init()", "durable=True", "layer.state()", "before")
    # What was stored is collected, and what the host has stored since is not.
    theirs = [ti.ndarray(ti.f32, 64) for _ in range(4)]
    for array in theirs:
        array.from_numpy(NUMBERS)
    del a, b
    gc.collect()
    for array in theirs:
        assert (array.to_numpy() == NUMBERS).all()
    again = open_runtime()
    assert again is not opened and again.adopted and not again.gone
    ti.reset()
    assert again.gone and opened.gone
    opened = open_runtime({arch!r})
    assert not opened.adopted
    """
    launch = textwrap.indent(LAUNCH, "    ")
    out = place.run(code + launch + after + launch, ALONE)
    assert out.startswith(STARTS)
    assert out.count("\n") == 1


# Using --------------------------------------------------------------------------------------------


def test_arrays_go_with_their_last_reference(place: Place, arch: str) -> None:
    """The language keeps for good what is deleted while a kernel may still use it."""
    if not sys.platform.startswith("linux"):
        pytest.skip("it reads /proc")
    code = f"""
    def memory():
        with open("/proc/self/status") as f:
            return next(int(x.split()[1]) for x in f if x.startswith("VmRSS")) >> 10
    opened = open_runtime({arch!r})
    def use(more):
        a, b = opened.array(ti.f32, (1 << 22) + more), opened.array(ti.f32, (1 << 22) + more)
        with opened.using():
            third(a, b)
        return id(a.arr), id(b.arr)
    use(0)
    before = memory()
    for more in range(12):
        use(more)
    assert memory() < before + 150, (before, memory())
    made = {{use(12) for _ in range(5)}}
    assert len({{x for pair in made for x in pair}}) == 2, made  # they are used again

    import threading
    a = opened.array(ti.f32, 3)
    inside, leave = threading.Event(), threading.Event()
    def hold():
        with opened.using():
            inside.set()
            leave.wait(30)
    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(30)
    del a                    # waits for nobody
    assert len(opened._returned) == 1
    leave.set()
    thread.join()
    opened.array(ti.f32, 1)
    assert len(opened._returned) <= 1

    import os
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where the language writes its error too
    # The language counts in 32 bits, and finds nothing to be made here.
    for shape in (0, (3, 0), 1 << 31, (1 << 15, 1 << 15, 1 << 12)):
        refused(MemoryError, lambda: opened.array(ti.f32, shape), "2**31 - 1")
    if opened.arch == "vulkan" and opened.software:
        refused(MemoryError, lambda: opened.array(ti.f32, (1 << 31) - 1), opened.name)
    """
    # With its error the language prints empty lines.
    assert place.run(code + textwrap.indent(LAUNCH, "    ")).strip() == ""


LAYER = f"""{USE}
import threading, o1core
from o1core.testing import random_rows
q, k, v = random_rows(0, 300)
def layer_of(engine, config=o1core.Config(8, 64, 2)):
    return engine.seal(q[:120], k[:120], v[:120], config)
def in_a_thread(call):
    faults = []
    def run():
        try:
            call()
        except Exception as fault:
            faults.append(fault)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return faults
"""


WARM: Changes = {**ALONE, "HOME": os.environ.get("HOME")}
"""With the kernels that other tests have compiled."""


WARM_CACHE: Changes = {
    f"{PREFIX}OFFLINE_CACHE_FILE_PATH": str(Path.home() / ".cache" / LANGUAGE / CACHE)
}
"""Likewise, without a home."""


@pytest.mark.parametrize("adopted", [False, True])
def test_fields_that_are_not_made_yet_survive(place: Place, adopted: bool) -> None:
    """A launch makes them, and outside the thread of ti.init() the language fails half way."""
    code = f"""
    if {adopted}:
        ti.init(arch=ti.cpu, log_level=ti.ERROR)
    engine = o1core.O1Batch("taichi", fallback=None, device="cpu")
    layers = []
    assert not in_a_thread(lambda: layers.append(layer_of(engine)))
    layer = layers[0]
    field = ti.field(ti.f32, 1000)
    (fault,) = in_a_thread(lambda: layer.extend(q[120:], k[120:], v[120:]))
    assert isinstance(fault, RuntimeError) and "sync() there first" in str(fault), fault
    assert layer.rows_seen == 120
    field.fill(2.0)
    assert not in_a_thread(lambda: layer.extend(q[120:], k[120:], v[120:]))
    other = ti.field(ti.f32, 10)
    layer.extend(q[120:], k[120:], v[120:])  # here, it may
    other.fill(1.0)
    assert field.to_numpy().sum() == 2000 and other.to_numpy().sum() == 10
    """
    out = place.run(code, WARM, LAYER)
    assert all(line.startswith(STARTS) for line in out.splitlines())


def test_a_hosts_tape_records_its_own_kernels_alone(place: Place) -> None:
    code = """
    ti.init(arch=ti.cpu, log_level=ti.ERROR)
    x = ti.field(ti.f32, 4, needs_grad=True)
    loss = ti.field(ti.f32, (), needs_grad=True)
    @ti.kernel
    def square():
        for i in x:
            loss[None] += x[i] ** 2
    x.fill(3.0)
    layer = layer_of(o1core.O1Batch("taichi", fallback=None))
    layer.fork().extend(q[120:], k[120:], v[120:])
    with ti.ad.Tape(loss):
        square()
        layer.extend(q[120:], k[120:], v[120:])
    assert (x.grad.to_numpy() == 6).all()
    """
    place.run(code, WARM, LAYER)


@pytest.mark.parametrize("home", [True, False])
def test_a_daemon_thread_at_the_end(place: Place, home: bool) -> None:
    """Without a home, the program is ended at exit too."""
    code = """
    import time
    layer = layer_of(o1core.O1Batch("taichi", fallback=None, device="cpu"))
    layer.extend(q[:64], k[:64], v[:64])
    def for_ever():
        while True:
            layer.extend(q[:64], k[:64], v[:64])
    threading.Thread(target=for_ever, daemon=True).start()
    time.sleep(0.5)
    """
    assert place.run(code, WARM if home else {**WARM_CACHE, "HOME": None}, LAYER) == ""


def test_limits_are_those_of_the_arch_that_is(place: Place, vulkan: bool) -> None:
    if not vulkan:
        pytest.skip("there is no Vulkan device")
    code = """
    ti.init(arch=ti.cpu, log_level=ti.ERROR)
    engine = o1core.O1Batch("taichi", fallback=None)
    q, k, v = random_rows(0, 2700)
    config = o1core.Config(300, 64, 2)
    layer = engine.seal(q[:2600], k[:2600], v[:2600], config)
    kept = layer.snapshot(durable=True)
    ti.init(arch=ti.vulkan, log_level=ti.ERROR)
    words = "landmarks must be at most 256", "vulkan", "got 300"
    refused(BackendUnavailable, lambda: layer.restore(kept), *words)
    refused(BackendUnavailable, lambda: engine.load(kept.state), *words)
    """
    place.run(code, WARM, LAYER)


def test_copies_of_an_array_have_memory_of_their_own(place: Place, arch: str) -> None:
    code = f"""
    import copy
    opened = open_runtime({arch!r})
    a = opened.array(ti.f32, 64)
    with opened.using():
        a.from_numpy(NUMBERS)
    twins = copy.copy(a), copy.deepcopy(a)
    del a
    b = opened.array(ti.f32, 64)
    with opened.using():
        b.fill(7)
    assert all((twin.to_numpy() == NUMBERS).all() for twin in twins)
    """
    assert place.run(code) == ""


FORK = """
import os, threading, time
a, b = opened.array(ti.f32, 64), opened.array(ti.f32, 64)
with opened.using():
    third(a, b)
    b.to_numpy()

def child():
    refused(BackendUnavailable, open_runtime, "forked", "spawn")
    refused(BackendUnavailable, lambda: open_runtime("cpu"), "forked", "spawn")
    refused(BackendUnavailable, why_not_auto, "forked")
    def use():
        with opened.using():
            raise AssertionError
    for call in (opened.require_live, use, lambda: opened.array(ti.f32, 3)):
        refused(RuntimeError, call, "forked", "spawn")
    globals().pop("a", None)
    assert runtime.lock.acquire(timeout=5)

def hold():
    with opened.using():
        inside.set()
        leave.wait(30)

inside, leave = threading.Event(), threading.Event()
thread = threading.Thread(target=hold)
thread.start()
inside.wait(30)
pid = os.fork()
if pid == 0:
    child()
    print("exits", flush=False)
    raise SystemExit(5)
deadline = time.monotonic() + 20
while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
    if time.monotonic() > deadline:
        os.kill(pid, 9)
        raise AssertionError("the child hangs")
    time.sleep(0.02)
leave.set()
thread.join()
assert os.waitstatus_to_exitcode(done[1]) == 5

import multiprocessing
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(20)
assert process.exitcode == 0, process.exitcode

with opened.using():
    third(a, b)
    b.to_numpy()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("adopted", [False, True])
def test_a_forked_process_is_refused_and_ends(place: Place, arch: str, adopted: bool) -> None:
    init = f"ti.init(arch=ti.{arch}, offline_cache=False)\nimport sys; sys.stdout.flush()\n"
    out = place.run(
        (init if adopted else "") + f"opened = open_runtime({arch!r})" + FORK,
        {**ALONE, "PYTHONWARNINGS": "ignore"},  # of forks where there are threads
    )
    assert out.endswith("exits\n")
    assert len(out.splitlines()) == 1 + adopted


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="it counts threads there")
def test_a_fork_before_this_was_imported(place: Place) -> None:
    code = f"""
    import os, sys
    import {LANGUAGE} as ti
    ti.init(arch=ti.cpu, offline_cache=False)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            from o1core_taichi.runtime import open_runtime
            open_runtime()
        except RuntimeError as fault:
            code = 0 if "forked" in str(fault) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    """
    place.run(code, ALONE, before="")


def test_auto_takes_it_for_a_real_gpu_only(place: Place) -> None:
    code = """
    import time
    from o1core_taichi.devices import VulkanDevice
    version = 1 << 22 | 3 << 12
    devices.cuda_name = lambda: ""
    devices._vulkan_devices = lambda: ()
    started = time.perf_counter()
    assert why_not_auto() == "taichi would run on the CPU (numpy is faster there)"
    assert time.perf_counter() - started < 0.5
    assert why_not_auto("cpu") == why_not_auto()
    refused(BackendUnavailable, lambda: why_not_auto("vulkan"), "no Vulkan device")
    devices._vulkan_devices = lambda: (VulkanDevice("llvmpipe", 4, version),)
    assert "CPU" in why_not_auto()
    assert "software" in why_not_auto("vulkan") and "llvmpipe" in why_not_auto("vulkan")
    real = VulkanDevice("A GPU", 1, version)
    devices._vulkan_devices = lambda: (VulkanDevice("llvmpipe", 4, version), real)
    assert why_not_auto() == why_not_auto("vulkan") == ""
    devices.cuda_name = lambda: "A GPU"
    assert why_not_auto() == why_not_auto("cuda") == "" and "CPU" in why_not_auto("cpu")
    assert program() is None
    """
    if sys.platform == "darwin":
        pytest.skip("there is Metal")
    assert place.run(code) == ""
    assert not list(place.home.iterdir())


# Devices ------------------------------------------------------------------------------------------


def test_devices_are_found_as_the_language_chooses_them(place: Place) -> None:
    code = """
    import os
    from o1core_taichi.devices import VulkanDevice, vulkan_device
    def vulkan(minor):
        return 1 << 22 | minor << 12 | 280
    cpu, integrated = VulkanDevice("llvmpipe", 4, vulkan(4)), VulkanDevice("I", 1, vulkan(3))
    discrete, second = VulkanDevice("D", 2, vulkan(1)), VulkanDevice("D2", 2, vulkan(1))
    devices._vulkan_devices = lambda: (cpu, integrated, discrete, second)
    assert vulkan_device("") is discrete
    assert vulkan_device("3") is second and vulkan_device("0") is cpu
    assert vulkan_device("4") is discrete and vulkan_device("x") is discrete
    assert [d.software for d in (cpu, integrated, discrete)] == [True, False, False]
    devices._vulkan_devices = lambda: ()
    assert vulkan_device("") is None

    class Nvml:
        names = {0: b"First", 1: b"Second", b"GPU-8f": b"Second"}
        ended = 0
        def nvmlInit_v2(self): return 0
        def nvmlShutdown(self): self.ended += 1
        def nvmlDeviceGetCount_v2(self, count): count._obj.value = 2; return 0
        def nvmlDeviceGetHandleByIndex_v2(self, index, handle): self.key = index; return 0
        def nvmlDeviceGetHandleByUUID(self, key, handle): self.key = key; return key != b"GPU-8f"
        def nvmlDeviceGetName(self, handle, name, size): name.value = self.names[self.key]; return 0
    nvml = Nvml()
    devices._library = lambda linux, windows: nvml
    for visible, name in [
        (None, "First"), ("1,0", "Second"), (" 0", "First"), ("GPU-8f", "Second"),
        ("GPU-8", "NVIDIA GPU"), ("", ""), ("-1", ""), ("2", ""), ("none", ""),
    ]:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        assert devices.cuda_name() == name, visible
    assert nvml.ended == 9
    os.environ.pop("CUDA_VISIBLE_DEVICES")
    os.environ["TI_ENABLE_CUDA"] = "0"
    assert devices.cuda_name() == ""
    """
    assert place.run(code) == ""


def test_the_device_is_the_one_that_runs(place: Place, vulkan: bool) -> None:
    if not vulkan:
        pytest.skip("there is no Vulkan")
    code = """
    found = devices.vulkan_device("")
    opened = open_runtime("vulkan")
    assert found.name in opened.name and found.software == opened.software
    """
    assert place.run(code) == ""
