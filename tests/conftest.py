"""Fixtures of the matrix: backends, engines, the shared folder, hostile memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import BACKENDS, COLUMNS, DEFECTS, ORIGINAL, SUB_CHUNK, backend_of

import o1core
from o1core import registry
from o1core.testing import Hostile

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("O1CORE_SHARED", ROOT.parent / "shared"))
REQUIRED = [name for name in os.environ.get("O1CORE_REQUIRE", "").split(",") if name]

# The arch of the column "taichi", of which a process has one: vulkan, cuda and metal are run apart.
TAICHI_ARCH = os.environ.get("O1CORE_TAICHI_ARCH", "cpu")

# Whose kernels the column ORIGINAL runs; elsewhere the variable must not replace o1core's own.
WGSL = os.environ.pop("O1CORE_WGSL", "")


def pytest_itemcollected(item: pytest.Item) -> None:
    """The known defects of the original are failures that must occur, and no others."""
    if not isinstance(item, pytest.Function):
        return
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = parameters.get("case")
    defect = DEFECTS.get(item.originalname, {}).get(None if case is None else str(case))
    if parameters.get("backend") == ORIGINAL and defect is not None:
        # Only what a check says: an absent file or adapter is none of its defects.
        item.add_marker(pytest.mark.xfail(strict=True, raises=AssertionError, reason=defect))


def require_backend(name: str) -> None:
    """Skip where a backend does not run, or fail if it is required."""
    reasons: tuple[str, ...] = ("it is not installed",)
    for info in o1core.backends():
        if info.name == name:
            if info.usable:
                return
            reasons = info.reasons
    reason = f"backend {name} is not usable here: {'; '.join(reasons)}"
    if name in REQUIRED:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """A column of the matrix: each backend that runs here; all columns with `every_column`."""
    column: str = request.param
    require_backend(backend_of(column))
    return column


@pytest.fixture(scope="session")
def open_engine(request: pytest.FixtureRequest) -> Iterator[Callable[[str], o1core.O1Batch]]:
    """The engine of a column, opened once; skips or fails where the column does not run."""
    engines: dict[str, o1core.O1Batch] = {}

    def opened(column: str) -> o1core.O1Batch:
        if column in engines:
            return engines[column]
        name, options = backend_of(column), {}
        if column == ORIGINAL:
            options = {"wgsl": request.getfixturevalue("original_wgsl")}
        elif column in SUB_CHUNK:
            options = {"strategy": "sub-chunk"}
        require_backend(name)
        device = TAICHI_ARCH if name == "taichi" else None
        engine = engines[column] = o1core.O1Batch(name, fallback=None, device=device, **options)
        if name == "wgpu":
            mine = "original WGSL, byte for byte" if column == ORIGINAL else "o1core's own WGSL"
            assert mine in engine.reason
        return engine

    with ExitStack() as stack:
        yield opened
        for engine in engines.values():
            stack.enter_context(engine)


@pytest.fixture(scope="session")
def engine(backend: str, open_engine: Callable[[str], o1core.O1Batch]) -> o1core.O1Batch:
    return open_engine(backend)


@pytest.fixture(scope="session")
def hostile(engine: o1core.O1Batch) -> o1core.O1Batch:
    """The same with memory as unfriendly as it may be."""
    return o1core.O1Batch(Hostile(engine._executor), fallback=None)


@pytest.fixture(scope="session")
def engines(open_engine: Callable[[str], o1core.O1Batch]) -> dict[str, o1core.O1Batch]:
    """All columns that run here, with hostile memory; there must be two to compare."""
    found, reasons = {}, []
    for column in COLUMNS:
        try:
            executor = open_engine(column)._executor
        except pytest.skip.Exception as absent:
            reasons.append(str(absent))
        else:
            found[column] = o1core.O1Batch(Hostile(executor), fallback=None)
    if len(found) < 2:
        pytest.skip(f"nothing to compare with: {'; '.join(reasons)}")
    return found


@pytest.fixture(scope="session")
def original_wgsl(request: pytest.FixtureRequest) -> str:
    """The upstream engine's kernels, of O1CORE_WGSL or of the shared folder."""
    if WGSL:
        return WGSL
    shared: Path = request.getfixturevalue("shared")
    return str(next((shared / "seed").glob("*.txt")))


@pytest.fixture(scope="session")
def gpu() -> Any:
    """The `Gpu` that all engines share."""
    require_backend("wgpu")
    from o1core_wgpu.device import open_gpu

    return open_gpu()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the project with the larger vectors; users do not have it."""
    if not SHARED.is_dir():
        reason = f"no shared folder at {SHARED} (larger golden vectors); O1CORE_SHARED names one"
        if os.environ.get("O1CORE_REQUIRE_SHARED") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return SHARED


@pytest.fixture
def poisoned_memory(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New float memory holds NaN, so whatever is read before it is written shows.

    On a device this is also put, before every run, into what its calls share.
    """
    empty = np.empty

    def poisoned(shape, dtype=float, **options):  # type: ignore[no-untyped-def]
        array = empty(shape, dtype, **options)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", poisoned)
    if backend_of(backend) == "taichi":
        poison_taichi(monkeypatch)
    elif backend != "numpy":
        poison_gpu(monkeypatch)


def poison_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from o1core_wgpu import WgpuExecutor
    from o1core_wgpu.device import Gpu

    make, run = Gpu.buffer, WgpuExecutor.run

    def fill(gpu: Gpu, buffer: Any) -> None:
        gpu.device.queue.write_buffer(buffer, 0, np.full(buffer.size // 4, np.nan, np.float32))

    def poisoned(gpu: Gpu, nbytes: int, usage: int) -> Any:
        buffer = make(gpu, nbytes, usage)
        fill(gpu, buffer)
        return buffer

    def run_poisoned(executor: WgpuExecutor, *arguments: Any) -> Any:
        for buffer in executor._work._buffers.values():
            fill(executor._work.gpu, buffer)
        return run(executor, *arguments)

    monkeypatch.setattr(Gpu, "buffer", poisoned)
    monkeypatch.setattr(WgpuExecutor, "run", run_poisoned)


def poison_taichi(monkeypatch: pytest.MonkeyPatch) -> None:
    from o1core_taichi import TaichiExecutor
    from o1core_taichi.language import ti
    from o1core_taichi.runtime import Runtime

    make, launch = Runtime.array, TaichiExecutor.launch

    def poisoned(runtime: Runtime, dtype: Any, shape: Any) -> Any:
        array = make(runtime, dtype, shape)
        if dtype == ti.f32:
            array.fill(np.nan)
        return array

    def launch_poisoned(executor: TaichiExecutor, *arguments: Any) -> None:
        for scratch in executor._scratch.values():
            scratch.array.fill(np.nan)
        launch(executor, *arguments)

    monkeypatch.setattr(Runtime, "array", poisoned)
    monkeypatch.setattr(TaichiExecutor, "launch", launch_poisoned)


@pytest.fixture
def no_auto_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "auto" takes does not depend on the machine: never a GPU, which can still be named."""
    entries, open_auto = registry._entries, registry.open_auto

    def without_gpus() -> Any:
        return {n: entry for n, entry in entries().items() if n not in ("wgpu", "taichi")}

    def choose(device: Any = None) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(registry, "_entries", without_gpus)
            return open_auto(device)

    monkeypatch.setattr(registry, "open_auto", choose)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a backend that a later version is to have."""
    monkeypatch.setitem(registry.PLANNED, "abacus", "this version of o1core has no abacus backend")
    return "abacus"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, for packages that come and go with the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path
