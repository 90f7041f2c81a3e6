"""The table of cases that every backend must pass, and the inputs of each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Config
from o1core.testing.oracle import F64, Rows

__all__ = ["Case", "cases", "golden_case", "random_rows"]

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One row of the test matrix.

    rows gives the inputs, the first `prompt` of which are sealed; the others come in `chunks`. The
    oracle looks at each `every`-th row and the last. alter may replace landmarks or mix before the
    layer is extended. vectors gives arrays of the upstream engine to compare with as well (see
    `golden_case`). quick: one of the few cases that a short check runs.
    """

    name: str
    config: Config
    rows: Callable[[], Rows]
    prompt: int
    chunks: tuple[int, ...]
    alter: Callable[[Mapping[str, F64]], dict[str, F64]] | None = field(default=None, repr=False)
    every: int = 1
    vectors: Callable[[], Arrays] | None = field(default=None, repr=False)
    quick: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def checked(self) -> list[int]:
        """The rows after the prompt that are compared with the oracle, counted from 0."""
        last = sum(self.chunks) - 1
        return sorted({*range(0, last + 1, self.every), last}) if last >= 0 else []


def random_rows(
    seed: int,
    rows: int,
    *,
    groups: int = 1,
    heads_per_group: int = 1,
    head_dim: int = 16,
    value_dim: int | None = None,
    peak: float = 1.0,
    drift: float = 0.0,
) -> Rows:
    """Normal rows; `peak` multiplies the queries, `drift` moves the mean key along the sequence."""
    rng = np.random.default_rng(seed)
    shape = (rows, groups * heads_per_group, head_dim)
    q = peak * rng.standard_normal(shape)
    k = rng.standard_normal((rows, groups, head_dim))
    k += drift * np.linspace(0, 1, rows)[:, None, None] * rng.standard_normal(head_dim)
    v = rng.standard_normal((rows, groups, value_dim or head_dim))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def _massive_rows(size: float, at: Sequence[int], prompt: int, rows: int) -> Rows:
    """Keys whose landmark logit is about `size`, though no row attends to them.

    at counts from the end of the prompt. The prompt's queries point along the axis on which those
    keys are large; the queries of the later rows are orthogonal to it.
    """
    q, k, v = random_rows(7, prompt + rows, heads_per_group=2, head_dim=16)
    q[:prompt, :, 0] = 4.0
    q[prompt:, :, 0] = 0.0
    k[:, :, 0] = 0.0
    k[[prompt + x for x in at], :, 0] = size
    return q, k, v


def _jumping_rows(step: float, prompt: int, rows: int) -> Rows:
    """The same with a landmark maximum that rises by `step` at every seventh key."""
    q, k, v = _massive_rows(0.0, (), prompt, rows)
    k[prompt::7, 0, 0] = step * np.arange(1, 1 + len(k[prompt::7]))
    return q, k, v


def _opposed_rows(size: float) -> Rows:
    """A landmark key that the mix ignores and the later queries prefer, by `size`.

    The prompt's queries point one way, and one segment of its keys the other; the later queries
    follow those keys. What counts for the far field then lies `size` below the largest logit.
    """
    q, k, v = random_rows(7, 264, heads_per_group=2, head_dim=16)
    q[:64, :, 0] = -4.0
    q[64:, :, 0] = 4.0
    k[:, :, 0] = 0.0
    k[8:16, :, 0] = size
    return q, k, v


def _upstream_rows(head_dim: int, heads_per_group: int, prompt: int, rows: int) -> Rows:
    """What the upstream engine tests its kernels with: no random numbers, 2 groups.

    Element i of an array is `(37 i + 13 b + 3) mod 83 / 83 - 1/2`. In the prompt every head and
    group has an array and a b of its own; q, k and v of the later rows are one array each.
    """

    def array(b: int, *shape: int) -> F32:
        steps = (np.arange(math.prod(shape)) * 37 + b * 13 + 3) % 83
        return (steps.astype(np.float32) / np.float32(83) - np.float32(0.5)).reshape(shape)

    def of_prompt(*seeds: int) -> F32:
        return np.stack([array(b, prompt, head_dim) for b in seeds], axis=1)

    heads = range(heads_per_group)
    return (
        np.concatenate(
            (
                of_prompt(*(3 + h + 20 * g for g in range(2) for h in heads)),
                array(5, rows, 2 * heads_per_group, head_dim),
            )
        ),
        np.concatenate((of_prompt(1, 21), array(6, rows, 2, head_dim))),
        np.concatenate((of_prompt(2, 22), array(7, rows, 2, head_dim))),
    )


def _positive_mix(fixed: Mapping[str, F64]) -> dict[str, F64]:
    # All landmarks count for the far field: no cancellation, so the bound is tight.
    return {"mix": np.abs(fixed["mix"])}


