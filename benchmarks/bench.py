"""Speed and memory of the numpy backend, beside what it competes with, in one run.

    python benchmarks/bench.py [--quick] [--sections rows,...] [--json FILE] [--threads N]

Measured twice: on one core (one BLAS thread, pinned where the system can) and on all of them, or
N. Each pass is a process of its own, since the number of BLAS threads must be known before numpy
is imported. The pass on one core counts the CPU time of its process, which other processes on the
machine hardly change; with more threads only wall time says what a caller waits for. Every pass
measures

- rows: `Layer.extend` in calls of 1, 64 and 512 rows, the compiled per-row loop (per_row.c) on the
  same rows, the serial float32 reference on a few of them, and a large matrix product, which is the
  ceiling for all of them;
- context: exact causal attention of the last rows of a context, in numpy and, where it is
  installed, in torch, beside `Layer.extend`, whose cost has no context in it. The cost of an exact
  row does not depend on the rows per call once these are many, so 512 rows are asked for only where
  the context is short;
- stream: `Layer.extend` once a layer has streamed more and more rows;
- seal: `O1Batch.seal` of a long prompt.

A figure is the median of several repetitions with the smallest and the largest one. Within a
section the candidates take turns in every repetition, so a machine that drifts hits all alike, and
ratios are between medians of the same section. The per-row loop and the reference run on one core
in either pass. Before anything of a geometry is timed, the candidates are compared on the same
rows; the run ends with exit code 1 where they differ by more than `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

import o1core
from o1core import reference
from o1core.checks import F32
from o1core.exact import causal_attention
from o1core.testing import Rows, random_rows
from o1core.text import table

if TYPE_CHECKING:
    from benchmarks import per_row
else:
    import per_row

CONFIG = o1core.Config(landmarks=32, window=128, sinks=4)
PROMPT = 1024
CALLS = (1, 64, 512)
LONGEST_CALL = max(CALLS)
REFERENCE_ROWS = 4
SHORT_CALLS = 64
"""How many 1-row calls one measurement takes together."""
STREAM_CALL = 64
SQUARE = 1024
"""Size of the matrix product that is the ceiling."""
MAX_512_CONTEXT = 4096
"""Longest context at which 512 exact rows are asked for."""
KV_CONTEXTS = (1024, 4096, 32768, 131072)
TOPIC = 0.6
"""Size of what the rows of a topic have in common, relative to their noise."""
DISTURBED = 3.0
"""How much the repetitions of one figure may differ before the reader is warned."""
TOLERANCE = 1e-4
"""Largest difference of two candidates on ordinary data, relative to the largest value."""
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

OURS, LOOP = "numpy backend", "per-row loop"

Work = Callable[[], object]


class DisagreementError(Exception):
    """Two candidates gave different results for the same rows."""


@dataclass(frozen=True)
class Shape:
    """Geometry of one layer: `groups` KV groups of `heads` query heads each, all `dim` wide."""

    groups: int
    heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.groups} x {self.heads} heads, d {self.dim}"

    def rows(self, seed: int, count: int) -> Rows:
        """Noise around topics that follow each other, each for the length of a landmark's segment.

        Of noise alone every segment has the same mean, and the far field becomes a difference of
        large numbers that two correct candidates need not agree on.
        """
        q, k, v = random_rows(
            seed, count, groups=self.groups, heads_per_group=self.heads, head_dim=self.dim
        )
        topics = np.random.default_rng(0).standard_normal((CONFIG.landmarks, self.dim))
        at = np.arange(count) // (PROMPT // CONFIG.landmarks) % len(topics)
        topic = (TOPIC * topics[at])[:, None].astype(np.float32)
        return q + topic, k + topic, v

    @property
    def row_flops(self) -> int:
        """Operations of one row of one group: the products of docs/operator.md, nothing else.

        A head needs `2 * 2 * (S + w) * d` for logits and values of the near keys; `2 * m * d` each
        for the landmark logits of the row and of the key it evicts, for reading the far numerator
        and for adding to it; and `2 * m * m` for the mix.
        """
        near, m = CONFIG.sinks + CONFIG.window, CONFIG.landmarks
        return self.heads * (4 * near * self.dim + 8 * m * self.dim + 2 * m * m)


SHAPES = (Shape(1, 6, 256), Shape(2, 6, 256), Shape(3, 3, 64))


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    repeats: int
    contexts: tuple[int, ...]
    streamed: tuple[int, ...]
    prompt: int


SECTIONS = ("rows", "context", "stream", "seal")
FULL = Effort(7, (1024, 4096, 32768), (1024, 10240, 51200), 32768)
QUICK = Effort(5, (1024, 4096), (1024, 5120), 8192)


@dataclass(frozen=True)
class Figure:
    """One candidate in one section: the seconds of every repetition.

    rows is what one repetition computes, in calls of `per_call` rows; context is the length of the
    context, the rows streamed before, or 0 where neither matters. A figure of section `ceiling`
    belongs to a matrix product, whose operations stand in rows.
    """

    section: str
    shape: Shape
    candidate: str
    per_call: int
    context: int
    rows: int
    seconds: tuple[float, ...]

    def micros(self, seconds: float) -> float:
        """Microseconds for a row of one group."""
        return seconds / self.rows / self.shape.groups * 1e6

    @property
    def rate(self) -> float:
        """Rows per second, all groups; operations per second for a ceiling."""
        return self.rows / median(self.seconds)

    @property
    def gflops(self) -> float:
        """Billions of counted operations (`Shape.row_flops`) a second."""
        return self.rate * self.shape.groups * self.shape.row_flops / 1e9


# ------------------------------------------------------------------ measuring


def in_turns(
    work: Mapping[Any, Work], repeats: int, clock: Callable[[], float]
) -> dict[Any, tuple[float, ...]]:
    """Seconds of each piece of work in each repetition, after one that does not count."""
    seconds: dict[Any, list[float]] = {name: [] for name in work}
    for repetition in range(repeats + 1):
        for name, run in work.items():
            start = clock()
            run()
            if repetition:
                seconds[name].append(clock() - start)
    return {name: tuple(each) for name, each in seconds.items()}


def agree(what: str, got: Any, want: Any) -> None:
    """DisagreementError unless two results are equal up to rounding."""
    if got.shape != want.shape:
        raise DisagreementError(f"{what}: shapes {got.shape} and {want.shape}")
    error = np.abs(got - want).max() / np.abs(want).max()
    if not error <= TOLERANCE:
        raise DisagreementError(f"{what}: results differ by {error:.2g}, allowed is {TOLERANCE:g}")


def cut(rows: Rows, per_call: int) -> Iterator[Rows]:
    """The rows in calls of `per_call`."""
    q, k, v = rows
    for at in range(0, len(q), per_call):
        part = slice(at, at + per_call)
        yield q[part], k[part], v[part]


def in_calls(extend: Callable[..., F32], rows: Rows, per_call: int) -> F32:
    """All rows through `extend`, `per_call` at a time."""
    return np.concatenate([extend(*part) for part in cut(rows, per_call)])


def loop_state(state: o1core.LayerState) -> per_row.State:
    """A state for the compiled loop, which advances it in place."""
    names = (
        *("ring_k", "ring_v", "sink_k", "sink_v", "k_landmarks", "q_landmarks", "mix"),
        *("far_max", "far_mass", "far_num"),
    )
    arrays = {name: state.arrays[name].copy() for name in names}
    meta = state.arrays["meta"].astype(np.int64)
    return per_row.State(meta=meta, **arrays, scale=state.geometry.scale, windows=None)


def sdpa(torch: Any, q: F32, k: F32, v: F32) -> Callable[[], F32]:
    """Exact attention of the last rows by torch; q has only those, k and v the whole context."""
    # [1, heads, rows, dim], each head's keys side by side: the layout torch is fastest with.
    mine, keys, values = (torch.from_numpy(x.swapaxes(0, 1).copy())[None] for x in (q, k, v))
    mask = None
    if len(q) > 1:
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    attention = torch.nn.functional.scaled_dot_product_attention

    def run() -> F32:
        with torch.inference_mode():
            out: F32 = attention(mine, keys, values, attn_mask=mask, enable_gqa=True)[0].numpy()
            return out.swapaxes(0, 1)

    return run


@dataclass
class Bench:
    """One pass: the candidates there are, and the figures found so far."""

    effort: Effort
    engine: o1core.O1Batch
    loop: per_row.PerRow | None
    torch: Any
    clock: Callable[[], float]
    figures: list[Figure] = field(default_factory=list)

    def run(self, shapes: Sequence[Shape], sections: Sequence[str]) -> None:
        for shape in shapes:
            _note(f"{shape}: results")
            self.check(shape)
            for section in sections:
                _note(f"{shape}: {section}")
                getattr(self, section)(shape)

    def sealed(self, shape: Shape) -> o1core.Layer:
        return self.engine.seal(*shape.rows(1, PROMPT), CONFIG)

    def check(self, shape: Shape) -> None:
        """Same rows, same results: calls of every length, the loop, the reference."""
        rows = shape.rows(2, LONGEST_CALL)
        state = self.sealed(shape).state()
        want = self.engine.load(state).extend(*rows)
        for per_call in CALLS:
            got = in_calls(self.engine.load(state).extend, rows, per_call)
            agree(f"{shape}: calls of {per_call} rows and of {LONGEST_CALL}", got, want)
        serial = reference.load(state, np.float32).extend(*(x[:REFERENCE_ROWS] for x in rows))
        agree(f"{shape}: backend and reference", want[:REFERENCE_ROWS], serial)
        if self.loop is not None:
            compiled = self.loop.extend(loop_state(state), *rows)
            agree(f"{shape}: backend and per-row loop", compiled, want)

    def measure(
        self,
        section: str,
        shape: Shape,
        work: Mapping[tuple[str, int, int, int], Work],
    ) -> None:
        """Figures of a section; work is keyed by candidate, rows a call, context, rows in all."""
        for (name, per_call, context, rows), seconds in in_turns(
            work, self.effort.repeats, self.clock
        ).items():
            self.figures.append(Figure(section, shape, name, per_call, context, rows, seconds))

    def rows(self, shape: Shape) -> None:
        """Section `rows`, and the ceiling right before it."""
        layer = self.sealed(shape)
        square = np.ones((SQUARE, SQUARE), np.float32)
        self.measure(
            "ceiling", shape, {("sgemm", 0, 0, 2 * SQUARE**3): partial(np.matmul, square, square)}
        )
        q, k, v = shape.rows(2, LONGEST_CALL)
        work: dict[tuple[str, int, int, int], Work] = {}
        for per_call in CALLS:
            count = SHORT_CALLS if per_call == 1 else LONGEST_CALL
            rows = q[:count], k[:count], v[:count]
            work[OURS, per_call, 0, count] = partial(in_calls, layer.extend, rows, per_call)
            if self.loop is not None:
                extend = partial(self.loop.extend, loop_state(layer.state()))
                work[LOOP, per_call, 0, count] = partial(in_calls, extend, rows, per_call)
        serial = reference.load(layer.state(), np.float32)
        few = REFERENCE_ROWS
        work["reference", few, 0, few] = partial(serial.extend, q[:few], k[:few], v[:few])
        self.measure("rows", shape, work)

    def context(self, shape: Shape) -> None:
        """Section `context`: the last rows of a context, by exact attention and by a layer."""
        layer = self.sealed(shape)
        for context in self.effort.contexts:
            _, k, v = shape.rows(3, context)
            # Only the last rows ask. The others are there to be counted; nobody reads them.
            q = np.zeros((context, shape.groups * shape.heads, shape.dim), np.float32)
            q[-LONGEST_CALL:] = shape.rows(4, LONGEST_CALL)[0]
            work: dict[tuple[str, int, int, int], Work] = {}
            for n in CALLS:
                if n == LONGEST_CALL and context > MAX_512_CONTEXT:
                    continue
                work[OURS, n, context, n] = partial(layer.extend, q[-n:], k[-n:], v[-n:])
                exact = partial(
                    causal_attention, q, k, v, scale=layer.geometry.scale, first_row=context - n
                )
                work["exact, numpy", n, context, n] = exact
                if self.torch is not None:
                    rival = sdpa(self.torch, q[-n:], k, v)
                    agree(f"{shape}: exact attention of numpy and of torch", rival(), exact())
                    work["exact, torch", n, context, n] = rival
            self.measure("context", shape, work)

    def stream(self, shape: Shape) -> None:
        """Section `stream`: the same rows, on layers that have streamed more and more before."""
        layer, seen = self.sealed(shape), 0
        rows = shape.rows(2, LONGEST_CALL)
        work: dict[tuple[str, int, int, int], Work] = {}
        for streamed in self.effort.streamed:
            for _ in range((streamed - seen) // LONGEST_CALL):
                layer.extend(*rows)
            seen = streamed
            old = layer.fork()
            extend = partial(in_calls, old.extend, rows, STREAM_CALL)
            work[OURS, STREAM_CALL, streamed, LONGEST_CALL] = extend
        if self.loop is not None:
            compiled = self.loop.extend(loop_state(layer.state()), *rows)
            agree(f"{shape}: after {seen} rows", layer.fork().extend(*rows), compiled)
        self.measure("stream", shape, work)

    def seal(self, shape: Shape) -> None:
        """Section `seal`: a long prompt, from rows to a layer that can be extended."""
        prompt = shape.rows(5, self.effort.prompt)
        count = self.effort.prompt
        seal = partial(self.engine.seal, *prompt, CONFIG)
        self.measure("seal", shape, {(OURS, count, 0, count): seal})


def memory(engine: o1core.O1Batch, shape: Shape) -> dict[str, int]:
    """Bytes of a layer, of what the backend really holds for it, and of one call's temporaries."""
    layer = engine.seal(*shape.rows(1, PROMPT), CONFIG)
    rows = shape.rows(2, LONGEST_CALL)
    layer.extend(*rows)
    held: dict[int, int] = {}
    for cohort in layer._at.handle.cohorts:
        for value in vars(cohort).values():
            for array in value.values() if isinstance(value, dict) else (value,):
                if isinstance(array, np.ndarray):
                    held[array.__array_interface__["data"][0]] = array.nbytes
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        out = layer.extend(*rows)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return {"state": layer.nbytes, "held": sum(held.values()), "scratch": peak - out.nbytes}


