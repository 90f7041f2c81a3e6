"""The command line: `o1core`, also `python -m o1core`.

Exit codes: 0; 1 when a backend fails, is missing or leaves its tolerance; 2 for bad input; 130 when
interrupted.
Errors and warnings are one line each on stderr. With --json, stdout holds one JSON value.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np
import numpy.typing as npt

import o1core
from o1core.capture import Capture, CaptureError, load
from o1core.config import Config, Geometry
from o1core.errors import BackendFallbackWarning, BackendUnavailable
from o1core.plan import MAX_SCRATCH, MAX_SUB_CHUNK, STRATEGIES, Plan
from o1core.report import Progress, ScaleFrom, Schedule, measure, render, wrap
from o1core.testing.matrix import Watch, parity

__all__ = ["main"]

Array = npt.NDArray[Any]

PROMPT_ROWS = 512
CHUNK_ROWS = 512
DEMO_PARTS = 4
DEMO_REPEATS = 3
MAX_PLAN_ROWS = 2**20
REQUIRE = "O1CORE_REQUIRE"
WGSL = "O1CORE_WGSL"
GEOMETRY = "4x6x256"
LONG_STREAM = 1_000_000
DEMO_CAPTURE = "smollm2-135m-layer*.npz"


class BadInputError(Exception):
    """What the user gave cannot be used; the text is the one line they get to see."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return the exit code.

    SystemExit only for --help and --version.
    """
    try:
        with _warnings_as_lines():
            args = _parser().parse_args(argv)
            code: int = args.run(args)
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has gone (`o1core plan | head`); the exit must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (BadInputError, CaptureError, BackendUnavailable) as fault:
        _complain("error", fault)
        return 2
    except OSError as fault:
        _complain("error", f"cannot write the output: {fault.strerror or fault}")
        return 1
    except MemoryError as fault:
        _complain("error", f"not enough memory: {fault}")
        return 2
    except RuntimeError as fault:
        _complain("error", fault)
        return 1


def _complain(kind: str, message: object) -> None:
    line = " ".join(str(message).split())
    safe = "".join(c if c.isprintable() else "?" for c in line)
    if sys.stderr is not None:
        print(f"o1core: {kind}: {safe}", file=sys.stderr)


def _say(text: str) -> None:
    """Print, whatever stdout can encode."""
    if sys.stdout is None:
        raise OSError("stdout is closed")
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Each warning once, on one line of stderr."""
    seen: set[str] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        del category, filename, lineno, file, line
        if str(message) not in seen:
            seen.add(str(message))
            _complain("warning", message)

    with warnings.catch_warnings():
        warnings.simplefilter("always", BackendFallbackWarning)
        warnings.showwarning = show
        yield


@contextmanager
def _input_errors(where: str = "") -> Iterator[None]:
    """The library's own refusals of a value are the user's errors here."""
    try:
        yield
    except (TypeError, ValueError) as fault:
        raise BadInputError(f"{where}{fault}") from fault


# The parser -------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadInputError(f"{message} (see: {self.prog} --help)")


def _parser() -> _Parser:
    parser = _Parser(
        prog="o1core",
        description="Constant-memory attention: look at backends and plans, and measure layers.",
    )
    parser.add_argument("--version", action="version", version=f"o1core {o1core.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for add in (_add_backends, _add_plan, _add_run, _add_parity, _add_bench, _add_demo):
        add(commands)
    return parser


Commands = argparse._SubParsersAction  # the type argparse gives no public name


def _command(
    commands: Commands[_Parser], name: str, run: Callable[[argparse.Namespace], int], text: str
) -> _Parser:
    summary = text.partition(".")[0]
    parser = commands.add_parser(name, help=summary[0].lower() + summary[1:], description=text)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _add_backends(commands: Commands[_Parser]) -> None:
    _command(
        commands,
        "backends",
        _backends,
        "List the installed backends. Says for each whether it is usable here, on what it would "
        "run, and if not, why. Opens every backend to find out.",
    )


def _add_plan(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "plan",
        _plan,
        "Show the plan of a call. Its sub-chunks, buffers and dispatches; nothing is run.",
    )
    sizes = (
        ("--groups", 2, "KV groups"),
        ("--heads-per-group", 6, "query heads that share a group"),
        ("--head-dim", 256, "width of queries and keys"),
        ("--value-dim", None, "width of values (default: the head dim)"),
        ("--sinks", 4, "first keys that stay exact"),
        ("--landmarks", 32, "landmarks in use: 0, or at least 4"),
        ("--rows", 200, f"rows of the call, at most {MAX_PLAN_ROWS}"),
        ("--sub-chunk", MAX_SUB_CHUNK, f"rows of a sub-chunk, at most {MAX_SUB_CHUNK}"),
    )
    for flag, default, text in sizes:
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=text + shown)
    parser.add_argument(
        "--window",
        type=_integers,
        default=(128,),
        metavar="N[,N...]",
        help="keys of the exact window, for all groups or one a group (default: 128)",
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default=STRATEGIES[0],
        help="sub-chunk after sub-chunk, or the whole call at once (default: %(default)s)",
    )
    parser.add_argument(
        "--scratch",
        type=int,
        default=MAX_SCRATCH,
        metavar="BYTES",
        help="what scratch may take in a whole call (default: %(default)s)",
    )
    _add_rectifier(parser)


