"""Finding backends: the entry-point group, ours and strangers' alike."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any

from o1core.errors import BackendUnavailable, UnknownBackend
from o1core.executor import Executor

__all__ = [
    "GROUP",
    "BackendInfo",
    "backends",
    "names",
    "open_auto",
    "open_backend",
    "variants",
    "why_not_auto",
]

log = logging.getLogger(__name__)

GROUP = "o1core.backends"

PLANNED: dict[str, str] = {}
"""Backends that a later version is to have, and what to say of them until then."""


@dataclass(frozen=True)
class BackendInfo:
    """What `o1core.backends()` says of one installed backend.

    device is what it would run on; reasons say why it is not usable, empty when it is.
    """

    name: str
    usable: bool
    device: str
    reasons: tuple[str, ...]
    source: str


def backends() -> list[BackendInfo]:
    """Every installed backend, whether it is usable here, and if not why.

    Imports the GPU libraries of those that are installed.
    """
    infos = []
    for name, entry in sorted(_entries().items()):
        source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
        try:
            device = _probe(_load(name))
        except BackendUnavailable as fault:
            infos.append(BackendInfo(name, False, "", fault.reasons, source))
        else:
            infos.append(BackendInfo(name, True, device, (), source))
    return infos


def names() -> list[str]:
    """The backends that are installed, usable or not; imports none."""
    return sorted(_entries())


def variants(name: str) -> Mapping[str, Mapping[str, Any]]:
    """The variants of a backend (see `Executor.variants`); imports it.

    BackendUnavailable with the reasons when that fails.
    """
    return _load(name).variants()


def why_not_auto(name: str, device: Any = None) -> str:
    """Why "auto" passes over a backend (see `Executor.why_not_auto`); imports it, opens nothing."""
    return _load(name).why_not_auto(device)


class BrokenBackend(BackendUnavailable):
    """The backend is there but fails, which is a fault of its own and not a missing dependency."""


def open_backend(
    name: str, device: Any = None, options: Mapping[str, Any] | None = None
) -> Executor:
    """The executor of the backend `name`, or `BackendUnavailable` with the reasons.

    TypeError for an option that this backend does not have.
    """
    return _open(_load(name), device, options or {})


def open_auto(device: Any = None) -> tuple[Executor, str, list[str]]:
    """The best usable backend, why it was taken, and the faults met on the way.

    Candidates are those with `auto_rank >= 0`, best rank first. A software adapter is passed over
    unless nothing else is there; a backend that is broken, rather than absent, is a fault.
    """
    faults: list[str] = []
    passed: list[str] = []
    wrong: Exception | None = None
    ranked: list[type[Executor]] = []
    for name in _entries():
        try:
            ranked.append(_load(name))
        except BrokenBackend as fault:
            faults.append(str(fault))
        except BackendUnavailable as fault:
            passed.append(str(fault))
    for kind in sorted(ranked, key=lambda kind: -kind.auto_rank):
        if kind.auto_rank < 0:
            continue
        try:
            if reason := kind.why_not_auto(device):
                passed.append(reason)
                continue
            executor = _open(kind, device, {})
        except BrokenBackend as fault:
            faults.append(str(fault))
            continue
        except (TypeError, ValueError) as fault:
            # Each backend has devices of its own; the name may mean something to another one.
            wrong = wrong or fault
            passed.append(f"{kind.name}: {fault}")
            continue
        except BackendUnavailable as fault:
            passed.append(str(fault))
            continue
        except Exception as fault:
            faults.append(str(_fault(kind.name, fault)))
            continue
        if executor.software:
            passed.append(f"{kind.name} has only a software adapter ({executor.device})")
            executor.close()
            continue
        return executor, "; ".join([f"auto chose {kind.name}", *passed]), faults
    if wrong is not None:
        # What each backend says of the device, one of which may be the reason that matters.
        raise (TypeError if isinstance(wrong, TypeError) else ValueError)(
            "; ".join(passed)
        ) from wrong
    raise BackendUnavailable("auto", [*faults, *passed] or [_NOT_INSTALLED])


_NOT_INSTALLED = (
    "no backend is installed: o1core finds them through package metadata, so install it "
    "(pip install o1core, or pip install -e . in a checkout)"
)


def _entries() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(name: str) -> type[Executor]:
    """The executor class of an entry point.

    A missing dependency of the backend is a reason; any other failure of its import is a fault of
    the backend and is shown with its last frame.
    """
    entries = _entries()
    entry = entries.get(name)
    if entry is None:
        if not entries:
            raise BackendUnavailable(name, [_NOT_INSTALLED])
        if name in PLANNED:
            raise BackendUnavailable(name, [PLANNED[name]])
        raise UnknownBackend(
            name,
            [f"no backend of that name is installed (installed: {', '.join(sorted(entries))})"],
        )
    try:
        kind = entry.load()
    except ModuleNotFoundError as fault:
        own = entry.module.partition(".")[0]
        if fault.name is None or fault.name.partition(".")[0] in (own, "o1core"):
            raise _fault(name, fault) from fault
        raise BackendUnavailable(
            name, [f"{fault.name} is not installed: pip install 'o1core[{name}]'"]
        ) from fault
    except BackendUnavailable:
        raise  # its own verdict: of an environment variable, or this Python
    except Exception as fault:
        raise _fault(name, fault) from fault
    if not (isinstance(kind, type) and issubclass(kind, Executor)):
        raise BackendUnavailable(
            name, [f"its entry point {entry.value} is not an o1core.Executor subclass"]
        )
    return kind


def _open(kind: type[Executor], device: Any, options: Mapping[str, Any]) -> Executor:
    known = [p.name for p in signature(kind.open).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise TypeError(
                f"backend {kind.name} has no option {option!r} "
                f"(it has {', '.join(known) if known else 'none'})"
            )
    try:
        return kind.open(device, **options)
    except (BackendUnavailable, TypeError, ValueError):
        raise  # its own verdict, or the caller's wrong `device`
    except Exception as fault:
        if options and isinstance(fault, OSError):
            raise  # about a file that an option names
        raise _fault(kind.name, fault) from fault


def _probe(kind: type[Executor]) -> str:
    try:
        return kind.probe()
    except BackendUnavailable:
        raise
    except Exception as fault:
        raise _fault(kind.name, fault) from fault


def _fault(name: str, fault: Exception) -> BrokenBackend:
    frame = traceback.extract_tb(fault.__traceback__)[-1]
    log.error("backend %s failed", name, exc_info=fault)
    where = f"{frame.filename}:{frame.lineno}"
    return BrokenBackend(name, [f"it failed with {type(fault).__name__}: {fault} ({where})"])
