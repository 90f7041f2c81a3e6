"""What a benchmark found, as data, as JSON and as text."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, Literal

import numpy as np

from o1core.bench.work import call_bytes, call_flops
from o1core.config import Geometry
from o1core.layout import state_buffers
from o1core.text import table

__all__ = ["Figure", "Rate", "Results", "Section", "Subject", "Way"]

Section = Literal["rows", "context", "seal", "extend"]
"""extend: by as many rows as were sealed, to stand beside that."""
Way = Literal["resident", "pipelined", "device clock", "arrays", "wait"]
"""resident: a call on rows of the device, and a wait for it; pipelined: many and one wait, for each
call; device clock: its own time of a call; arrays: host arrays in and out; wait: a wait alone."""

BASELINE = "wgpu-original"
"""Whose time the others are compared with, where it was measured."""


@dataclass(frozen=True)
class Figure:
    """Seconds of one call of a candidate, of every repetition.

    context: the keys of exact attention, or the rows that a layer was to have streamed before;
    streamed: how many it had. None where neither matters.
    """

    geometry: str
    section: Section
    rows: int
    candidate: str
    way: Way
    seconds: tuple[float, ...]
    context: int | None = None
    streamed: int | None = None

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        first, _, third = quantiles(self.seconds, n=4, method="inclusive")
        return first, third


@dataclass(frozen=True)
class Rate:
    """What a device does at best, by work so simple that it is bound by one thing alone."""

    name: str
    unit: str
    per_second: float


@dataclass
class Subject:
    """A candidate: what it runs on, its ceilings, or why it was not measured."""

    name: str
    backend: str
    named: bool = False
    device: str = ""
    detail: str = ""
    reasons: tuple[str, ...] = ()
    rates: tuple[Rate, ...] = ()

    def rate(self, unit: str) -> float | None:
        return next((rate.per_second for rate in self.rates if rate.unit == unit), None)


@dataclass
class Results:
    """Everything measured. errors: one line each; notes: what a reader has to know besides."""

    subjects: list[Subject] = field(default_factory=list)
    geometries: dict[str, Geometry] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.errors

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def drop(self, geometry: str, candidate: str) -> None:
        """Take back every figure of a candidate that was found wrong."""
        self.figures = [
            f for f in self.figures if (f.geometry, f.candidate) != (geometry, candidate)
        ]

    def rates(self, figure: Figure) -> dict[str, float]:
        """Rates of a call by the operator's counted work, and shares of the ceilings.

        Empty for what is no call of the operator.
        """
        subject = next((s for s in self.subjects if s.name == figure.candidate), None)
        if subject is None or figure.way == "wait" or figure.section == "seal":
            return {}
        geometry = self.geometries[figure.geometry]
        flops = call_flops(geometry, figure.rows) / figure.median
        moved = call_bytes(geometry, figure.rows) / figure.median
        found = {"flops_per_s": flops, "bytes_per_s": moved}
        for name, rate, unit in (
            ("share_of_product", flops, "FLOP/s"),
            ("share_of_copy", moved, "B/s"),
        ):
            best = subject.rate(unit)
            if best is not None:
                found[name] = rate / best
        return found

    def to_json(self) -> str:
        from o1core import __version__

        return json.dumps(
            {
                "o1core": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "platform": platform.platform(),
                "passed": self.passed,
                "seconds": self.seconds,
                "errors": self.errors,
                "notes": self.notes,
                "geometries": {
                    name: {
                        **g.to_dict(),
                        "flops_per_row": call_flops(g, 1),
                        "state_bytes": state_bytes(g),
                        "kv_bytes_per_row": kv_bytes(g, 1),
                    }
                    for name, g in self.geometries.items()
                },
                "subjects": [asdict(subject) for subject in self.subjects],
                "figures": [self._plain(figure) for figure in self.figures],
            },
            indent=1,
            allow_nan=False,
        )

    def _plain(self, figure: Figure) -> dict[str, Any]:
        return {
            **asdict(figure),
            "median": figure.median,
            "min": min(figure.seconds),
            "max": max(figure.seconds),
            "quartiles": figure.quartiles,
            **self.rates(figure),
        }

    # Text -----------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        ran = [s for s in self.subjects if not s.reasons]
        if ran:
            devices = [[s.name, " ".join(filter(None, (s.device, s.detail)))] for s in ran]
            yield from table(["candidate", "runs on"], devices, left=None)
            yield ""
        ceilings = dict.fromkeys((s.device, r) for s in ran for r in s.rates)
        if ceilings:
            body = [[device, r.name, _rate(r.per_second, r.unit)] for device, r in ceilings]
            yield from table(["ceilings, measured", "", ""], body, left=2)
            yield ""
        for name, g in self.geometries.items():
            mine = [f for f in self.figures if f.geometry == name]
            yield (
                f"{name}: {g.groups} groups x {g.heads_per_group} heads, head_dim {g.head_dim}, "
                f"value_dim {g.value_dim}, window {','.join(map(str, sorted(set(g.windows))))}, "
                f"{g.sinks} sinks, {g.landmarks} landmarks"
            )
            yield (
                f"counted work of a row: {call_flops(g, 1):,} operations; "
                f"state {state_bytes(g):,} bytes"
            )
            yield ""
            yield from self._rows([f for f in mine if f.section == "rows"])
            yield from self._contexts(g, [f for f in mine if f.section == "context"])
            yield from self._seals([f for f in mine if f.section in ("seal", "extend")])
        yield from (
            f"{s.name} was not measured: {'; '.join(s.reasons)}" for s in self.subjects if s.reasons
        )
        yield from (f"note: {text}" for text in self.notes)
        yield from (f"WRONG: {text}" for text in self.errors)
        yield (
            "ms a call: the median, and the smallest and the largest repetition. Every candidate "
            f"was compared before it was timed. {self.seconds:.0f} s"
        )

    def _rows(self, figures: Sequence[Figure]) -> Iterator[str]:
        if not figures:
            return
        base = {(f.rows, f.way): f.median for f in figures if f.candidate == BASELINE}
        body = []
        for f in figures:
            rates = self.rates(f)
            other = base.get((f.rows, f.way))
            body.append(
                [
                    str(f.rows),
                    f.way,
                    f.candidate,
                    _ms(f),
                    f"{1e6 * f.median / f.rows:,.1f}" if f.way != "wait" else "-",
                    _rate(rates.get("flops_per_s"), "FLOP/s"),
                    _share(rates.get("share_of_product")),
                    _rate(rates.get("bytes_per_s"), "B/s"),
                    _share(rates.get("share_of_copy")),
                    *(
                        [f"{other / f.median:.2f}" if other and f.way != "wait" else "-"]
                        * bool(base)
                    ),
                ]
            )
        head = ["rows", "way", "candidate", "ms a call", "us a row", "FLOP/s", "of product"]
        head += ["bytes/s", "of copy", *(["x original"] if base else [])]
        yield from table(head, body, left=3)
        yield ""

    def _contexts(self, g: Geometry, figures: Sequence[Figure]) -> Iterator[str]:
        if not figures:
            return
        body = [
            [
                str(f.rows),
                f"{f.context:,}",
                f.candidate,
                _ms(f),
                "-" if f.streamed is None else f"{f.streamed:,}",
                f"{state_bytes(g) if f.streamed is not None else kv_bytes(g, f.context or 0):,}",
            ]
            for f in sorted(figures, key=lambda f: (f.rows, f.context or 0))
        ]
        head = ["rows", "context", "candidate", "ms a call", "rows streamed"]
        yield from table([*head, "bytes kept, float32"], body, left=3)
        yield ""

    def _seals(self, figures: Sequence[Figure]) -> Iterator[str]:
        if not figures:
            return
        found: dict[tuple[int, str], dict[Section, Figure]] = {}
        for f in figures:
            found.setdefault((f.rows, f.candidate), {})[f.section] = f
        sections: tuple[Section, Section] = ("seal", "extend")
        body = [
            [str(rows), name, *(_ms(each[x]) if x in each else "-" for x in sections)]
            for (rows, name), each in found.items()
        ]
        yield from table(["rows", "candidate", "seal, ms", "extend, ms"], body, left=2)
        yield ""


def state_bytes(g: Geometry) -> int:
    """Bytes of a layer's state, as `Layer.nbytes` counts them."""
    return sum(b.nbytes for b in state_buffers(g))


def kv_bytes(g: Geometry, context: int) -> int:
    """Bytes of the keys and values of exact attention, in float32."""
    return 4 * context * g.groups * (g.head_dim + g.value_dim)


def _ms(f: Figure) -> str:
    return f"{1e3 * f.median:.3f} ({1e3 * min(f.seconds):.3f} .. {1e3 * max(f.seconds):.3f})"


def _rate(per_second: float | None, unit: str) -> str:
    if per_second is None:
        return "-"
    for factor, prefix in ((1e12, "T"), (1e9, "G")):
        if per_second >= factor:
            return f"{per_second / factor:.2f} {prefix}{unit}"
    return f"{per_second / 1e6:.2f} M{unit}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