def _add_run(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "run",
        _run,
        "Measure the operator on one layer's rows. Seals the first rows of the file, extends with "
        "the others, and reports error against exact causal attention, agreement with the float64 "
        "definition, speed, and memory. Exact attention takes time quadratic in the rows.",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="npz or safetensors with q [rows, heads, d], k [rows, groups, d] and "
        "v [rows, groups, dv], rotated; may say where it is from in `source`, as JSON",
    )
    parser.add_argument(
        "--prompt",
        type=int,
        metavar="N",
        help=f"rows to seal (default: a quarter of the rows, at most {PROMPT_ROWS})",
    )
    parser.add_argument(
        "--chunk",
        type=int,
        default=CHUNK_ROWS,
        metavar="N",
        help=f"rows of a call that extends (default: {CHUNK_ROWS})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the output [rows, heads, dv] of the rows after the prompt, float32: a .npy, "
        "or a .npz with `out` and `first_row`",
    )
    _add_layer(parser)


def _add_parity(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "parity",
        _parity,
        "Check every backend of this machine against the definition and the others. Each runs all "
        "cases in a process of its own, with output and state checked, kernel by kernel where it "
        "can stop between them. The table has the worst error of each case over its bound; the "
        "exit code is 1 when one is beyond it, or when a backend did not run that was named here "
        f"or in the environment variable {REQUIRE}, as in numpy,wgpu.",
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="a backend or a variant of one, as taichi-cuda; may be given again (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="the main cases only, under a minute")
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="write the results as JUnit's XML as well"
    )


def _add_bench(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "bench",
        _bench,
        "Measure the speed of backends beside each other and exact attention. By rows a call, "
        "sizes, backends and their strategies, on the device and with arrays of the host: time, "
        "counted operations a second and their share of what the device can do; also by context, "
        "after a long stream, and of sealing. Every candidate is checked before it is timed; one "
        "that is wrong has no figures, and the exit code is 1. Exact attention is torch's where "
        "torch is installed, on its CUDA device if there is one.",
    )
    parser.add_argument(
        "--rows", type=_integers, metavar="N,N,...", help="rows a call (default: 1,64,512,4096)"
    )
    parser.add_argument(
        "--geometry",
        action="append",
        metavar="GxHxD[:KEY=N,...]",
        help="KV groups, heads a group and head dim, with landmarks, window, sinks or value_dim "
        f"after a colon; may be given again (default: {GEOMETRY})",
    )
    parser.add_argument(
        "--backends",
        metavar="NAME,NAME,...",
        help="backends or variants of them, as wgpu-sub-chunk; Taichi runs on one arch a process "
        "(default: every variant that runs here on a GPU, and numpy)",
    )
    parser.add_argument(
        "--wgsl",
        type=Path,
        metavar="FILE",
        help="WGSL, or Rust that holds it, for wgpu-original (default: of O1CORE_WGSL)",
    )
    parser.add_argument(
        "--contexts",
        type=_contexts,
        metavar="N,N,...",
        help="keys of exact attention, or none (default: to 131072 with CUDA, else to 4096)",
    )
    parser.add_argument(
        "--stream",
        type=int,
        metavar="N",
        help="rows that a layer has seen in the end, if time allows; 0 for none "
        f"(default: {LONG_STREAM})",
    )
    parser.add_argument(
        "--seal", type=int, metavar="N", help="rows of a prompt; 0 for none (default: 4096)"
    )
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="repetitions, if time allows (default: 15)"
    )
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument(
        "--plot", type=Path, metavar="DIR", help="write PNG files there (extra: bench)"
    )


