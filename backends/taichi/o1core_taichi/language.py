"""The kernel language: taichi, or its maintained fork quadrants; imported without a word."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tempfile
import warnings
from typing import Any

from o1core.errors import BackendUnavailable
from o1core.process import changed_environment

__all__ = ["NAME", "VARIABLE", "VERSION", "has_quads", "homeless", "ti"]

VARIABLE = "O1CORE_TAICHI"
LANGUAGES = ("taichi", "quadrants")


def choose() -> str:
    """The language that `O1CORE_TAICHI` names, else the host's, else one that is installed."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted:
        if wanted not in LANGUAGES:
            rule = f"{VARIABLE} must be {' or '.join(map(repr, LANGUAGES))}, got {wanted!r}"
            raise BackendUnavailable("taichi", [rule])
        if not _installed(wanted):
            raise ModuleNotFoundError(f"No module named {wanted!r} ({VARIABLE})", name=wanted)
        return wanted
    for found in (_is_initialised, sys.modules.__contains__, _installed):
        for name in LANGUAGES:
            if found(name):
                return name
    if sys.version_info >= (3, 14):
        reason = "neither taichi nor quadrants has wheels for Python 3.14: use Python 3.11 to 3.13"
        raise BackendUnavailable("taichi", [reason])
    raise ModuleNotFoundError("No module named 'taichi' or 'quadrants'", name="taichi")


def _is_initialised(name: str) -> bool:
    """Whether the host has called its init()."""
    module: Any = sys.modules.get(name)
    try:
        runtime = module.lang.impl.get_runtime()
    except AttributeError:
        return False
    return getattr(runtime, "_prog", None) is not None or vars(runtime).get("prog") is not None


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return name in sys.modules  # put there by hand, without a spec


def homeless() -> dict[str, str | None]:
    """What to change where there is no home: the language ends the process if it finds none."""
    if os.name != "posix" or os.path.isdir(os.environ.get("HOME", "")):
        return {}
    return {"HOME": tempfile.gettempdir()}


def _import(name: str) -> Any:
    # Not by redirecting sys.stdout: the import looks whether that is the real one, and has the
    # host's kernels print into a buffer for ever if it is not.
    quiet: dict[str, str | None] = {
        f"ENABLE_{name.upper()}_HEADER_PRINT": "0",
        "TI_MANYLINUX2014_OK": "1",
        "QD_MANYLINUX2014_OK": "1",
    }
    with changed_environment(quiet | homeless()), warnings.catch_warnings():
        # What it uses is deprecated in newer Pythons; a host may have made such warnings errors.
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


NAME = choose()
"""What it is called: "taichi" or "quadrants"."""
ti: Any = _import(NAME)
VERSION = ".".join(map(str, ti.__version__))


def has_quads() -> bool:
    """Whether workgroup memory can be made of vectors here; asked while a kernel is compiled.

    What is read as one vector is addressed once: products run at 32 instead of 25 TFLOP/s on an
    H200. Only CUDA has them; elsewhere the language knows nothing but numbers there.
    """
    return NAME == "taichi" and ti.lang.impl.current_cfg().arch == ti.cuda
