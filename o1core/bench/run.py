"""Running a benchmark: open, check, time, and go on with the others when one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from o1core import reference
from o1core.bench.candidates import Candidate, measure_ceilings, open_candidates
from o1core.bench.exact import Exact, open_exact
from o1core.bench.figures import Figure, Rate, Results, Section, Way
from o1core.bench.truth import (
    STANDING_ROWS,
    Start,
    Truth,
    agree,
    check_standing,
    topical_rows,
)
from o1core.bench.turns import Work, clocked, in_turns
from o1core.config import Config, Geometry
from o1core.engine import Layer
from o1core.errors import BackendUnavailable
from o1core.meter import Resident

__all__ = ["Options", "Shape", "bench"]

SERIAL = "serial reference"
SERIAL_ROWS = 16
"""Rows that the serial reference is timed on at most; each costs the same."""
PIPELINED = 16
"""Calls before one wait."""
STREAM_CALL = 4096
FIRST_STREAM = 1000
IN_FLIGHT = 4
"""Calls of a stream before a wait, so that the device's queue does not grow without end."""

T = TypeVar("T")

Watch = Callable[[str, int, int], None]
"""Told what comes next, how much is done, and how much there is."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer, under the name by which they were asked for."""

    name: str
    groups: int
    heads_per_group: int
    head_dim: int
    value_dim: int
    config: Config

    @property
    def geometry(self) -> Geometry:
        """Once it is sealed with a prompt long enough for all its landmarks."""
        return self.config.geometry(
            groups=self.groups,
            heads_per_group=self.heads_per_group,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            rows=max(8 * self.config.landmarks, self.config.seal_rows, 1),
        )


@dataclass(frozen=True)
class Options:
    """What is measured, and how long.

    backends: None for what runs here. contexts: of exact attention, ours beside it; stream: rows
    that a layer has seen in the end; sealed: rows of a prompt. A figure has `repeats` repetitions,
    or as many as fit into `budget` seconds for all candidates together; a candidate may stream for
    `stream_seconds`.
    """

    shapes: Sequence[Shape]
    rows: Sequence[int]
    backends: Sequence[str] | None
    contexts: Sequence[int]
    stream: int
    sealed: int
    repeats: int = 15
    budget: float = 3.0
    stream_seconds: float = 30.0


def bench(options: Options, watch: Watch | None = None) -> Results:
    """Measure. UnknownBackend for the name of a candidate that is none; other faults are errors."""
    begun, results = time.monotonic(), Results()
    with ExitStack() as stack:
        candidates, known = [], dict[tuple[str, str], tuple[Rate, ...]]()
        for subject, candidate in open_candidates(options.backends):
            results.subjects.append(subject)
            if candidate is None:
                continue
            stack.callback(candidate.executor.close)
            candidates.append(candidate)
        for subject in results.subjects:
            if subject.named and subject.reasons:
                results.errors.append(f"{subject.name} did not run: {'; '.join(subject.reasons)}")
        for candidate in candidates:
            device = candidate.subject.backend, candidate.subject.device
            if device not in known:
                try:
                    known[device] = measure_ceilings(candidate.meter)
                    if not known[device]:
                        results.note(f"{candidate.name} has no ceilings here")
                except Exception as fault:  # the figures stand without
                    known[device] = ()
                    results.note(f"{candidate.name} has no ceilings: {_line(fault)}")
            candidate.subject.rates = known[device]
        for done, shape in enumerate(options.shapes):
            try:
                run = _Run(options, shape, results, candidates, watch)
                results.geometries[shape.name] = run.g
                run.measure(done)
            except Exception as fault:  # of what all candidates are compared with
                results.errors.append(f"{shape.name}: {_line(fault)}")
    if not any(f.candidate != SERIAL for f in results.figures):
        results.errors.append("nothing was measured")
    results.seconds = time.monotonic() - begun
    return results


