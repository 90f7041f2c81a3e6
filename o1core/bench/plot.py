"""Figures as PNG files: time against context, and against rows a call."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from o1core.bench.figures import Figure, Results

__all__ = ["plots"]


def plots(results: Results, folder: Path) -> list[Path]:
    """Write the plots of every geometry, and say which files they are; needs matplotlib."""
    # Not pyplot: nobody looks at a window, and there may be no display.
    figure = import_module("matplotlib.figure").Figure
    written = []
    for name in results.geometries:
        plain = "".join(c if c.isalnum() else "-" for c in name)
        mine = [f for f in results.figures if f.geometry == name]
        for what, draw in (("rows", _rows), ("context", _contexts)):
            page = figure(figsize=(11, 6), layout="constrained")
            if draw(page, mine):
                page.suptitle(f"{name}: median, smallest to largest repetition")
                path = folder / f"{what}-{plain}.png"
                page.savefig(path, dpi=120)
                written.append(path)
    return written


def _rows(page: Any, figures: Sequence[Figure]) -> bool:
    mine = [f for f in figures if f.section == "rows"]
    on_device = {f.candidate for f in mine if f.way == "resident"}
    ways = ("resident", "pipelined", "arrays")
    lines: dict[str, list[Figure]] = {}
    for f in mine:
        if f.way in ways:
            label = f"{f.candidate}, {f.way}" if f.candidate in on_device else f.candidate
            lines.setdefault(label, []).append(f)
    if lines:
        axes = page.subplots()
        for label, line in lines.items():
            _line(axes, label, [f.rows for f in line], line, per_row=True)
        axes.set(xlabel="rows a call", ylabel="microseconds a row")
        _finish(axes)
    return bool(lines)


def _contexts(page: Any, figures: Sequence[Figure]) -> bool:
    mine = [f for f in figures if f.section == "context"]
    counts = sorted({f.rows for f in mine})
    if not counts:
        return False
    for axes, rows in zip(
        page.subplots(1, len(counts), squeeze=False, sharey=True)[0], counts, strict=True
    ):
        lines: dict[str, list[Figure]] = {}
        for f in mine:
            if f.rows == rows:
                # Which kernel of torch was the fastest changes along the line.
                lines.setdefault(f.candidate.partition(" (")[0], []).append(f)
        # Exact attention last, so that backends have the colours of the other page.
        for label, line in sorted(lines.items(), key=lambda each: each[0].startswith("exact")):
            _line(axes, label, [f.streamed or f.context or 0 for f in line], line)
        axes.set(xlabel="rows seen, keys of exact attention", ylabel="milliseconds a call")
        axes.set_title(f"{rows} row{'s' if rows > 1 else ''} a call")
        _finish(axes)
    return True


def _line(
    axes: Any, label: str, at: Sequence[int], line: Sequence[Figure], *, per_row: bool = False
) -> None:
    def scaled(f: Figure, seconds: float) -> float:
        return 1e6 * seconds / f.rows if per_row else 1e3 * seconds

    style = "--" if label.startswith("exact") else "-"
    (drawn,) = axes.plot(at, [scaled(f, f.median) for f in line], f"o{style}", label=label)
    low = [scaled(f, min(f.seconds)) for f in line]
    high = [scaled(f, max(f.seconds)) for f in line]
    axes.fill_between(at, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)


def _finish(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
