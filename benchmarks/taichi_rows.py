"""Rows through Taichi: arrays of the device and of the host, beside the upstream engine's WGSL.

    python benchmarks/taichi_rows.py [--device cuda] [--wgsl FILE] [--rows 1,64,512,4096]
        [--groups 4] [--heads 6] [--dim 256] [--repeats N] [--json FILE]

*Resident*: rows and output stay on the device; the time is that of `Layer.extend` and of waiting
for the device, with the checks of the numbers and without. *Arrays*: `Layer.extend` with numpy
arrays; the numpy backend does it too. The given WGSL runs through the wgpu backend, resident, and
the time is that of recording, submitting and waiting.

Candidates take turns, a figure is the median with the smallest and the largest repetition, and all
must agree on the same rows before anything is timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import o1core
from o1core.testing import Rows
from o1core.text import table
from o1core_taichi.language import ti

if TYPE_CHECKING:
    from benchmarks.bench import CONFIG, PROMPT, Shape, agree, in_turns, rows_command
else:
    from bench import CONFIG, PROMPT, Shape, agree, in_turns, rows_command

TAICHI, GIVEN, NUMPY = "taichi", "given WGSL", "numpy backend"
RESIDENT, CHECKED, ARRAYS = "resident", "resident, checked", "arrays"


def extend(layer: o1core.Layer, rows: Sequence[Any], check_finite: bool) -> None:
    q, k, v = rows
    layer.extend(q, k, v, check_finite=check_finite)
    ti.sync()


def given_wgsl(layer: o1core.Layer, rows: Rows) -> Callable[[], object]:
    from o1core_wgpu.device import open_gpu

    if TYPE_CHECKING:
        from benchmarks.wgpu_rows import Resident
    else:
        from wgpu_rows import Resident
    return partial(Resident(open_gpu(), rows).run, layer)


def measure(
    shape: Shape, counts: Sequence[int], device: str | None, wgsl: str | None, repeats: int
) -> Any:
    """Milliseconds of every repetition: `{rows: {(way, candidate): [...]}}`."""
    engines = {TAICHI: o1core.O1Batch("taichi", fallback=None, device=device)}
    if wgsl is not None:
        engines[GIVEN] = o1core.O1Batch("wgpu", fallback=None, wgsl=wgsl)
    engines[NUMPY] = o1core.O1Batch("numpy")
    for name, engine in engines.items():
        print(f"{name}: {engine.device}; {engine.reason}", file=sys.stderr)
    prompt, found = shape.rows(1, PROMPT), {}
    for count in counts:
        rows = shape.rows(2, count)
        layers = {name: engine.seal(*prompt, CONFIG) for name, engine in engines.items()}
        want = layers[NUMPY].fork().extend(*rows)
        for name, layer in layers.items():
            agree(f"{shape}, {count} rows: {name} and {NUMPY}", layer.fork().extend(*rows), want)
        given = []
        for x in rows:
            given.append(ti.ndarray(ti.f32, x.shape))
            given[-1].from_numpy(np.ascontiguousarray(x))
        on_device: dict[tuple[str, str], Callable[[], object]] = {
            (RESIDENT, TAICHI): partial(extend, layers[TAICHI], given, False),
            (CHECKED, TAICHI): partial(extend, layers[TAICHI], given, True),
        }
        if GIVEN in layers:
            on_device[RESIDENT, GIVEN] = given_wgsl(layers[GIVEN], rows)
        with_copies: dict[tuple[str, str], Callable[[], object]] = {
            (ARRAYS, name): partial(layers[name].extend, *rows) for name in (TAICHI, NUMPY)
        }
        # Apart, since a GPU that has to wait for the other way lowers its clock in the meantime.
        seconds = in_turns(on_device, repeats, time.perf_counter)
        seconds.update(in_turns(with_copies, repeats, time.perf_counter))
        found[count] = {key: [1e3 * x for x in each] for key, each in seconds.items()}
    return found


def report(shape: Shape, found: Mapping[int, Mapping[tuple[str, str], Sequence[float]]]) -> str:
    """The table: milliseconds a call, and how many times as fast as the given WGSL."""
    lines = []
    for count, figures in found.items():
        other = figures.get((RESIDENT, GIVEN))
        for (way, name), each in figures.items():
            compared = other is not None and way != ARRAYS
            ratio = f"{median(other) / median(each):.2f}" if other and compared else ""
            cell = f"{median(each):.3f} ({min(each):.3f} .. {max(each):.3f})"
            lines.append((str(count), way, name, cell, ratio))
    head = ("rows", "way", "candidate", "ms a call", "x given")
    return "\n".join([f"{shape}, milliseconds", *table(head, lines, left=None)])


def main(argv: Sequence[str] | None = None) -> int:
    return rows_command(argv, __doc__, "the arch: cuda, vulkan, metal or cpu", measure, report)


if __name__ == "__main__":
    sys.exit(main())
