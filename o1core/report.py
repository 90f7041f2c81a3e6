"""What the O(1) operator costs and gives up on one layer's rows: measured, then put into words.

Used by the command line. Speeds are wall-clock on this machine, after one untimed warm-up.
"""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from o1core.capture import Capture
from o1core.checks import F32
from o1core.config import Config
from o1core.engine import Layer, O1Batch
from o1core.exact import causal_attention
from o1core.testing import Oracle, Report, compare
from o1core.text import table

__all__ = [
    "Error",
    "Measurement",
    "Progress",
    "Schedule",
    "measure",
    "render",
    "wrap",
]

WIDTH = 80
SAMPLE_ROWS = 64
SAMPLE_SLICES = 8
SAMPLE_SECONDS = 2.5

ScaleFrom = Literal["given", "file", "head_dim"]


@dataclass(frozen=True)
class Schedule:
    """How the rows go in: `0 <= prompt < rows` are sealed, the others come in calls.

    A call has at most `chunk` rows and stays within one of `parts` about equal parts, for which
    speed and error are told apart. Of `repeats` timings the best counts.
    """

    prompt: int
    chunk: int
    parts: int = 1
    repeats: int = 1

    def edges(self, rows: int) -> list[int]:
        """First row of each part, and the end."""
        parts = min(self.parts, rows - self.prompt)
        return [int(x) for x in np.linspace(self.prompt, rows, parts + 1)]


class Progress:
    """Told where a measurement stands; this one keeps it to itself."""

    def start(self, label: str, rows: int) -> None:
        """The next stage has so many rows to do."""

    def advance(self, rows: int) -> None:
        """So many more of them are done."""


@dataclass(frozen=True)
class Error:
    """How far an output is from exact attention.

    relative_l2: `|out - exact| / |exact|` over everything; mean_relative: the same for each row and
    head by itself, then the mean. Where exact is 0, anything but 0 counts as 1.
    """

    relative_l2: float
    mean_relative: float

    @classmethod
    def of(cls, out: npt.NDArray[Any], exact: npt.NDArray[Any]) -> Error:
        """Both `[rows, heads, dv]`, not empty."""
        wide = exact.astype(np.float64)
        off = np.linalg.norm(out - wide, axis=-1)
        size = np.linalg.norm(wide, axis=-1)
        each = np.where(size > 0, off / np.where(size > 0, size, 1), off > 0)
        norm, whole = float(np.linalg.norm(off)), float(np.linalg.norm(size))
        return cls(norm / whole if whole > 0 else float(norm > 0), float(each.mean()))


@dataclass(frozen=True)
class Agreement:
    """The output against the float64 definition, within the bound of docs/operator.md section 9.

    worst_of_bound: the largest error as a fraction of what is allowed; above 1 is a fault.
    rows were checked, `results` counts their heads too; float32 cannot decide the ambiguous ones.
    """

    worst_of_bound: float
    rows: int
    results: int
    ambiguous: int

    @property
    def passed(self) -> bool:
        return self.worst_of_bound <= 1


@dataclass(frozen=True)
class Part:
    """Consecutive rows after the prompt: speed and error there, for ours and for the rivals."""

    first_row: int
    rows: int
    o1_rows_per_s: float
    exact_rows_per_s: float
    o1_error: Error
    window_error: Error


@dataclass(frozen=True)
class Memory:
    """Bytes kept between calls; the cache is keys and values of every row, in float32.

    cache_larger_from: the number of rows at which that cache outgrows the layer's state.
    """

    state_bytes: int
    cache_bytes: int
    cache_larger_from: int


@dataclass(frozen=True)
class Measurement:
    """What was measured, on what, and what came out.

    Errors and the speeds of O(1) and of exact attention are for the rows after the prompt.
    """

    file: str
    source: dict[str, Any] | str | None
    rows: int
    heads: int
    groups: int
    head_dim: int
    value_dim: int
    dtype: str
    config: Config
    scale: float
    scale_from: ScaleFrom
    prompt: int
    chunk: int
    repeats: int
    backend: str
    device: str
    reason: str
    landmarks_used: int
    exact_only: bool
    o1_error: Error
    window_error: Error
    agreement: Agreement
    seal_rows_per_s: float
    o1_rows_per_s: float
    exact_rows_per_s: float
    memory: Memory
    parts: tuple[Part, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, allow_nan=False)