def _uneven_mix(fixed: Mapping[str, F64]) -> dict[str, F64]:
    # Rows, columns and single entries from 1e-30 to 1e30 of the others.
    mix = np.abs(fixed["mix"])
    m = mix.shape[-1]
    size = 10.0 ** np.linspace(-15, 15, m)
    return {"mix": mix * size[:, None] * size[::-1] * np.where(np.eye(m), 1e-20, 1.0)}


def _negative_mix(fixed: Mapping[str, F64]) -> dict[str, F64]:
    return {"mix": -np.abs(fixed["mix"])}


def _alternating_mix(fixed: Mapping[str, F64]) -> dict[str, F64]:
    # Even landmarks count for the far field and odd ones against it; which wins depends on the row.
    mix = np.abs(fixed["mix"])
    sign = np.where(np.arange(mix.shape[-1]) % 2, -1.0, 1.0)
    return {"mix": mix * sign[:, None]}


def _survivor_rows(gap: float) -> Rows:
    """A massive key in the prompt, which landmark 3 of 8 sees by `gap` less than the others."""
    q, k, v = _massive_rows(90.0, (-110,), 120, 180)
    q[45:60, :, 0] *= 1 - gap / 90
    return q, k, v


def _lone_survivor(size: float, fixed: Mapping[str, F64]) -> dict[str, F64]:
    # For "fm": every landmark is clamped but number 3, whose weight of about `size` makes up for
    # the massive key it has seen.
    mix = -np.abs(fixed["mix"])
    mix[..., 3] *= -size / np.abs(mix[..., 3]).max()
    return {"mix": mix}


def _zero_mix(fixed: Mapping[str, F64]) -> dict[str, F64]:
    return {"mix": np.zeros_like(fixed["mix"])}


def _dropped_far_above(fixed: Mapping[str, F64]) -> dict[str, F64]:
    # Landmark logits hundreds above the near ones, all against the far field.
    return {"mix": -np.abs(fixed["mix"]), "k_landmarks": 1000 * fixed["k_landmarks"]}


def _times(factor: float, fixed: Mapping[str, F64]) -> dict[str, F64]:
    return {"k_landmarks": fixed["k_landmarks"] * factor}


def _twin_rows(noise: float) -> Rows:
    """Keys that are nearly the same, so that landmarks are too, and A is nearly singular."""
    q, k, v = random_rows(8, 300, groups=2, heads_per_group=2)
    k[:] = k[0] + np.float32(noise) * k
    return q, k, v


def _sunk_rows(size: float) -> Rows:
    """Every query prefers the sinks to all other keys by about `size`, or shuns them."""
    q, k, v = random_rows(9, 300, groups=2, heads_per_group=2)
    q[:, :, 0] = 4.0
    k[:, :, 0] = 0.0
    k[:2, :, 0] = size
    return q, k, v


def _scaled_rows(q_by: float, k_by: float, v_by: float) -> Rows:
    q, k, v = random_rows(10, 300, groups=2, heads_per_group=2)
    return q * np.float32(q_by), k * np.float32(k_by), v * np.float32(v_by)


def _mixed_value_rows() -> Rows:
    """Values from denormal to 1e20, each row of its own size."""
    q, k, v = random_rows(10, 300, groups=2, heads_per_group=2)
    v *= (10.0 ** np.linspace(-42, 20, len(v))[:, None, None]).astype(np.float32)
    return q, k, v


def _captured_rows(rows: int) -> Rows:
    """A layer of a real model, as the demo has it."""
    folder = resources.files("o1core").joinpath("data")
    (file,) = (x for x in folder.iterdir() if x.name.startswith("smollm2-135m-layer"))
    with resources.as_file(file) as path, np.load(path) as arrays:
        q, k, v = (arrays[name][:rows].astype(np.float32) for name in "qkv")
    return q, k, v


# Golden vectors -----------------------------------------------------------------------------------


def golden_case(file: Traversable, *, every: int = 1) -> Case:
    """The case of a golden file: vectors of the upstream engine, computed row by row.

    Its arrays: `meta_json` (sizes, how the rows were cut), `prompt_q/k/v`, `rows_q/k/v`, the
    state after sealing as `sealed_*` and at the end as `final_*`, and the output `out`.
    """
    about = json.loads(_golden(file)["meta_json"].tobytes())
    config = Config(
        landmarks=about["m"],
        window=about["w"],
        sinks=about["sink"],
        rectifier=about["rect"],
        windows=tuple(about["windows"]),
    )
    name = f"golden-{file.name.removesuffix('.npz').replace('_', '-')}"
    rows, vectors = partial(_golden_rows, file), partial(_golden, file)
    chunks = tuple(about["chunks"])
    return Case(name, config, rows, about["t"], chunks, None, every, vectors)


