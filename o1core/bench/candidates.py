"""Which candidates there are, and opening them in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from o1core import registry
from o1core.bench.figures import Rate, Subject
from o1core.bench.turns import clocked, in_turns
from o1core.engine import O1Batch
from o1core.errors import BackendUnavailable, UnknownBackend
from o1core.executor import Executor
from o1core.meter import Meter

__all__ = ["Candidate", "measure_ceilings", "open_candidates"]

CEILING_CALLS, CEILING_REPEATS, CEILING_SECONDS = 8, 5, 2.0


@dataclass(eq=False)
class Candidate:
    """A backend in one of its variants, open."""

    subject: Subject
    executor: Executor
    engine: O1Batch
    meter: Meter

    @property
    def name(self) -> str:
        return self.subject.name


def open_candidates(names: Sequence[str] | None) -> Iterator[tuple[Subject, Candidate | None]]:
    """Every candidate, opened if it can be; its subject says why not otherwise.

    names: backends or variants of them. None takes all that run here but what "auto" passes over,
    for which there is a reason.
    """
    for name, backend, arguments in _variants(names):
        subject = Subject(name, backend, named=names is not None)
        try:
            device = arguments.get("device")
            passed = names is None and backend != "numpy"
            if passed and (reason := registry.why_not_auto(backend, device)):
                subject.reasons = (f"{reason}; --backends {name} measures it all the same",)
                yield subject, None
                continue
            options = {key: x for key, x in arguments.items() if key != "device"}
            executor = registry.open_backend(backend, device, options)
        except BackendUnavailable as fault:
            subject.reasons = fault.reasons or ("it gives no reason",)
            yield subject, None
            continue
        except (RuntimeError, TypeError, ValueError, OSError) as fault:
            subject.reasons = (" ".join(str(fault).split()),)
            yield subject, None
            continue
        subject.device, subject.detail = executor.device, executor.detail
        engine = O1Batch(executor, fallback=None)
        yield subject, Candidate(subject, executor, engine, executor.meter())


def _variants(names: Sequence[str] | None) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, backend and arguments of each candidate; UnknownBackend for a name that is none."""
    installed = registry.names()
    for name in dict.fromkeys(installed if names is None else names):
        of = [x for x in installed if x == name or name.startswith(f"{x}-")]
        if not of:
            known = f"no backend of that name is installed (installed: {', '.join(installed)})"
            raise UnknownBackend(name, [known])
        backend = name if name in of else max(of, key=len)
        try:
            variants = registry.variants(backend)
        except UnknownBackend:
            raise
        except BackendUnavailable:
            # Opening it will say why.
            yield name, backend, {}
            continue
        if name != backend and name not in variants:
            known = f"backend {backend} has no such variant (it has {', '.join(variants)})"
            raise UnknownBackend(name, [known])
        # A backend's own name, where no variant has it, is the backend as it opens by itself.
        chosen = variants if names is None else {name: variants.get(name, {})}
        for variant, arguments in chosen.items():
            yield variant, backend, arguments


def measure_ceilings(meter: Meter) -> tuple[Rate, ...]:
    """The best rate of each of its ceilings."""
    found = []
    for ceiling in meter.ceilings():
        steps = [ceiling.start] * CEILING_CALLS + [ceiling.wait]
        work = {ceiling.name: clocked(*steps, calls=CEILING_CALLS)}
        seconds, failed = in_turns(work, CEILING_REPEATS, CEILING_SECONDS)
        for fault in failed.values():
            raise fault
        best = min(min(each) for each in seconds.values())
        found.append(Rate(ceiling.name, ceiling.unit, ceiling.amount / best))
    return tuple(found)
