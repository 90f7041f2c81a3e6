"""The matrix of a machine: every case on every backend, each against the oracle and the others."""

from __future__ import annotations

import itertools
import json
import platform
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from o1core import registry
from o1core.config import Config, Geometry
from o1core.engine import O1Batch
from o1core.errors import BackendUnavailable, UnknownBackend
from o1core.executor import Executor
from o1core.testing.around import Hostile
from o1core.testing.cases import Case, cases
from o1core.testing.comparison import Report
from o1core.testing.handles import check_handles
from o1core.testing.known import KNOWN_DEFECTS
from o1core.testing.oracle import Rows, geometry_of
from o1core.testing.remote import Process, Remote
from o1core.testing.run import Answer, answer, check, check_same
from o1core.testing.steps import Steps, check_same_steps, check_steps
from o1core.testing.streams import random_stream, run_stream
from o1core.text import table

__all__ = ["Cell", "Column", "Matrix", "parity"]

STREAMS, QUICK_STREAMS = 12, 2
QUICK_THOROUGH = 8
"""Of a quick matrix, each so many-th case is run kernel by kernel as well, undone and repeated."""

Outcome = Literal["passed", "failed", "known", "unsupported"]
Watch = Callable[[str, int, int], None]
"""Told what comes next, how much of the matrix is done, and how much there is."""


@dataclass
class Cell:
    """One check of one column, or of a pair of them.

    worst: the largest error over its bound, None where no answer came. message says what failed,
    which defect is known to make it fail, or why the backend cannot run it.
    """

    outcome: Outcome = "passed"
    worst: float | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def shown(self) -> str:
        """The cell of a table."""
        if self.outcome == "passed" and self.worst is not None:
            return f"{self.worst:.3f}"
        return {"failed": "FAIL", "known": "known", "unsupported": "n/a"}.get(self.outcome, "-")


@dataclass
class Column:
    """A backend, or a variant of one: what it runs on, or the reasons why it does not run."""

    name: str
    backend: str
    device: str = ""
    detail: str = ""
    reasons: tuple[str, ...] = ()
    required: bool = False

    @property
    def ran(self) -> bool:
        return not self.reasons