def _golden(file: Traversable) -> Arrays:
    with resources.as_file(file) as path, np.load(path) as arrays:
        return dict(arrays)


def _golden_rows(file: Traversable) -> Rows:
    arrays = _golden(file)
    q, k, v = (np.concatenate((arrays[f"prompt_{x}"], arrays[f"rows_{x}"])) for x in "qkv")
    return q, k, v


# The table ----------------------------------------------------------------------------------------

# fmt: off
_QUICK = frozenset((
    "plain", "one-head", "no-sinks", "fm", "no-landmarks", "value-dim", "odd-sizes",
    "half-full", "mixed-windows", "seals-itself", "dropped", "alternating", "window-1",
    "window-64", "first-eviction-at-1", "first-eviction-at-63", "massive-100-at-40",
    "jumps-of-30", "opposed-80", "survivor-29-below", "twins-0.001", "sinks-dominate",
    "values-x1e+28", "heads-4-of-128", "upstream-full", "golden-clustered", "golden-value-dim",
))
# fmt: on


@cache
def cases() -> tuple[Case, ...]:
    """The table of cases every backend must pass."""
    small = Config(landmarks=8, window=64, sinks=2)

    def rows(n: int, **shape: Any) -> Callable[[], Rows]:
        return partial(random_rows, 1, n, **shape)

    two = {"groups": 2, "heads_per_group": 2}
    table = [
        Case("plain", small, rows(300, **two), 120, (70, 9, 0, 1, 100)),
        Case("one-head", small, rows(300), 120, (180,)),
        Case("no-sinks", Config(8, 64, 0), rows(300, **two), 120, (64, 65, 51)),
        Case("fm", Config(8, 64, 2, "fm"), rows(300, **two), 120, (180,)),
        Case("no-landmarks", Config(0, 64, 2), rows(300, **two), 120, (1, 63, 116)),
        Case("value-dim", small, rows(250, head_dim=24, value_dim=40), 120, (130,)),
        Case("odd-sizes", Config(5, 37, 3), rows(211, head_dim=7, value_dim=3), 83, (50, 78)),
        Case("many-groups", small, rows(200, groups=7), 100, (100,)),
        Case("scale", Config(8, 64, 2, scale=0.7), rows(250), 120, (130,)),
        Case("peaked", small, rows(300, peak=6.0, **two), 120, (64, 116)),
        Case("drift", small, rows(400, drift=3.0, **two), 120, (280,)),
        Case("half-full", Config(8, 16, 2, windows=(16, 200)), rows(300, **two), 60, (240,)),
        Case(
            "empty-beside-full", Config(8, 16, 2, windows=(500, 16)), rows(300, **two), 60, (240,)
        ),
        Case("many-heads", small, rows(200, heads_per_group=13), 100, (100,)),
        Case("very-many-groups", Config(4, 20, 1), rows(120, groups=48, head_dim=4), 60, (60,)),
        Case("mixed-windows", Config(8, 64, 2, windows=(1, 100)), rows(220, **two), 120, (100,)),
        Case("first-row", small, rows(200, **two), 75, (1,) * 8),
        Case("exact-only", small, rows(74, **two), 10, (3, 1, 60)),
        Case("seals-itself", small, rows(300, **two), 10, (3, 1, 60, 2, 150, 74)),
        Case("seals-in-one-call", small, rows(300, **two), 0, (300,)),
        Case("dropped", small, rows(300, **two), 120, (180,), _negative_mix),
        Case("alternating", small, rows(300, peak=3.0, **two), 120, (180,), _alternating_mix),
        Case("zero-mix", small, rows(300, **two), 120, (180,), _zero_mix),
    ]
    # Sizes of models: head_dim and the heads that share a group.
    for head_dim, heads in ((128, 4), (128, 8), (96, 7), (80, 5), (72, 9), (48, 16), (192, 2)):
        inputs = rows(150, heads_per_group=heads, head_dim=head_dim)
        name = f"heads-{heads}-of-{head_dim}"
        table.append(Case(name, Config(16, 48, 4), inputs, 80, (66, 1, 3)))
    table.append(Case("window-600", Config(8, 600, 40), rows(900), 660, (70, 170)))
    table.append(Case("decode", small, rows(420, heads_per_group=2), 120, (150, *(1,) * 150)))
    # Groups that are not full yet when the layer is sealed: row j of the call evicts first.
    for j in (0, 1, 62, 63):
        config, prompt = Config(8, 16, 2, windows=(100, 16)), 102 - j
        inputs = rows(prompt + 130, **two)
        table.append(Case(f"first-eviction-at-{j}", config, inputs, prompt, (64, 66)))
    for window in (1, 2, 16, 48, 63, 64, 65, 128):
        config = Config(8, window, 2)
        prompt = max(90, config.seal_rows + 10)
        table.append(
            Case(f"window-{window}", config, rows(prompt + 140, **two), prompt, (67, 1, 72))
        )
    for factor in (10.0, 40.0):
        alter = partial(_times, factor)
        table.append(Case(f"landmarks-x{factor:g}", small, rows(300, **two), 120, (180,), alter))
    table.append(Case("uneven-mix", small, rows(300, **two), 120, (180,), _uneven_mix))
    above = _dropped_far_above
    table.append(Case("dropped-far-above", small, rows(300, **two), 120, (180,), above))
    survivor = Config(8, 64, 2, "fm")
    for gap, weight in ((0.0, 1e-40), (25.0, 1e-30), (29.0, 1e-28), (35.0, 1e-24)):
        inputs, alter = partial(_survivor_rows, gap), partial(_lone_survivor, weight)
        table.append(Case(f"survivor-{gap:g}-below", survivor, inputs, 120, (180,), alter))
    for size in (20.0, 100.0, 1e4, 1e5):
        for at in ((0,), (1,), (40,), (62,), (63,), (64, 100), (3, 5, 7, 127)):
            # Several massive keys differ by less than float32 can tell of logits beyond 1000.
            if size > 1000 and len(at) > 1:
                continue
            name = f"massive-{size:g}-at-{'-'.join(map(str, at))}"
            inputs = partial(_massive_rows, size, at, 120, 200)
            table.append(Case(name, small, inputs, 120, (200,), _positive_mix))
    for step in (1.0, 3.0, 5.0, 30.0, 100.0):
        inputs = partial(_jumping_rows, step, 120, 200)
        table.append(Case(f"jumps-of-{step:g}", small, inputs, 120, (200,), _positive_mix))
    for size in (30.0, 80.0, 100.0, 1000.0):
        config = Config(landmarks=8, window=16, sinks=2)
        inputs = partial(_opposed_rows, size)
        table.append(Case(f"opposed-{size:g}", config, inputs, 64, (200,)))
    # Full rings; a wide ring that fills within a call; one that the prompt does not fill.
    for name, head_dim, heads, config, prompt, chunks in (
        ("full", 8, 2, Config(4, 64, 2, windows=(64, 64)), 100, (70, 9)),
        ("filling", 8, 2, Config(4, 64, 2, windows=(64, 128)), 100, (70, 40)),
        ("wide", 256, 6, Config(32, 128, 4, windows=(128, 512)), 300, (64, 64)),
    ):
        inputs = partial(_upstream_rows, head_dim, heads, prompt, sum(chunks))
        table.append(Case(f"upstream-{name}", config, inputs, prompt, chunks))
    for noise in (0.0, 1e-3, 0.1):
        inputs = partial(_twin_rows, noise)
        table.append(Case(f"twins-{noise:g}", small, inputs, 120, (180,)))
    for name, size in (("dominate", 30.0), ("ignored", -30.0)):
        table.append(Case(f"sinks-{name}", small, partial(_sunk_rows, size), 120, (180,)))
    for by in (2.0**-40, 2.0**30):
        inputs = partial(_scaled_rows, 1 / by, by, 1.0)
        table.append(Case(f"keys-x{by:.0e}", small, inputs, 120, (180,)))
    for by in (1e-42, 1e-36, 1e-30, 1e28):
        inputs = partial(_scaled_rows, 1.0, 1.0, by)
        table.append(Case(f"values-x{by:.0e}", small, inputs, 120, (180,)))
    # Logits that are denormal, and 0: every key weighs the same.
    table.append(
        Case("logits-near-0", small, partial(_scaled_rows, 1e-20, 1e-20, 1.0), 120, (180,))
    )
    table.append(Case("values-of-all-sizes", small, _mixed_value_rows, 120, (180,)))
    stream = rows(6000, heads_per_group=2, head_dim=4)
    long = (512,) * 10 + (1,) * 8 + (700,)
    table.append(Case("long-stream", Config(8, 32, 2), stream, 100, long, None, 61))
    for name, landmarks in (("real", 32), ("real-no-landmarks", 0)):
        calls = (300, 300, 300, 124)
        inputs = partial(_captured_rows, 1536)
        table.append(Case(name, Config(landmarks), inputs, 512, calls, None, 37))
    vectors = resources.files("o1core").joinpath("data").joinpath("golden")
    files = sorted(vectors.iterdir(), key=lambda file: file.name)
    table += [golden_case(file) for file in files if file.name.endswith(".npz")]
    return tuple(replace(case, quick=case.name in _QUICK) for case in table)
