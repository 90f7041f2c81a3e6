"""What backends change in the process they run in: environment for a while, exit after a fork."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["changed_environment", "exit_without_drivers", "headless"]


@contextmanager
def changed_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables changed for a while; None removes one."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is not None:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


def headless() -> dict[str, str | None]:
    """What to change while drivers are loaded in a session without a runtime directory.

    They complain of that on stderr.
    """
    name = "XDG_RUNTIME_DIR"
    if sys.platform != "linux" or name in os.environ:
        return {}
    return {name: tempfile.gettempdir()}


def exit_without_drivers(libc: Any) -> None:
    """Have a forked process end with Python's part of its exit, where the C library can.

    The handlers of drivers would wait for threads of the parent, which are not there. libc is to be
    loaded before the fork.
    """
    if hasattr(libc, "on_exit"):
        # The last to be registered is the first to be called: streams are flushed, then it ends
        # with the status that on_exit passes.
        libc.on_exit(libc._exit, None)
        libc.on_exit(libc.fcloseall, None)
