"""Fixtures of the matrix: backends, engines, the shared folder, hostile memory."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import o1core

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("O1CORE_SHARED", ROOT.parent / "shared"))
REQUIRED = [name for name in os.environ.get("O1CORE_REQUIRE", "").split(",") if name]

BACKENDS = ("numpy",)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend that runs here; an absent one that is required fails."""
    name: str = request.param
    for info in o1core.backends():
        if info.name == name and info.usable:
            return name
    if name in REQUIRED:
        pytest.fail(f"backend {name} is required and not usable: {o1core.backends()}")
    pytest.skip(f"backend {name} is not usable here")


@pytest.fixture(scope="session")
def engine(backend: str) -> Iterator[o1core.O1Batch]:
    with o1core.O1Batch(backend, fallback=None) as opened:
        yield opened


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
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New float memory holds NaN, so whatever is read before it is written shows."""
    empty = np.empty

    def poisoned(shape, dtype=float, **options):  # type: ignore[no-untyped-def]
        array = empty(shape, dtype, **options)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", poisoned)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, for packages that come and go with the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path