def kv_bytes(shape: Shape, context: int, itemsize: int) -> int:
    """Bytes of an exact KV cache."""
    return 2 * context * shape.groups * shape.dim * itemsize


# ------------------------------------------------------------------ processes


def one_pass(
    effort: Effort, shapes: Sequence[Shape], sections: Sequence[str], threads: int
) -> dict[str, Any]:
    """Everything measured with this many BLAS threads, as plain data. Runs in its own process."""
    loop, why = per_row.build()
    skipped = [] if loop is not None else [f"{LOOP}: {why}"]
    torch: Any = None
    try:
        torch = import_module("torch")
        torch.set_num_threads(threads)
    except ModuleNotFoundError as fault:
        if fault.name != "torch":
            raise
        skipped.append("exact, torch: torch is not installed")
    clock = time.process_time if threads == 1 else time.perf_counter
    wall, cpu = time.perf_counter(), time.process_time()
    with o1core.O1Batch("numpy", fallback=None) as engine:
        bench = Bench(effort, engine, loop, torch, clock)
        bench.run(shapes, sections)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        held = [memory(engine, shape) for shape in shapes]
    return {
        "threads": threads,
        "clock": "CPU time" if threads == 1 else "wall time",
        "cpu_share": share,
        "skipped": skipped,
        "compiled": None if loop is None else loop.command,
        "torch": None if torch is None else str(torch.__version__),
        "figures": [asdict(figure) for figure in bench.figures],
        "memory": held,
    }


