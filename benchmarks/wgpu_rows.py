"""Rows on a GPU: o1core's own WGSL beside the upstream engine's, on one adapter in one run.

    python benchmarks/wgpu_rows.py [--wgsl FILE] [--rows 1,64,512,4096] [--groups 4] [--heads 6]
        [--device NAME] [--repeats N] [--json FILE]

Two ways to call a layer are timed. *Resident*: rows and output stay on the device; the time is that
of `Layer.encode` into a new encoder, of submitting it, and of waiting by reading 64 bytes of the
output. *Arrays*: `Layer.extend`, with upload and readback; the numpy backend does it too.

Candidates take turns, a figure is the median with the smallest and the largest repetition, and all
must agree on the same rows before anything is timed. The first line of a count says what waiting
costs by itself. `--wgsl original` looks for the engine's sources on this machine.
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
from o1core_wgpu.device import Gpu, open_gpu
from o1core_wgpu.workspace import STAGING, STORAGE

if TYPE_CHECKING:
    from benchmarks.bench import CONFIG, PROMPT, Shape, agree, in_turns, rows_command
else:
    from bench import CONFIG, PROMPT, Shape, agree, in_turns, rows_command

OWN, OTHER, NUMPY = "own WGSL", "given WGSL", "numpy backend"
PROBE = 64
"""Bytes that are read to wait for a submission."""


class Resident:
    """Rows of one length on the device, and a layer that is fed with them."""

    def __init__(self, gpu: Gpu, rows: Rows) -> None:
        self.gpu, device = gpu, gpu.device
        self.count = len(rows[0])
        self.inputs = [
            device.create_buffer_with_data(data=np.ascontiguousarray(x), usage=STORAGE)
            for x in rows
        ]
        heads, value_dim = rows[0].shape[1], rows[2].shape[2]
        self.out = device.create_buffer(size=4 * self.count * heads * value_dim, usage=STORAGE)
        self.staging = gpu.buffer(PROBE, STAGING)

    def run(self, layer: o1core.Layer | None) -> None:
        """One call of the layer; without a layer, only the submission and the wait."""
        encoder = self.gpu.device.create_command_encoder()
        if layer is not None:
            q, k, v = self.inputs
            layer.encode(encoder, q, k, v, self.out, self.count)
        encoder.copy_buffer_to_buffer(self.out, 0, self.staging, 0, PROBE)
        self.gpu.submit(encoder)
        with self.gpu.mapped(self.staging, PROBE):
            pass


def measure(
    shape: Shape, counts: Sequence[int], adapter: str | None, wgsl: str | None, repeats: int
) -> Any:
    """Milliseconds of every repetition: `{rows: {(way, candidate): [...]}}`."""
    device = int(adapter) if adapter and adapter.isdecimal() else adapter
    engines = {OWN: o1core.O1Batch("wgpu", fallback=None, device=device)}
    if wgsl is not None:
        engines[OTHER] = o1core.O1Batch("wgpu", fallback=None, device=device, wgsl=wgsl)
    engines[NUMPY] = o1core.O1Batch("numpy")
    for name, engine in engines.items():
        print(f"{name}: {engine.device}; {engine.reason}", file=sys.stderr)
    prompt, found = shape.rows(1, PROMPT), {}
    gpu = open_gpu(device)  # the one that the engines share
    for count in counts:
        rows = shape.rows(2, count)
        layers = {name: engine.seal(*prompt, CONFIG) for name, engine in engines.items()}
        want = layers[NUMPY].fork().extend(*rows)
        for name, layer in layers.items():
            agree(f"{shape}, {count} rows: {name} and {NUMPY}", layer.fork().extend(*rows), want)
        resident = Resident(gpu, rows)
        on_device: dict[tuple[str, str], Callable[[], object]] = {
            ("resident", "nothing"): partial(resident.run, None)
        }
        with_copies: dict[tuple[str, str], Callable[[], object]] = {}
        for name, layer in layers.items():
            if name != NUMPY:
                on_device["resident", name] = partial(resident.run, layer)
            with_copies["arrays", name] = partial(layer.extend, *rows)
        # Apart, since a GPU that has to wait for the other way lowers its clock in the meantime.
        seconds = in_turns(on_device, repeats, time.perf_counter)
        seconds.update(in_turns(with_copies, repeats, time.perf_counter))
        found[count] = {key: [1e3 * x for x in each] for key, each in seconds.items()}
    return found


def report(shape: Shape, found: Mapping[int, Mapping[tuple[str, str], Sequence[float]]]) -> str:
    """The table: milliseconds a call, and how many times as fast as the given WGSL."""
    lines = []
    for count, figures in found.items():
        for (way, name), each in figures.items():
            other = figures.get((way, OTHER))
            ratio = f"{median(other) / median(each):.2f}" if other and name != "nothing" else ""
            cell = f"{median(each):.3f} ({min(each):.3f} .. {max(each):.3f})"
            lines.append((str(count), way, name, cell, ratio))
    head = ("rows", "way", "candidate", "ms a call", "x given")
    return "\n".join([f"{shape}, milliseconds", *table(head, lines, left=None)])


def main(argv: Sequence[str] | None = None) -> int:
    return rows_command(
        argv, __doc__, "the adapter, by index or a part of its name", measure, report
    )


if __name__ == "__main__":
    sys.exit(main())