@dataclass
class Matrix:
    """What came of every check: rows are cases and streams.

    rows: `{row: {column: cell}}`; pairs: `{(row, column, column): cell}`, where both had an answer;
    missing: what was required and did not run. report counts the results of all cells.
    """

    quick: bool
    columns: list[Column] = field(default_factory=list)
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)
    pairs: dict[tuple[str, str, str], Cell] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    seconds: float = 0.0

    @property
    def cells(self) -> Iterator[tuple[str, Cell]]:
        """Every cell, with words for what it is of."""
        for row, cells in self.rows.items():
            for column, cell in cells.items():
                yield f"{row} on {column}", cell
        for (row, a, b), cell in self.pairs.items():
            yield f"{row} on {a} and {b}", cell

    def count(self, outcome: Outcome) -> int:
        return sum(cell.outcome == outcome for _, cell in self.cells)

    @property
    def failures(self) -> list[str]:
        """One line for everything that is wrong; empty when the matrix has passed."""
        lines = [
            f"{name} was required and did not run: {self._why_not(name)}" for name in self.missing
        ]
        if not any(column.ran for column in self.columns):
            lines.append("no backend ran")
        elif not self.rows:
            lines.append("no case ran")
        # A backend may have limits, but not such that nothing is left to check.
        lines += [
            f"{column.name} ran no case: all are beyond its limits"
            for column in self.columns
            if column.ran
            and self.rows
            and all(cells[column.name].outcome == "unsupported" for cells in self.rows.values())
        ]
        lines += [f"{what}: {x.message}" for what, x in self.cells if x.outcome == "failed"]
        return lines

    @property
    def passed(self) -> bool:
        return not self.failures

    def _why_not(self, name: str) -> str:
        found = [
            f"{c.name}: {'; '.join(c.reasons)}"
            for c in self.columns
            if name in (c.name, c.backend) and not c.ran
        ]
        return "; ".join(found) or "it is not installed, or not among those that were asked for"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        ran = [column.name for column in self.columns if column.ran]
        if self.rows:
            body = [[row, *(cells[c].shown for c in ran)] for row, cells in self.rows.items()]
            yield from table(["worst error over its bound", *ran], body)
            yield ""
        if self.pairs:
            by_pair: dict[tuple[str, str], list[Cell]] = {}
            for (_, a, b), cell in self.pairs.items():
                by_pair.setdefault((a, b), []).append(cell)
            body = [
                [
                    f"{a}, {b}",
                    str(len(found)),
                    f"{max(x.worst or 0.0 for x in found):.3f}",
                    str(sum(x.outcome == "failed" for x in found) or "-"),
                ]
                for (a, b), found in by_pair.items()
            ]
            yield from table(["with each other", "cases", "worst", "FAIL"], body)
            yield ""
        devices = [
            [c.name, " ".join(filter(None, (c.device, c.detail)))] for c in self.columns if c.ran
        ]
        yield from table(["column", "ran on"], devices, left=None)
        yield ""
        yield from (
            f"{c.name} did not run: {'; '.join(c.reasons)}" for c in self.columns if not c.ran
        )
        known = sorted({x.message for _, x in self.cells if x.outcome == "known"})
        yield from (f"known: {text}" for text in known)
        apart = sorted({x.message for _, x in self.cells if x.outcome == "unsupported"})
        yield from (f"n/a: {text}" for text in apart)
        yield from (f"FAIL: {text}" for text in self.failures)
        yield (
            f"{self.report.results:,} results against the oracle, {self.report.ambiguous} of them "
            f"ambiguous, {self.report.undecided} undecided; {self.seconds:.0f} s"
        )
        absent = sum(not column.ran for column in self.columns)
        yield (
            f"{self.count('passed')} passed, {self.count('failed')} failed, {self.count('known')} "
            f"known defects, {self.count('unsupported')} not supported; {len(ran)} columns ran, "
            f"{absent} did not"
        )

    def to_json(self) -> str:
        """Everything, as JSON text."""
        from o1core import __version__

        return json.dumps(
            {
                "o1core": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "platform": platform.platform(),
                "quick": self.quick,
                "passed": self.passed,
                "seconds": self.seconds,
                "missing": self.missing,
                "failures": self.failures,
                "results": {k: v for k, v in asdict(self.report).items() if k != "worst"},
                "columns": [asdict(column) for column in self.columns],
                "rows": {
                    row: {column: asdict(cell) for column, cell in cells.items()}
                    for row, cells in self.rows.items()
                },
                "pairs": [
                    {"row": row, "columns": [a, b], **asdict(cell)}
                    for (row, a, b), cell in self.pairs.items()
                ],
            },
            indent=1,
        )

    def to_junit(self) -> str:
        """The matrix as JUnit's XML, which CI systems read: a suite a column, and one of pairs."""
        root = ET.Element("testsuites", name="o1core parity")
        for column in self.columns:
            cells = {row: cells[column.name] for row, cells in self.rows.items() if column.ran}
            if not column.ran:
                reasons = "; ".join(column.reasons)
                cells["runs"] = Cell("failed" if column.required else "unsupported", None, reasons)
            _suite(root, column.name, cells)
        absent = {c.name for c in self.columns} | {c.backend for c in self.columns}
        for name in self.missing:
            if name not in absent:
                _suite(root, name, {"runs": Cell("failed", None, self._why_not(name))})
        if self.pairs:
            _suite(root, "pairs", {f"{r}: {a}, {b}": x for (r, a, b), x in self.pairs.items()})
        ET.indent(root)
        return ET.tostring(root, "unicode", xml_declaration=True) + "\n"


def _suite(root: ET.Element, name: str, cells: Mapping[str, Cell]) -> None:
    failed = sum(cell.outcome == "failed" for cell in cells.values())
    skipped = sum(cell.outcome in ("known", "unsupported") for cell in cells.values())
    total = sum(cell.seconds for cell in cells.values())
    counts = {"tests": len(cells), "failures": failed, "errors": 0, "skipped": skipped}
    numbers = {key: str(value) for key, value in counts.items()}
    suite = ET.SubElement(root, "testsuite", {"name": name, **numbers, "time": f"{total:.3f}"})
    for row, cell in cells.items():
        test = ET.SubElement(
            suite,
            "testcase",
            {"classname": f"parity.{name}", "name": row, "time": f"{cell.seconds:.3f}"},
        )
        if cell.outcome == "failed":
            ET.SubElement(test, "failure", message=cell.message)
        elif cell.outcome in ("known", "unsupported"):
            kind = "known defect: " if cell.outcome == "known" else "not supported: "
            ET.SubElement(test, "skipped", message=kind + cell.message)


def _clean(text: object) -> str:
    """On one line, without what terminals obey and XML cannot say."""
    return "".join(c if c.isprintable() else " " for c in str(text))


# Running ------------------------------------------------------------------------------------------