def measure(
    engine: O1Batch,
    capture: Capture,
    config: Config,
    schedule: Schedule,
    *,
    scale_from: ScaleFrom = "given",
    progress: Progress | None = None,
) -> tuple[Measurement, F32]:
    """Seal the first rows, extend with the others, and compare; also the output of those others."""
    progress = progress or Progress()
    prompt, rows = schedule.prompt, len(capture.q)
    _warm_up(engine, capture, config, schedule)
    progress.start("sealing and extending", schedule.repeats * (rows - prompt))
    ours = _stream(engine, capture, config, schedule, progress)
    window = ours
    if config.landmarks:
        progress.start("sinks + window alone", rows - prompt)
        once = replace(schedule, repeats=1)
        window = _stream(engine, capture, replace(config, landmarks=0), once, progress)
    progress.start("exact attention", schedule.repeats * (rows - prompt))
    exact = _exact(capture, ours.layer.geometry.scale, schedule, progress)
    layer, geometry = ours.layer, ours.layer.geometry
    measured = Measurement(
        file=capture.name,
        source=capture.source,
        rows=rows,
        heads=geometry.heads,
        groups=geometry.groups,
        head_dim=geometry.head_dim,
        value_dim=geometry.value_dim,
        dtype=capture.dtype,
        config=config,
        scale=geometry.scale,
        scale_from=scale_from,
        prompt=prompt,
        chunk=schedule.chunk,
        repeats=schedule.repeats,
        backend=layer.backend,
        device=layer.device,
        reason=engine.reason,
        landmarks_used=geometry.landmarks,
        exact_only=layer.exact_only,
        o1_error=Error.of(ours.run.out, exact.out),
        window_error=Error.of(window.run.out, exact.out),
        agreement=_agreement(capture, config, prompt, ours.run.out, progress),
        seal_rows_per_s=prompt / ours.seal_seconds,
        o1_rows_per_s=(rows - prompt) / sum(ours.run.seconds),
        exact_rows_per_s=(rows - prompt) / sum(exact.seconds),
        memory=_memory(layer, rows),
        parts=_parts(schedule.edges(rows), ours.run, window.run, exact),
    )
    return measured, ours.run.out


@dataclass(frozen=True, eq=False)
class _Run:
    """Output of all rows after the prompt, and the best seconds of each part of them."""

    out: F32
    seconds: list[float]


@dataclass(frozen=True, eq=False)
class _Stream:
    """A layer that was sealed and extended to the end."""

    layer: Layer
    seal_seconds: float
    run: _Run


def _warm_up(engine: O1Batch, capture: Capture, config: Config, schedule: Schedule) -> None:
    # Pages, BLAS threads and compiled pipelines come with the first call, and belong to no row.
    first = schedule.prompt
    layer = engine.seal(*capture.rows(0, first), config)
    layer.extend(*capture.rows(first, first + min(schedule.chunk, 64)))


def _stream(
    engine: O1Batch, capture: Capture, config: Config, schedule: Schedule, progress: Progress
) -> _Stream:
    seals, runs = [], []
    for _ in range(schedule.repeats):
        start = time.perf_counter()
        layer = engine.seal(*capture.rows(0, schedule.prompt), config)
        seals.append(_since(start))
        extend = partial(_extend, layer, capture)
        runs.append(_timed(extend, schedule, len(capture.q), progress))
    return _Stream(layer, min(seals), _best(runs))


def _extend(layer: Layer, capture: Capture, first: int, last: int) -> F32:
    return layer.extend(*capture.rows(first, last))


def _exact(capture: Capture, scale: float, schedule: Schedule, progress: Progress) -> _Run:
    """Exact attention of the same rows in the same calls."""

    def call(first: int, last: int) -> F32:
        return causal_attention(*capture.rows(0, last), scale=scale, first_row=first)

    rows = len(capture.q)
    return _best([_timed(call, schedule, rows, progress) for _ in range(schedule.repeats)])