def _line(fault: object) -> str:
    """On one line, without what terminals obey."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    return "".join(c if c.isprintable() else " " for c in text)


@dataclass
class _Run:
    """The benchmark of one geometry."""

    options: Options
    shape: Shape
    results: Results
    candidates: Sequence[Candidate]
    watch: Watch | None
    live: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = Start(self.shape.config, self.shape.geometry)
        self.g = self.start.state.geometry
        self.truths: dict[int, Truth] = {}

    def measure(self, done: int) -> None:
        steps: list[tuple[str, Callable[[], None]]] = [("checks", self.check)]
        steps += [(f"{rows} rows", partial(self.rows, rows)) for rows in self.options.rows]
        steps += [("contexts", self.contexts), ("sealing", self.sealing)]
        for i, (what, step) in enumerate(steps):
            if self.watch is not None:
                total = len(self.options.shapes) * len(steps)
                self.watch(f"{self.shape.name}: {what}", done * len(steps) + i, total)
            step()

    # Right before fast ----------------------------------------------------------------------------

    def check(self) -> None:
        """Keep the candidates whose every answer is right."""
        self.truths = {rows: Truth.of(self.start, rows) for rows in self.options.rows}
        for candidate in self.candidates:
            try:
                for rows, truth in self.truths.items():
                    self._check(candidate, rows, truth)
            except BackendUnavailable as fault:
                text = f"{candidate.name} cannot run {self.shape.name}: {_line(fault)}"
                (self.results.errors.append if candidate.subject.named else self.results.note)(text)
            except Exception as fault:
                self._wrong(candidate, fault)
            else:
                self.live.append(candidate)

    def _check(self, candidate: Candidate, rows: int, truth: Truth) -> None:
        layer = self._layer(candidate)
        try:
            truth.check(layer.extend(*truth.rows), layer)
        except AssertionError as fault:
            raise AssertionError(f"{rows} rows: {fault}") from fault
        layer = self._layer(candidate)
        resident = candidate.meter.resident(layer, *truth.rows)
        if resident is not None:
            resident.start()
            resident.wait()
            try:
                truth.check(resident.out(), layer)
            except AssertionError as fault:
                raise AssertionError(f"{rows} rows, resident: {fault}") from fault

    def _layer(self, candidate: Candidate) -> Layer:
        return candidate.engine.load(self.start.state)

    def _wrong(self, candidate: Candidate, fault: Exception) -> None:
        """No figure of this candidate counts, nor is it measured any further."""
        kind = "" if isinstance(fault, AssertionError) else f"{type(fault).__name__}: "
        self.results.errors.append(f"{candidate.name}, {self.shape.name}: {kind}{_line(fault)}")
        if isinstance(fault, AssertionError):
            self.results.drop(self.shape.name, candidate.name)
        self.live = [x for x in self.live if x is not candidate]

    def _each(self, make: Callable[[Candidate], T]) -> dict[str, T]:
        """What `make` gives for every candidate; one for which it fails is not measured further."""
        found: dict[str, T] = {}
        for candidate in list(self.live):
            try:
                found[candidate.name] = make(candidate)
            except Exception as fault:
                self._wrong(candidate, fault)
        return found

    # Rows -----------------------------------------------------------------------------------------

    def rows(self, count: int) -> None:
        """Calls of so many rows: on the device by wall and by its clock, and on host arrays.

        Apart, since a GPU that has to wait for another way lowers its clock in the meantime.
        """
        rows = self.truths[count].rows
        made = self._each(lambda x: x.meter.resident(self._layer(x), *rows))
        resident = {name: found for name, found in made.items() if found is not None}
        for name, each in resident.items():
            if not each.has_clock:
                self.results.note(f"{name} has no clock of the device")
        layers = self._each(self._layer)
        ways: dict[Way, dict[str, Work]] = {
            "wait": {n: clocked(r.wait) for n, r in resident.items()},
            "resident": {n: clocked(r.start, r.wait) for n, r in resident.items()},
            "pipelined": {
                n: clocked(*[r.start] * PIPELINED, r.wait, calls=PIPELINED)
                for n, r in resident.items()
            },
            "device clock": {n: partial(_by_device, r) for n, r in resident.items() if r.has_clock},
            "arrays": {n: clocked(partial(x.extend, *rows)) for n, x in layers.items()},
        }
        serial = self._serial(count)
        if serial is not None:
            ways["arrays"][SERIAL] = serial
        for way, work in ways.items():
            self._turns("rows", way, count, {n: w for n, w in work.items() if self._is_live(n)})

    def _is_live(self, name: str) -> bool:
        return name == SERIAL or any(x.name == name for x in self.live)

    def _serial(self, count: int) -> Work | None:
        """The float32 reference, row by row, on few of the rows."""
        few = min(count, SERIAL_ROWS)
        truth = self.truths[count]
        q, k, v = (x[:few] for x in truth.rows)
        layer = reference.load(self.start.state, "float32")
        try:
            agree(layer.extend(q, k, v), truth.out[:few])
        except AssertionError as fault:
            self.results.errors.append(f"{SERIAL}, {self.shape.name}, {count} rows: {fault}")
            return None
        timed = clocked(partial(layer.extend, q, k, v))
        self.results.note(
            f"{SERIAL}: o1core.reference in float32, one row after the other, timed on at most "
            f"{SERIAL_ROWS} rows and scaled to the call"
        )
        return lambda: timed() * count / few

    def _turns(self, section: Section, way: Way, rows: int, work: Mapping[str, Work]) -> None:
        seconds, failed = in_turns(work, self.options.repeats, self.options.budget)
        for name, fault in failed.items():
            self._failed(name, fault)
        for name, each in seconds.items():
            self._add(section, way, rows, name, each)

    def _failed(self, name: str, fault: Exception) -> None:
        for candidate in self.live:
            if candidate.name == name:
                self._wrong(candidate, fault)
                return
        self.results.errors.append(f"{name}, {self.shape.name}: {_line(fault)}")

    def _add(
        self,
        section: Section,
        way: Way,
        rows: int,
        name: str,
        seconds: tuple[float, ...],
        context: int | None = None,
        streamed: int | None = None,
    ) -> None:
        self.results.figures.append(
            Figure(self.shape.name, section, rows, name, way, seconds, context, streamed)
        )

    # Contexts -------------------------------------------------------------------------------------

    def contexts(self) -> None:
        """Layers that stream on from context to context, and exact attention at each."""
        exact = self._open_exact()
        checkpoints = self._checkpoints()
        if not checkpoints:
            return
        # In calls that overshoot a context by little, where contexts are short.
        call = min(STREAM_CALL, max(1, checkpoints[-1] // 8))
        streams = self._each(lambda x: _Stream(x, self._layer(x), call, self.options))
        for context in checkpoints:
            arrived = self._arrive(streams, context)
            for rows in self.options.rows:
                self._at_context(context, rows, arrived, exact)

    def _arrive(self, streams: Mapping[str, _Stream], context: int) -> dict[str, _Stream]:
        """The streams that are at a context, once all have gone on."""
        there = self._each(lambda x: self._advance(streams[x.name], context))
        return {name: streams[name] for name, arrived in there.items() if arrived}

    def _advance(self, stream: _Stream, context: int) -> bool:
        """Stream on; whether the layer is where it is to be measured, and right there."""
        reached = stream.advance(context)
        check_standing(stream.layer, topical_rows(self.g, 2, STANDING_ROWS))
        if not reached:
            self.results.note(
                f"{stream.name}, {self.shape.name}: {stream.layer.rows_seen:,} rows streamed in "
                f"{self.options.stream_seconds:g} s, not {context:,}"
            )
        # The last figure is of as many rows as there were.
        return reached or context == self.options.stream

    def _checkpoints(self) -> list[int]:
        """Contexts, and what a layer is to have streamed, first little and at last very much."""
        found = {*self.options.contexts}
        if self.options.stream:
            found.add(self.options.stream)
            if min(found) >= 2 * FIRST_STREAM:
                found.add(FIRST_STREAM)
        return sorted(found)

    def _open_exact(self) -> Exact | None:
        rows = max((r for r in self.options.rows), default=0)
        longest = max(self.options.contexts, default=0)
        if not longest:
            return None
        try:
            exact = open_exact(self.g, min(rows, longest), longest)
        except Exception as fault:
            self.results.errors.append(f"exact attention, {self.shape.name}: {_line(fault)}")
            return None
        self.results.note(f"exact attention runs on {exact.device}")
        return exact

    def _at_context(
        self, context: int, rows: int, standing: Mapping[str, _Stream], exact: Exact | None
    ) -> None:
        work: dict[str, Work] = {}
        ways: dict[str, Way] = {}
        made = self._each(lambda x: standing[x.name].work(rows) if x.name in standing else None)
        for name, each in made.items():
            if each is not None:
                ways[name], work[name] = each
        streamed = {name: stream.layer.rows_seen for name, stream in standing.items()}
        if exact is not None and context in self.options.contexts and rows <= context:
            for name, found in exact.works(rows, context):
                if isinstance(found, Exception):
                    where = f"{self.shape.name}, {rows} rows, context {context:,}"
                    text = f"{name}, {where}: {_line(found)}"
                    # A kernel that is not there, or has no memory, is no wrong answer.
                    wrong = isinstance(found, AssertionError)
                    (self.results.errors.append if wrong else self.results.note)(text)
                else:
                    work[name], ways[name] = found, "resident"
        seconds, failed = in_turns(work, self.options.repeats, self.options.budget / 2)
        for name, fault in failed.items():
            self._failed(name, fault)
        for name, times in seconds.items():
            self._add("context", ways[name], rows, name, times, context, streamed.get(name))

    # Sealing --------------------------------------------------------------------------------------

    def sealing(self) -> None:
        """A prompt from rows to a layer, and as many rows as one call of a sealed layer."""
        count = self.options.sealed
        if not count:
            return
        config, rows = self.shape.config, topical_rows(self.g, 5, count, count)
        seal = self._each(lambda x: clocked(partial(x.engine.seal, *rows, config)))
        self._turns("seal", "arrays", count, seal)
        extend = self._each(lambda x: clocked(partial(self._layer(x).extend, *rows)))
        self._turns("extend", "arrays", count, extend)


def _by_device(resident: Resident) -> float:
    return max(resident.device_seconds(), 1e-9)  # as in `clocked`


class _Stream:
    """A layer that sees more and more rows, on its device where it can."""

    def __init__(self, candidate: Candidate, layer: Layer, call: int, options: Options) -> None:
        self.name, self.layer = candidate.name, layer
        self._candidate, self._options = candidate, options
        self._spent = 0.0
        self._long = topical_rows(layer.geometry, 4, call)
        self._resident = candidate.meter.resident(layer, *self._long)

    def advance(self, target: int) -> bool:
        """Stream until so many rows were seen; whether that was possible in the time there is."""
        in_flight = 0
        begun = time.perf_counter()
        while self.layer.rows_seen < target:
            if self._spent + time.perf_counter() - begun > self._options.stream_seconds:
                break
            if self._resident is None:
                self.layer.extend(*self._long)
                continue
            self._resident.start()
            in_flight += 1
            if in_flight % IN_FLIGHT == 0:
                self._resident.wait()
        if in_flight % IN_FLIGHT and self._resident is not None:
            self._resident.wait()
        self._spent += time.perf_counter() - begun
        return self.layer.rows_seen >= target

    def work(self, count: int) -> tuple[Way, Work]:
        """A call of so many rows, as a host would make it."""
        q, k, v = topical_rows(self.layer.geometry, 2, count)
        resident = self._candidate.meter.resident(self.layer, q, k, v)
        if resident is None:
            return "arrays", clocked(partial(self.layer.extend, q, k, v))
        return "resident", clocked(resident.start, resident.wait)