def _add_demo(commands: Commands[_Parser]) -> None:
    parser = _command(
        commands,
        "demo",
        _demo,
        "Measure the operator on a captured layer of a real model. The capture comes with the "
        f"package; {PROMPT_ROWS} rows are sealed, thousands extended, in {DEMO_PARTS} parts, so "
        "that cost and error show by position in the context.",
    )
    _add_layer(parser)


def _add_rectifier(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--rectifier",
        default=Config.rectifier,
        choices=("aggregate", "fm"),
        help="aggregate, or fm: every landmark weight clamped at 0 (default: aggregate)",
    )


def _add_layer(parser: _Parser) -> None:
    """The options of the layer and of the engine it runs on."""
    layer = parser.add_argument_group("layer")
    for flag, default, text in (
        ("--landmarks", Config.landmarks, "budget of landmarks: at least 4, or 0 for none"),
        ("--window", Config.window, "keys of the exact window, the current row included"),
        ("--sinks", Config.sinks, "first keys that stay exact"),
    ):
        layer.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    layer.add_argument(
        "--windows",
        type=_integers,
        metavar="N,N,...",
        help="a window for each group; --window then only decides when to seal",
    )
    _add_rectifier(layer)
    layer.add_argument(
        "--scale",
        type=float,
        metavar="X",
        help="factor on every dot product (default: the file's source.scale, else 1/sqrt(d))",
    )
    layer.add_argument(
        "--ridge",
        type=float,
        default=Config.ridge,
        metavar="X",
        help=f"relative regularisation of the mixing matrix (default: {Config.ridge:g})",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--backend", default="auto", metavar="NAME", help="see `o1core backends` (default: auto)"
    )
    engine.add_argument(
        "--device", metavar="NAME", help="which device of the backend, by name or index"
    )
    engine.add_argument(
        "--strategy",
        choices=STRATEGIES,
        help="of a backend that is named and has both (default: what it takes by itself)",
    )
    engine.add_argument(
        "--no-fallback",
        action="store_true",
        help="fail if the backend is not usable, instead of going on with numpy",
    )


def _contexts(text: str) -> tuple[int, ...]:
    return () if text == "none" else _integers(text)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be integers separated by commas, got {text!r}"
        ) from None


# The commands -----------------------------------------------------------------------------------


def _backends(args: argparse.Namespace) -> int:
    infos = o1core.backends()
    if args.json:
        _say(json.dumps([asdict(info) for info in infos], indent=1))
        return 0
    if not infos:
        _say("no backend is installed: o1core finds them through package metadata, so install it")
        return 0
    width = max(len("backend"), *(len(info.name) for info in infos))
    lines = [f"{'backend':{width}}  usable  runs on"]
    for info in infos:
        usable = "yes" if info.usable else "no"
        lines.append(f"{info.name:{width}}  {usable:6}  {info.device or '-'}")
        for text in (f"from {info.source}", *info.reasons):
            lines += wrap(text, " " * (width + 2))
    _say("\n".join(lines))
    return 0


def _plan(args: argparse.Namespace) -> int:
    if not 0 <= args.rows <= MAX_PLAN_ROWS:
        raise BadInputError(f"--rows must be between 0 and {MAX_PLAN_ROWS}, got {args.rows}")
    with _input_errors():
        geometry = Geometry.of(
            args.groups,
            args.heads_per_group,
            args.head_dim,
            value_dim=args.value_dim,
            window=args.window if len(args.window) > 1 else args.window[0],
            sinks=args.sinks,
            landmarks=args.landmarks,
            rectifier=args.rectifier,
        )
        plan = Plan.build(
            geometry,
            args.rows,
            strategy=args.strategy,
            sub_chunk=args.sub_chunk,
            scratch=args.scratch,
        )
    _say(plan.to_json() if args.json else str(plan))
    return 0