def _timed(
    call: Callable[[int, int], F32], schedule: Schedule, rows: int, progress: Progress
) -> _Run:
    """The rows after the prompt, `call(first, last)` by call."""
    outs, seconds = [], []
    for first, last in pairwise(schedule.edges(rows)):
        spent = 0.0
        for a in range(first, last, schedule.chunk):
            b = min(a + schedule.chunk, last)
            start = time.perf_counter()
            outs.append(call(a, b))
            spent += _since(start)
            progress.advance(b - a)
        seconds.append(spent)
    return _Run(np.concatenate(outs), seconds)


def _best(runs: Sequence[_Run]) -> _Run:
    return _Run(runs[-1].out, [min(part) for part in zip(*(r.seconds for r in runs), strict=True)])


def _parts(edges: Sequence[int], ours: _Run, window: _Run, exact: _Run) -> tuple[Part, ...]:
    found = []
    for i, (first, last) in enumerate(pairwise(edges)):
        here = slice(first - edges[0], last - edges[0])
        found.append(
            Part(
                first_row=first,
                rows=last - first,
                o1_rows_per_s=(last - first) / ours.seconds[i],
                exact_rows_per_s=(last - first) / exact.seconds[i],
                o1_error=Error.of(ours.out[here], exact.out[here]),
                window_error=Error.of(window.out[here], exact.out[here]),
            )
        )
    return tuple(found)


def _since(start: float) -> float:
    # A clock may be too coarse for a tiny call; a speed must stay a number.
    return max(time.perf_counter() - start, 1e-9)


def _agreement(
    capture: Capture, config: Config, prompt: int, out: F32, progress: Progress
) -> Agreement:
    """Rows spread evenly, checked in slices that are spread evenly too.

    So whatever was done when the time is up still covers the whole sequence. The last row, which
    has the longest history, is in the first slice.
    """
    rows = len(capture.q)
    sample = np.unique(np.linspace(prompt, rows - 1, SAMPLE_ROWS).round().astype(int))
    progress.start("float64 definition", len(sample))
    oracle = Oracle(config, capture.rows(0, prompt))
    oracle.append(capture.rows(prompt, rows))
    start = time.perf_counter()
    report, checked = Report(), 0
    for i in range(min(SAMPLE_SLICES, len(sample))):
        some = sample[::-1][i::SAMPLE_SLICES]
        expected = oracle.expected(some.tolist())
        close, _ = compare(out[some - prompt], expected)
        report.add(close)
        checked += len(some)
        progress.advance(len(some))
        if _since(start) > SAMPLE_SECONDS:
            break
    # An infinite error must fit into JSON.
    worst = min(report.worst, float(np.finfo(float).max))
    return Agreement(worst, checked, report.results, report.ambiguous)