def in_own_process(quick: bool, sections: Sequence[str], threads: int, pin: bool) -> dict[str, Any]:
    """`one_pass` in a fresh process that knows its number of threads before numpy is there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pass.json"
        command = [sys.executable, __file__, "--threads", str(threads), "--pass-file", str(file)]
        command += ["--sections", ",".join(sections)]
        command += ["--quick"] * quick + ["--pin"] * pin
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            raise SystemExit(done.returncode)
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def pin_to_one_cpu() -> bool:
    """Keep this process on one CPU; False where the system has no such call."""
    if sys.platform != "linux":
        return False
    # The first CPU usually serves the interrupts.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    return True


def cpu_count() -> int:
    """CPUs this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    configuration: Any = np.show_config(mode="dicts")
    blas = configuration.get("Build Dependencies", {}).get("blas", {})
    return {
        "cpu": cpu_name(),
        "cpus": cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip(),
        "o1core": o1core.__version__,
    }


# ------------------------------------------------------------------ showing


def show(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: geometry and candidate to the left, numbers to the right."""
    print("\n".join(table(header, rows, left=2)))


def size(count: int) -> str:
    """A count of rows, with k for thousands of 1024."""
    return f"{count // 1024}k" if count and count % 1024 == 0 else str(count)


def spread(figure: Figure) -> list[str]:
    """Microseconds per row and group: median, and smallest to largest."""
    middle, low, high = (
        figure.micros(x) for x in (median(figure.seconds), min(figure.seconds), max(figure.seconds))
    )
    return [f"{middle:.1f}", f"{low:.1f} .. {high:.1f}"]


def show_pass(result: Mapping[str, Any], pinned: bool) -> None:
    figures = [_figure(x) for x in result["figures"]]
    threads = result["threads"]
    on = "one core, one BLAS thread" if threads == 1 else f"{threads} BLAS threads"
    print(f"\n{'=' * 12} {on}{', pinned' if pinned else ''}: {result['clock']} {'=' * 12}")
    print(f"the pass had {result['cpu_share']:.2f} CPUs on average")
    for reason in result["skipped"]:
        print(f"skipped: {reason}")
    if any(max(f.seconds) > DISTURBED * min(f.seconds) for f in figures):
        print("disturbed: repetitions of the same work differ widely. Threads of one product wait")
        print("for each other, so any other load on these CPUs costs a multiple of its share.")
    shown = {
        "rows": _show_rows,
        "context": _show_context,
        "stream": _show_stream,
        "seal": _show_seal,
    }
    for section, show in shown.items():
        if _section(figures, section):
            show(figures)


def _show_rows(figures: Sequence[Figure]) -> None:
    ceilings = {f.shape: f.rate / 1e9 for f in figures if f.section == "ceiling"}
    listed = ", ".join(f"{c:.1f}" for c in ceilings.values())
    print(f"\nceiling: sgemm of {SQUARE} x {SQUARE}, before each geometry: {listed} GFLOP/s")
    print("Rows. us: microseconds per row of one group; ceiling: GFLOP/s over those of sgemm.")
    rows = []
    for f in _section(figures, "rows"):
        loop = _same(figures, f, LOOP)
        ratio = "-" if loop is None else f"{median_micros(loop) / median_micros(f):.2f}"
        share = f"{f.gflops / ceilings[f.shape]:.0%}"
        speed = [f"{f.rate:.0f}", *spread(f), f"{f.gflops:.1f}", share, ratio]
        rows.append([str(f.shape), f.candidate, str(f.per_call), *speed])
    header = ["geometry", "candidate", "rows/call", "rows/s", "us", "min .. max"]
    show([*header, "GFLOP/s", "ceiling", "x loop"], rows)


def _show_context(figures: Sequence[Figure]) -> None:
    print("\nContext. x exact: how many times faster the layer is for the same rows.")
    rows = []
    for f in _section(figures, "context"):
        ours = _same(figures, f, OURS)
        ratio = "" if ours is None or ours is f else f"{median_micros(f) / median_micros(ours):.1f}"
        what = [str(f.shape), f.candidate, size(f.context), str(f.per_call), f"{f.rate:.0f}"]
        rows.append([*what, *spread(f), ratio])
    header = ["geometry", "candidate", "context", "rows/call", "rows/s", "us", "min .. max"]
    show([*header, "x exact"], rows)


def _show_stream(figures: Sequence[Figure]) -> None:
    print(f"\nStream. Rows in calls of {STREAM_CALL}, after so many streamed rows.")
    rows = [
        [str(f.shape), f.candidate, size(f.context), *spread(f)]
        for f in _section(figures, "stream")
    ]
    show(["geometry", "candidate", "streamed", "us", "min .. max"], rows)


def _show_seal(figures: Sequence[Figure]) -> None:
    print("\nSealing.")
    rows = []
    for f in _section(figures, "seal"):
        ms = [f"{1e3 * x:.0f}" for x in (median(f.seconds), min(f.seconds), max(f.seconds))]
        rows.append([str(f.shape), f.candidate, size(f.rows), ms[0], f"{ms[1]} .. {ms[2]}"])
    show(["geometry", "candidate", "prompt", "ms", "min .. max"], rows)


def show_memory(results: Sequence[Mapping[str, int]], shapes: Sequence[Shape]) -> None:
    print("\nMemory in MiB. state: layer.nbytes; held: what the backend keeps between calls;")
    print(
        f"scratch: temporaries of a call of {LONGEST_CALL} rows, at their peak; KV: an exact cache."
    )
    rows = []
    for shape, held in zip(shapes, results, strict=True):
        caches = [kv_bytes(shape, c, s) for s in (4, 2) for c in KV_CONTEXTS]
        sizes = (held["state"], held["held"], held["scratch"], *caches)
        rows.append([str(shape), "", *(f"{x / 2**20:.2f}" for x in sizes)])
    contexts = [f"KV {kind} {size(c)}" for kind in ("f32", "f16") for c in KV_CONTEXTS]
    show(["geometry", "", "state", "held", "scratch", *contexts], rows)


def median_micros(figure: Figure) -> float:
    return figure.micros(median(figure.seconds))


def _section(figures: Sequence[Figure], section: str) -> list[Figure]:
    return [f for f in figures if f.section == section]


def _same(figures: Sequence[Figure], figure: Figure, candidate: str) -> Figure | None:
    """What a candidate needed for the work of another figure."""
    for f in figures:
        if (
            all(
                getattr(f, part) == getattr(figure, part)
                for part in ("section", "shape", "per_call", "context")
            )
            and f.candidate == candidate
        ):
            return f
    return None


def _figure(data: Mapping[str, Any]) -> Figure:
    values = {f.name: data[f.name] for f in fields(Figure)}
    return Figure(**{**values, "shape": Shape(**data["shape"]), "seconds": tuple(data["seconds"])})


def _note(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def _sections(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(SECTIONS)):
        raise argparse.ArgumentTypeError(f"no section named {', '.join(unknown)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer, shorter contexts and streams")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--threads", type=int, default=cpu_count(), help="BLAS threads of the second pass"
    )
    parser.add_argument(
        "--sections",
        type=_sections,
        default=SECTIONS,
        metavar="NAME,...",
        help=f"what to measure: any of {','.join(SECTIONS)} (default: all)",
    )
    # How a pass is told what to do in its own process.
    parser.add_argument("--pass-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pin", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"--threads must be at least 1, got {args.threads}")
    effort = QUICK if args.quick else FULL
    shapes = SHAPES[:1] if args.quick else SHAPES
    if args.pass_file is not None:
        if args.pin:
            pin_to_one_cpu()
        try:
            result = one_pass(effort, shapes, args.sections, args.threads)
        except DisagreementError as fault:
            print(f"bench: error: {fault}", file=sys.stderr)
            return 1
        args.pass_file.write_text(json.dumps(result))
        return 0

    facts = machine()
    pinned = sys.platform == "linux"
    results = []
    for threads in dict.fromkeys((1, args.threads)):
        _note(f"pass with {threads} BLAS thread{'s' * (threads > 1)}")
        results.append(in_own_process(args.quick, args.sections, threads, pin=threads == 1))
    facts.update({name: results[0][name] for name in ("compiled", "torch")})
    for name, value in facts.items():
        print(f"{name}: {value or '-'}")
    for result in results:
        show_pass(result, pinned and result["threads"] == 1)
    show_memory(results[0]["memory"], shapes)
    if args.json is not None:
        whole = {"machine": facts, "passes": results, "shapes": [asdict(s) for s in shapes]}
        args.json.write_text(json.dumps(whole, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