class _Runner(NamedTuple):
    name: str
    executor: Executor
    engine: O1Batch


def parity(
    backends: Iterable[str | Executor] | None = None,
    *,
    only: Iterable[Case] | None = None,
    quick: bool = False,
    require: Iterable[str] = (),
    watch: Watch | None = None,
) -> Matrix:
    """Run the matrix: every case on every backend of this machine, and all with each other.

    backends: names of backends or of their variants, which run in processes of their own, and
    executors, which run in this one; all that are installed by default. What is named must run.
    only: these cases instead of the table's (`cases`); quick: a part of the table. require: names
    of backends or variants that must run besides.

    Each cell is the output, the state after sealing and at the end, what every kernel wrote, and
    that calls can be undone and repeated (the last two in a quick matrix for some cases only).
    ValueError for a name that is none or comes twice.
    """
    begun = time.monotonic()
    matrix = Matrix(quick)
    given = None if backends is None else _as_list(backends)
    chosen = [c for c in cases() if c.quick or not quick] if only is None else list(only)
    _distinct("cases", [case.name for case in chosen])
    streams = range(0 if only is not None else QUICK_STREAMS if quick else STREAMS)
    candidates = list(_columns(given))
    _distinct("columns", [column.name for column, _ in candidates])
    with ExitStack() as stack:
        runners = []
        for column, make in candidates:
            matrix.columns.append(column)
            try:
                executor = make()
            except BackendUnavailable as fault:
                column.reasons = tuple(map(_clean, fault.reasons)) or ("it gives no reason",)
            except (RuntimeError, TypeError, ValueError, OSError) as fault:
                column.reasons = (_clean(fault),)
            else:
                column.device, column.detail = _clean(executor.device), _clean(executor.detail)
                if isinstance(executor, Remote):
                    stack.callback(executor.close)
                engine = O1Batch(executor, fallback=None)
                runners.append(_Runner(column.name, executor, engine))
        _note_missing(matrix, given, map(_clean, require))
        total = len(chosen) + len(streams)
        for done, case in enumerate(chosen):
            if watch is not None:
                watch(case.name, done, total)
            _run_row(matrix, runners, case, thorough=not quick or done % QUICK_THOROUGH == 0)
        for seed in streams:
            if watch is not None:
                watch(f"stream {seed}", len(chosen) + seed, total)
            _run_stream_row(matrix, runners, seed)
    matrix.seconds = time.monotonic() - begun
    return matrix


def _as_list(backends: Iterable[str | Executor]) -> list[str | Executor]:
    if isinstance(backends, str):
        raise TypeError(f"backends must be several, as in [{backends!r}], got a str")
    found = list(backends)
    for x in found:
        if not isinstance(x, (str, Executor)):
            raise TypeError(f"backends must be names and Executor objects, got {x!r}")
    return list(dict.fromkeys(found))


def _distinct(what: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} must have different names, got {', '.join(twice)} twice")


def _columns(
    given: Sequence[str | Executor] | None,
) -> Iterator[tuple[Column, Callable[[], Executor]]]:
    """Every column there could be, and how to open it."""
    for executor in given or ():
        if isinstance(executor, Executor):
            yield Column(f"{executor.name} (given)", executor.name), partial(Hostile, executor)
    installed = registry.names()
    wanted: dict[str, list[str]] = {x: [] for x in installed}
    for name in installed if given is None else [x for x in given if isinstance(x, str)]:
        # A backend's own name comes before that of a variant of another one.
        of = [x for x in installed if x == name] or [
            x for x in installed if name.startswith(f"{x}-")
        ]
        if not of:
            raise UnknownBackend(
                name, [f"no backend of that name is installed (installed: {', '.join(installed)})"]
            )
        wanted[max(of, key=len)].append(name)
    for backend, mine in wanted.items():
        if not mine:
            continue
        try:
            process = Process(f"backend {backend}")
            try:
                variants = process.ask("variants", backend)
            finally:
                process.close()
        except (BackendUnavailable, RuntimeError) as fault:
            reasons = fault.reasons if isinstance(fault, BackendUnavailable) else (str(fault),)
            yield Column(backend, backend), partial(_unavailable, backend, reasons)
            continue
        for name in mine:
            if name != backend and name not in variants:
                raise UnknownBackend(
                    name, [f"backend {backend} has no such variant (it has {', '.join(variants)})"]
                )
        if not variants:
            reasons = ("it names no variant",)
            yield Column(backend, backend), partial(_unavailable, backend, reasons)
        for name, arguments in variants.items():
            if backend in mine or name in mine:
                yield Column(name, backend), partial(Remote, backend, arguments, name)