def _memory(layer: Layer, rows: int) -> Memory:
    g = layer.geometry
    each = 4 * g.groups * (g.head_dim + g.value_dim)
    return Memory(layer.nbytes, rows * each, layer.nbytes // each + 1)


def render(m: Measurement) -> str:
    """The measurement as text for people, at most 80 columns wide where names allow it."""
    blocks = [
        _what(m),
        _errors(m),
        _definition(m),
        _speeds(m),
        _bytes(m),
    ]
    if len(m.parts) > 1:
        blocks += [_cost_by_context(m), _error_by_context(m)]
    return "\n\n".join("\n".join(lines) for lines in blocks)


def wrap(text: str, indent: str = "") -> list[str]:
    """One paragraph; what a terminal would act on is taken out."""
    safe = "".join(c if c.isprintable() else " " for c in text)
    return textwrap.wrap(safe, WIDTH, subsequent_indent=indent + "  ", initial_indent=indent)


def _what(m: Measurement) -> list[str]:
    c = m.config
    windows = f"windows {','.join(map(str, c.windows))}" if c.windows else f"window {c.window}"
    origin = {"given": "", "file": " (from the file)", "head_dim": " (1/sqrt(head_dim))"}
    return [
        *wrap(
            f"{m.file}: {m.rows:,} rows, {m.heads} heads in {m.groups} groups, "
            f"head_dim {m.head_dim}, value_dim {m.value_dim}, {m.dtype}"
        ),
        *_source(m.source),
        *wrap(
            f"O(1): landmarks {c.landmarks}, {windows}, sinks {c.sinks}, rectifier {c.rectifier}, "
            f"scale {m.scale:.6g}{origin[m.scale_from]}, ridge {c.ridge:g}"
        ),
        *wrap(f"backend: {m.backend} on {m.device} ({m.reason})"),
        *wrap(
            f"sealed with the first {m.prompt:,} rows, extended with the other "
            f"{m.rows - m.prompt:,} in calls of at most {m.chunk:,}"
        ),
        *(wrap(_still_exact(m)) if m.exact_only else []),
    ]


def _still_exact(m: Measurement) -> str:
    return (
        f"too few rows to seal (that takes {m.config.seal_rows:,}): "
        "the layer still holds every row and is exact"
    )


def _source(source: dict[str, Any] | str | None) -> list[str]:
    if source is None:
        return []
    if isinstance(source, str):
        return wrap(f"source: {source}", "  ")
    shown = [k for k in source if k in ("model", "layer", "text") or "licen" in k]
    return [line for k in shown for line in wrap(f"{k.replace('_', ' ')}: {source[k]}", "  ")]


def _o1_name(m: Measurement) -> str:
    return f"O(1), {m.landmarks_used} landmarks" if m.landmarks_used else "O(1), no landmarks"


def _errors(m: Measurement) -> list[str]:
    return table(
        ("error against exact causal attention", "relative L2", "mean of rows, heads"),
        [
            ("  " + name, _figure(e.relative_l2), _figure(e.mean_relative))
            for name, e in (
                (_o1_name(m), m.o1_error),
                ("sinks + window alone", m.window_error),
            )
        ],
    )


def _definition(m: Measurement) -> list[str]:
    a = m.agreement
    verdict = "within" if a.passed else "OUTSIDE"
    text = (
        f"agreement with the float64 definition: {verdict} the tolerance; the worst error is "
        f"{_figure(a.worst_of_bound)} of its bound ({a.rows} rows x {m.heads} heads checked"
    )
    if a.ambiguous:
        text += f", {a.ambiguous} of them undecidable in float32"
    return wrap(text + ")")


def _speeds(m: Measurement) -> list[str]:
    best = f", best of {m.repeats}" if m.repeats > 1 else ""
    return table(
        (f"speed{best}", "rows/s"),
        [
            ("  seal", f"{m.seal_rows_per_s:,.0f}"),
            ("  extend", f"{m.o1_rows_per_s:,.0f}"),
            ("  exact attention, numpy, same rows and calls", f"{m.exact_rows_per_s:,.0f}"),
        ],
    )


def _bytes(m: Measurement) -> list[str]:
    lines = table(
        (f"memory after {m.rows:,} rows", "bytes"),
        [
            ("  state of the layer", f"{m.memory.state_bytes:,}"),
            ("  KV cache, float32 (float16: half)", f"{m.memory.cache_bytes:,}"),
        ],
    )
    if not m.exact_only:
        lines += wrap(
            f"the state stays this size; that cache outgrows it at "
            f"{m.memory.cache_larger_from:,} rows and grows on",
            "  ",
        )
    return lines


def _span(part: Part) -> str:
    return f"  {part.first_row}..{part.first_row + part.rows - 1}"


def _cost_by_context(m: Measurement) -> list[str]:
    first, last = m.parts[0], m.parts[-1]
    o1 = first.o1_rows_per_s / last.o1_rows_per_s
    exact = first.exact_rows_per_s / last.exact_rows_per_s
    return [
        *table(
            ("rows/s by position in the context", "O(1)", "exact"),
            [(_span(p), f"{p.o1_rows_per_s:,.0f}", f"{p.exact_rows_per_s:,.0f}") for p in m.parts],
        ),
        *wrap(
            f"a row of the last part costs {o1:.2f} times one of the first; "
            f"with exact attention {exact:.2f} times",
            "  ",
        ),
    ]


def _error_by_context(m: Measurement) -> list[str]:
    return table(
        ("error by position", "L2: O(1)", "sinks+window", "mean: O(1)", "sinks+window"),
        [
            (
                _span(p),
                _figure(p.o1_error.relative_l2),
                _figure(p.window_error.relative_l2),
                _figure(p.o1_error.mean_relative),
                _figure(p.window_error.mean_relative),
            )
            for p in m.parts
        ],
    )


def _figure(x: float) -> str:
    return f"{x:.4f}" if x == 0 or x >= 0.001 else f"{x:.1e}"