def _run(args: argparse.Namespace) -> int:
    if args.chunk < 1:
        raise BadInputError(f"--chunk must be at least 1, got {args.chunk}")
    if args.out is not None:
        _check_out(args.out, args.file)
    capture = load(args.file)
    rows = len(capture.q)
    prompt = min(PROMPT_ROWS, rows // 4) if args.prompt is None else args.prompt
    if not 0 <= prompt < rows:
        raise BadInputError(
            f"--prompt must be between 0 and {rows - 1}, to leave one of the {rows} rows of "
            f"{args.file}, got {prompt}"
        )
    return _measure(args, capture, Schedule(prompt, args.chunk), args.out)


def _parity(args: argparse.Namespace) -> int:
    if args.junit is not None:
        _check_folder("--junit", args.junit)
    required = [name.strip() for name in os.environ.get(REQUIRE, "").split(",")]
    with _watch("parity") as watch, _input_errors():
        matrix = parity(args.backend, quick=args.quick, require=filter(None, required), watch=watch)
    if args.junit is not None:
        with _writing("--junit", args.junit):
            args.junit.write_text(matrix.to_junit(), "utf-8")
    _say(matrix.to_json() if args.json else str(matrix))
    if not matrix.passed:
        _complain("error", f"parity failed: {len(matrix.failures)} failures")
        return 1
    return 0


def _bench(args: argparse.Namespace) -> int:
    from o1core import bench

    plot = args.plot
    if plot is not None:
        if not plot.is_dir():
            raise BadInputError(f"--plot {plot} must be a folder that is there")
        if find_spec("matplotlib") is None:
            raise BadInputError("--plot needs matplotlib: pip install 'o1core[bench]'")
    options = _bench_options(args)
    with _wgsl(args.wgsl), _watch("bench") as watch:
        results = bench.bench(options, watch)
    if plot is not None:
        from o1core.bench.plot import plots

        with _writing("--plot", plot):
            plots(results, plot)
    _say(results.to_json() if args.json else str(results))
    for error in results.errors:
        _complain("error", error)
    return 0 if results.passed else 1


def _bench_options(args: argparse.Namespace) -> Any:
    from o1core.bench.run import Options, Shape

    def counts(option: str, given: Any, default: tuple[int, ...], quick: tuple[int, ...]) -> Any:
        found = (quick if args.quick else default) if given is None else given
        for x in found:
            if not 1 <= x <= MAX_PLAN_ROWS:
                raise BadInputError(f"{option} must be between 1 and {MAX_PLAN_ROWS}, got {x}")
        return tuple(sorted(set(found)))

    def number(option: str, given: int | None, default: int, quick: int, least: int) -> int:
        found = (quick if args.quick else default) if given is None else given
        if found < least:
            raise BadInputError(f"{option} must be at least {least}, got {found}")
        return found

    shapes = [_shape(text, Shape) for text in dict.fromkeys(args.geometry or [GEOMETRY])]
    names = None
    if args.backends is not None:
        names = [name.strip() for name in args.backends.split(",")]
        if not all(names):
            raise BadInputError(f"--backends must be names, got {args.backends!r}")
    short, long = (1024, 4096), (1024, 4096, 32768, 131072)
    contexts = args.contexts
    if contexts is None and not args.quick:
        contexts = long if _has_cuda() else short
    return Options(
        shapes=shapes,
        rows=counts("--rows", args.rows, (1, 64, 512, 4096), (1, 64)),
        backends=names,
        contexts=counts("--contexts", contexts, (), short[:1]),
        stream=number("--stream", args.stream, LONG_STREAM, 20_000, 0),
        sealed=number("--seal", args.seal, 4096, 1024, 0),
        repeats=number("--repeats", args.repeats, 15, 5, 1),
        budget=1.0 if args.quick else 3.0,
        stream_seconds=3.0 if args.quick else 30.0,
    )


def _has_cuda() -> bool:
    if find_spec("torch") is None:
        return False
    return bool(import_module("torch").cuda.is_available())


def _shape(text: str, make: Callable[..., Any]) -> Any:
    """A geometry as the command line names it, `4x6x256:window=64`."""
    sizes, _, rest = text.partition(":")
    rule = f"--geometry must be GROUPSxHEADSxDIM[:KEY=N,...], got {text!r}"
    try:
        groups, heads, dim = (int(x) for x in sizes.split("x"))
        pairs = (part.split("=") for part in rest.split(",") if rest)
        settings = {key: int(x) for key, x in pairs}
    except ValueError:
        raise BadInputError(rule) from None
    value_dim = settings.pop("value_dim", dim)
    known = ("landmarks", "window", "sinks")
    for key in settings:
        if key not in known:
            raise BadInputError(f"{rule}: KEY must be one of value_dim, {', '.join(known)}")
    with _input_errors(f"--geometry {text}: "):
        shape = make(text, groups, heads, dim, value_dim, Config(**settings))  # type: ignore[arg-type]
        _ = shape.geometry
    return shape


@contextmanager
def _wgsl(file: Path | None) -> Iterator[None]:
    """The environment variable that names the kernels of wgpu-original, set meanwhile."""
    if file is None:
        yield
        return
    if not file.is_file():
        raise BadInputError(f"--wgsl {file} must be a file that is there")
    before = os.environ.get(WGSL)
    os.environ[WGSL] = str(file)
    try:
        yield
    finally:
        if before is None:
            del os.environ[WGSL]
        else:
            os.environ[WGSL] = before


@contextmanager
def _watch(what: str) -> Iterator[Watch | None]:
    """A bar for steps with names on a terminal, else nothing."""
    with _bar() as bar:
        if bar is None:
            yield None
            return
        task = bar.add_task(what)

        def watch(step: str, done: int, total: int) -> None:
            bar.update(task, description=step, completed=done, total=total)

        yield watch


def _demo(args: argparse.Namespace) -> int:
    folder = resources.files("o1core").joinpath("data")
    found = [x for x in folder.iterdir() if Path(x.name).match(DEMO_CAPTURE)]
    if len(found) != 1:
        raise BadInputError(
            f"the package must hold one capture {DEMO_CAPTURE}, found {len(found)}: "
            "reinstall o1core"
        )
    with resources.as_file(found[0]) as path:
        capture = load(path)
    schedule = Schedule(PROMPT_ROWS, CHUNK_ROWS, DEMO_PARTS, DEMO_REPEATS)
    return _measure(args, capture, schedule)


def _measure(
    args: argparse.Namespace, capture: Capture, schedule: Schedule, out: Path | None = None
) -> int:
    config, scale_from = _config(args, capture)
    with _engine(args) as engine, _progress() as progress, _input_errors():
        measured, rows = measure(
            engine, capture, config, schedule, scale_from=scale_from, progress=progress
        )
    if out is not None:
        _save(out, rows, schedule.prompt)
    _say(measured.to_json() if args.json else render(measured))
    if not measured.agreement.passed:
        _complain("error", f"backend {measured.backend} is outside the tolerance of the definition")
        return 1
    return 0


def _config(args: argparse.Namespace, capture: Capture) -> tuple[Config, ScaleFrom]:
    """The layer that was asked for, and where its scale is from."""
    scale, scale_from = args.scale, "given"
    if scale is None:
        said = capture.source.get("scale") if isinstance(capture.source, dict) else None
        usable = isinstance(said, (int, float)) and not isinstance(said, bool)
        scale, scale_from = (said, "file") if usable else (None, "head_dim")
    with _input_errors(f"{capture.name}: source.scale: " if scale_from == "file" else ""):
        config = Config(
            landmarks=args.landmarks,
            window=args.window,
            sinks=args.sinks,
            rectifier=args.rectifier,
            windows=args.windows,
            scale=scale,
            ridge=args.ridge,
        )
    return config, scale_from  # type: ignore[return-value]  # a str by inference


@contextmanager
def _engine(args: argparse.Namespace) -> Iterator[o1core.O1Batch]:
    device = args.device
    if device is not None and device.isdecimal():
        device = int(device)
    with _input_errors():
        options = {} if args.strategy is None else {"strategy": args.strategy}
        engine = o1core.O1Batch(
            args.backend,
            fallback=None if args.no_fallback else "numpy",
            device=device,
            **options,
        )
    with engine:
        yield engine


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar for each stage on a terminal, else nothing."""
    with _bar() as bar:
        if bar is None:
            yield Progress()
            return

        class Bar(Progress):
            def start(self, label: str, rows: int) -> None:
                self.task = bar.add_task(label, total=rows)

            def advance(self, rows: int) -> None:
                bar.advance(self.task, rows)

        yield Bar()


@contextmanager
def _bar() -> Iterator[Any]:
    """rich's progress bar, or None where nobody is looking."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    with rich_progress.Progress(
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        yield bar


def _check_out(out: Path, file: Path) -> None:
    """Before the work, since after it would be a pity."""
    if out.suffix not in (".npy", ".npz"):
        raise BadInputError(f"--out must end in .npy or .npz, got {out}")
    _check_folder("--out", out)
    if out.exists() and file.exists() and out.samefile(file):
        raise BadInputError(f"--out {out} would overwrite the input")


def _check_folder(option: str, file: Path) -> None:
    if not file.parent.is_dir():
        raise BadInputError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise BadInputError(f"{option} {file} must be a file, and is a folder")


def _save(out: Path, rows: Array, first_row: int) -> None:
    with _writing("--out", out):
        if out.suffix == ".npy":
            np.save(out, rows)
        else:
            np.savez(out, out=rows, first_row=np.int64(first_row))


@contextmanager
def _writing(option: str, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise BadInputError(f"{option} {file}: {fault.strerror or fault}") from fault