def _unavailable(backend: str, reasons: Sequence[str]) -> Executor:
    raise BackendUnavailable(backend, reasons)


def _note_missing(
    matrix: Matrix, given: Iterable[str | Executor] | None, require: Iterable[str]
) -> None:
    """What must run and does not; a backend runs if one of its variants does."""
    named = [x for x in given or () if isinstance(x, str)]
    for name in dict.fromkeys((*named, *require)):
        mine = [c for c in matrix.columns if c.name == name]
        mine = mine or [c for c in matrix.columns if c.backend == name]
        if not any(column.ran for column in mine):
            matrix.missing.append(name)
            for column in mine:
                column.required = True


def _attempt(work: Callable[[], Report], defect: str = "") -> Cell:
    """Do a check; with a known defect it has to fail, by what the check says and not otherwise."""
    begun = time.monotonic()
    cell = Cell()
    try:
        cell.worst = work().worst
        if defect:
            cell.outcome = "failed"
            cell.message = f"it passes, though a defect is known that must make it fail: {defect}"
    except AssertionError as fault:
        cell.outcome, cell.message = ("known", defect) if defect else ("failed", _clean(fault))
    except Exception as fault:
        # Whatever a backend does, the others still get their turn.
        cell.outcome, cell.message = "failed", _clean(f"{type(fault).__name__}: {fault}")
    cell.seconds = time.monotonic() - begun
    return cell


def _run_row(matrix: Matrix, runners: Sequence[_Runner], case: Case, *, thorough: bool) -> None:
    answers: dict[str, tuple[Answer, Steps | None]] = {}
    cells = matrix.rows.setdefault(case.name, {})

    def work(runner: _Runner) -> Report:
        given = answer(runner.engine, case)
        report = check(case, given)
        stepped = None
        if thorough:
            check_handles(runner.executor, case)
            stepped = check_steps(runner.executor, case)
        if stepped is not None:
            report.add(stepped.report)
        # A wrong answer never gets here, so pairs are of right ones.
        answers[runner.name] = given, stepped
        matrix.report.add(report)
        return report

    geometries = _geometries(case.config, case.rows(), case.prompt)
    for runner in runners:
        defect = KNOWN_DEFECTS.get(runner.name, {}).get(case.name, "")
        cells[runner.name] = _beyond(runner, geometries) or _attempt(partial(work, runner), defect)
    for a, b in itertools.combinations(answers, 2):
        same = partial(_same, case, answers[a], answers[b])
        matrix.pairs[case.name, a, b] = _attempt(same)


def _geometries(config: Config, rows: Rows, prompt: int) -> list[Geometry]:
    """Those that a layer goes through: as its prompt leaves it, and sealed."""
    counts = {prompt, max(prompt, config.seal_rows)}
    return [geometry_of(config, rows, count) for count in counts]


def _beyond(runner: _Runner, geometries: Sequence[Geometry]) -> Cell | None:
    """The cell of what the executor says it cannot run, None if it can."""
    try:
        executor = runner.executor
        found = {r for g in geometries for r in executor.unsupported(executor.plan(g, 1))}
    except Exception as fault:
        return Cell("failed", None, _clean(f"{type(fault).__name__}: {fault}"))
    return Cell("unsupported", None, _clean("; ".join(sorted(found)))) if found else None


def _same(case: Case, a: tuple[Answer, Steps | None], b: tuple[Answer, Steps | None]) -> Report:
    report = check_same(case, a[0], b[0])
    if a[1] is not None and b[1] is not None:
        report.add(check_same_steps(a[1], b[1]))
    return report


def _run_stream_row(matrix: Matrix, runners: Sequence[_Runner], seed: int) -> None:
    """A stream on every column by itself, then on pairs of those that it is right on."""
    stream, row = random_stream(seed), f"stream-{seed}"
    cells = matrix.rows.setdefault(row, {})
    geometries = _geometries(stream.config, stream.rows(), stream.prompt)

    def work(engine: O1Batch, others: Sequence[O1Batch] = ()) -> Report:
        report = run_stream(engine, stream, others)
        matrix.report.add(report)
        return report

    for runner in runners:
        cells[runner.name] = _beyond(runner, geometries) or _attempt(partial(work, runner.engine))
    right = [runner for runner in runners if cells[runner.name].outcome == "passed"]
    for a, b in itertools.combinations(right, 2):
        matrix.pairs[row, a.name, b.name] = _attempt(partial(work, a.engine, [b.engine]))
