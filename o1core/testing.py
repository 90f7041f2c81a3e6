"""Cases, oracle and comparison: the check that every backend passes, for hosts and plug-in authors.

    import o1core.testing

    def test_my_backend():
        o1core.testing.check_backend("mine")

The oracle works on the whole history of a sequence in float64, with no ring and no recursion, so it
cannot share a fault with a kernel. A result is compared within a bound that follows the condition
of its own row (docs/operator.md section 9); nothing in it is fitted to what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Config, Geometry
from o1core.engine import O1Batch
from o1core.executor import Executor
from o1core.layout import GroupMeta
from o1core.state import LayerState

__all__ = [
    "Case",
    "Expected",
    "Oracle",
    "Report",
    "Rows",
    "cases",
    "check_backend",
    "check_output",
    "check_state",
    "compare",
    "random_rows",
    "run_case",
]

F64 = npt.NDArray[np.float64]
Rows = tuple[F32, F32, F32]
"""q `[rows, heads, head_dim]`, k `[rows, groups, head_dim]`, v `[rows, groups, value_dim]`."""

EPS = 2.0**-24
STATE_TOLERANCE = 1e-4
AMBIGUOUS_SHARE = 0.02


@dataclass
class Expected:
    """What the oracle says of some rows; R rows, all heads.

    out `[R, heads, value_dim]` float64 with its bound `[R, heads]`; other and other_bound are the
    opposite decision about the far field, which a row marked ambiguous may have taken as well.
    """

    out: F64
    bound: F64
    other: F64
    other_bound: F64
    ambiguous: npt.NDArray[np.bool_]


@dataclass
class Report:
    """How a comparison went, counted in results: one for each row and head.

    worst: the largest error over its bound; ambiguous: float32 cannot tell whether the far field is
    kept; undecided: ambiguous, and any finite answer passes.
    """

    worst: float = 0.0
    results: int = 0
    ambiguous: int = 0
    undecided: int = 0

    def add(self, other: Report) -> None:
        self.worst = max(self.worst, other.worst)
        self.results += other.results
        self.ambiguous += other.ambiguous
        self.undecided += other.undecided


class Oracle:
    """One sequence: its prompt and, after `append`, the rows that followed.

    constants replaces the landmarks and the mix that the oracle derives from the prompt, under the
    names of `LayerState`; it must when a state was altered.
    """

    def __init__(
        self, config: Config, prompt: Rows, constants: Mapping[str, npt.NDArray[Any]] | None = None
    ) -> None:
        self.config = config
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in prompt)
        self.constants = None if constants is None else dict(constants)
        self.prompt_rows = len(prompt[0])

    def append(self, rows: Rows) -> None:
        """Add rows to the history."""
        self.q, self.k, self.v = (
            np.concatenate((past, np.asarray(x, np.float64)))
            for past, x in zip((self.q, self.k, self.v), rows, strict=True)
        )

    @property
    def sealed_rows(self) -> int:
        """Rows the layer is or will be sealed with."""
        return max(self.prompt_rows, self.config.seal_rows)

    @property
    def sealed(self) -> bool:
        return len(self.k) >= self.sealed_rows

    @property
    def geometry(self) -> Geometry:
        return self.config.geometry(
            groups=self.k.shape[1],
            heads_per_group=self.q.shape[1] // self.k.shape[1],
            head_dim=self.k.shape[2],
            value_dim=self.v.shape[2],
            rows=min(self.sealed_rows, len(self.k)),
        )

    def fixed(self) -> dict[str, F64]:
        """Landmarks and mix, from the definition, as float64 of their float32 values."""
        g, t = self.geometry, self.sealed_rows
        m, heads = g.landmarks, g.heads_per_group
        names = ("k_landmarks", "q_landmarks", "mix")
        if self.constants is None:
            cut = [(i * t // m, (i + 1) * t // m) for i in range(m)]
            k_mean = np.array([self.k[a:b].mean(axis=0) for a, b in cut])
            q_mean = np.array([self.q[a:b].mean(axis=0) for a, b in cut])
            mix = np.empty((g.groups, heads, m, m))
            for i in range(g.groups):
                for h in range(heads):
                    logit = g.scale * q_mean[:, i * heads + h] @ k_mean[:, i].T
                    a = np.exp(logit - logit.max())
                    gram = a.T @ a
                    gram += self.config.ridge * np.trace(gram) / m * np.eye(m)
                    mix[i, h] = np.linalg.inv(gram) @ a.T * np.exp(-logit.max())
            self.constants = {
                "k_landmarks": k_mean.transpose(1, 0, 2),
                "q_landmarks": q_mean.transpose(1, 0, 2).reshape(g.groups, heads, m, -1),
                "mix": mix,
            }
        return {n: self.constants[n].astype(np.float32).astype(np.float64) for n in names}

    def expected(self, rows: Iterable[int]) -> Expected:
        """What the rows with these indices into the whole sequence must give."""
        wanted = list(rows)
        g = self.geometry
        heads, dv = self.q.shape[1], self.v.shape[2]
        out, other = (np.empty((len(wanted), heads, dv)) for _ in range(2))
        bound, other_bound = (np.empty((len(wanted), heads)) for _ in range(2))
        ambiguous = np.zeros((len(wanted), heads), bool)
        fixed = self.fixed() if self.sealed and g.landmarks else None
        with np.errstate(all="ignore"):
            for i in range(self.k.shape[1]):
                for n in range(i * g.heads_per_group, (i + 1) * g.heads_per_group):
                    far_logits = None
                    if fixed is not None:
                        q_marks = fixed["q_landmarks"][i, n - i * g.heads_per_group]
                        far_logits = g.scale * q_marks @ self.k[:, i].T
                    for x, row in enumerate(wanted):
                        answers = self._row(row, i, n, fixed, far_logits)
                        (out[x, n], bound[x, n]), (other[x, n], other_bound[x, n]) = answers[:2]
                        ambiguous[x, n] = answers[2]
        return Expected(out, bound, other, other_bound, ambiguous)

    def _row(
        self, row: int, i: int, n: int, fixed: dict[str, F64] | None, far_logits: F64 | None
    ) -> tuple[tuple[F64, float], tuple[F64, float], bool]:
        """Answer and bound, the opposite answer and bound, and whether float32 can tell them apart.

        row indexes the sequence, i the group, n the head.
        """
        g = self.geometry
        exact = row < self.sealed_rows
        window = row + 1 if exact else g.windows[i]
        sinks = 0 if exact else g.sinks
        gone = max(sinks, row + 1 - window)
        keep = np.r_[0:sinks, gone : row + 1]
        near = g.scale * (self.k[keep, i] @ self.q[row, n])
        top = near.max()
        weights = np.exp(near - top)
        alone = weights @ self.v[keep, i] / weights.sum()
        largest = float(np.abs(self.v[: row + 1, i]).max())
        size = float(np.abs(near).max())
        without = alone, largest * (2e-6 + 8 * EPS * (1 + size))
        if far_logits is None or fixed is None or gone == sinks:
            return without, without, False
        logits = far_logits[:, sinks:gone]
        far_max = logits.max(axis=1)
        z = g.scale * (fixed["k_landmarks"][i] @ self.q[row, n])
        mix = fixed["mix"][i, n - i * g.heads_per_group]
        # u_b = Σ_a exp(z_a) mix[a,b] as u_b exp(peak_b): however far apart the landmarks are, each
        # keeps its own scale.
        terms = z[:, None] + np.log(np.abs(mix))
        peak = terms.max(axis=0)
        sizes = np.exp(terms - np.where(np.isneginf(peak), 0, peak))
        u, u_abs = (np.sign(mix) * sizes).sum(axis=0), sizes.sum(axis=0)
        size = max(size, float(np.abs(z).max() + np.abs(far_max).max()))
        if g.rectifier == "fm":
            # A landmark that is clamped beyond doubt adds no error.
            u_abs = np.where(u < -8 * EPS * (1 + size) * u_abs, 0, u_abs)
            u = np.maximum(u, 0)
        log_u, log_abs = peak + np.log(np.abs(u)), peak + np.log(u_abs)
        if not (u != 0).any():
            return without, without, False
        shift = max(top, (far_max + log_u).max())
        key_weights = np.sign(u) @ np.exp(log_u[:, None] + logits - shift)
        mass = key_weights.sum()
        near_sum = np.exp(near - shift)
        total = near_sum.sum() + max(mass, 0.0)
        joined = near_sum @ self.v[keep, i] + key_weights @ self.v[sinks:gone, i]
        # κ compares the sum of sizes with the sum; both may dwarf what cancels to `shift`.
        far_sizes = np.exp(log_abs[:, None] + logits - shift).sum()
        relative = 8 * EPS * (1 + size) * (far_sizes + near_sum.sum()) / total
        ambiguous = bool(abs(mass) < 8 * EPS * (1 + size) * far_sizes)
        if ambiguous:
            # The denominator itself is known to `relative` only, and a quotient feels that beyond
            # first order: r / (1 - r). From r = 1 on any finite answer is as good.
            relative = relative / (1 - relative) if relative < 1 else np.inf
        out = joined / max(total, 1e-300)
        # The numerator errs by the size of the values, the denominator by that of the result.
        joint = out, max(largest, float(np.abs(out).max())) * (2e-6 + relative)
        return (without, joint, ambiguous) if mass < 0 else (joint, without, ambiguous)

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """The state after the whole history, under the names of `LayerState`.

        Ring and sinks are the exact rows; far sums are float64; for an exact-only layer the ring
        holds every row.
        """
        g = self.geometry
        t = len(self.k)
        meta = [GroupMeta(0, 0, 0).after(t - g.sinks, w) for w in g.windows]
        ring_k = np.zeros((g.groups, g.ring, g.head_dim))
        ring_v = np.zeros((g.groups, g.ring, g.value_dim))
        for i, (group, window) in enumerate(zip(meta, g.windows, strict=True)):
            for row in range(t - group.length, t):
                ring_k[i, (row - g.sinks) % window] = self.k[row, i]
                ring_v[i, (row - g.sinks) % window] = self.v[row, i]
        state: dict[str, npt.NDArray[Any]] = {
            "meta": np.array(meta, np.uint32),
            "ring_k": ring_k,
            "ring_v": ring_v,
            "sink_k": self.k[: g.sinks].swapaxes(0, 1),
            "sink_v": self.v[: g.sinks].swapaxes(0, 1),
        }
        if not self.sealed:
            state["prompt_q"] = self.q
        elif g.landmarks:
            state.update(self.fixed())
            state.update(self._far_sums(g, meta, state["q_landmarks"]))
        return state

    def _far_sums(self, g: Geometry, meta: list[GroupMeta], q_landmarks: F64) -> dict[str, F64]:
        far_max = np.full(q_landmarks.shape[:3], -np.inf)
        far_mass = np.zeros(q_landmarks.shape[:3])
        far_num = np.zeros((*q_landmarks.shape[:3], g.value_dim))
        for i, group in enumerate(meta):
            gone = slice(g.sinks, g.sinks + group.far)
            if group.far == 0:
                continue
            logits = g.scale * q_landmarks[i] @ self.k[gone, i].T
            far_max[i] = logits.max(axis=-1)
            with np.errstate(under="ignore"):
                weights = np.exp(logits - far_max[i][..., None])
            far_mass[i] = weights.sum(axis=-1)
            far_num[i] = weights @ self.v[gone, i]
        return {"far_max": far_max, "far_mass": far_mass, "far_num": far_num}


def compare(out: F32, expected: Expected) -> tuple[Report, npt.NDArray[np.float64]]:
    """How close results of the right shape come: a report, and error over bound by row and head.

    An ambiguous row is held against both answers and keeps the better.
    """

    def over(answer: F64, bound: F64) -> F64:
        error = np.abs(out - answer).max(axis=-1)
        # Where the bound is 0, as for values that are all 0, only the exact answer will do.
        share: F64 = np.where(error == 0, 0.0, np.inf)
        np.divide(error, bound, out=share, where=bound > 0)
        return share

    error = over(expected.out, expected.bound)
    opposite = over(expected.other, expected.other_bound)
    error = np.where(expected.ambiguous, np.minimum(error, opposite), error)
    worst = float(error.max(initial=0))
    undecided = np.isinf(expected.bound) | np.isinf(expected.other_bound)
    counts = int(expected.ambiguous.sum()), int((expected.ambiguous & undecided).sum())
    return Report(worst, error.size, *counts), error


def check_output(out: npt.NDArray[Any], expected: Expected, label: str = "out") -> Report:
    """AssertionError unless every row of `out` is within its bound; how close it came otherwise.

    Type, shape and NaN are tested before any tolerance is applied.
    """
    if not isinstance(out, np.ndarray) or out.dtype != np.float32:
        raise AssertionError(f"{label} must be a float32 array, got {getattr(out, 'dtype', out)}")
    if out.shape != expected.out.shape:
        raise AssertionError(f"{label} must have shape {expected.out.shape}, got {out.shape}")
    if not np.isfinite(out).all():
        bad = np.argwhere(~np.isfinite(out))[0]
        raise AssertionError(f"{label} must be finite, got {out[tuple(bad)]} at {tuple(bad)}")
    report, error = compare(out, expected)
    # A NaN here would mean a bound that is none: it must not pass either.
    if not report.worst <= 1:
        row, head = np.unravel_index(int(np.argmax(error)), error.shape)
        raise AssertionError(
            f"{label} row {row} head {head} is off by {error[row, head]:.3g} times its bound "
            f"{expected.bound[row, head]:.3g}: got {out[row, head][:4]}..., "
            f"want {expected.out[row, head][:4]}..."
        )
    return report


def check_state(state: LayerState, expected: Mapping[str, npt.NDArray[Any]]) -> None:
    """AssertionError unless a state is the expected one (see `Oracle.state`).

    Meta, ring and sinks must be equal bit for bit, everything else within 1e-4 of its largest
    entry.
    """
    if set(state.arrays) != set(expected):
        raise AssertionError(f"state must hold {sorted(expected)}, got {sorted(state.arrays)}")
    for name, want in expected.items():
        got = state.arrays[name]
        if got.shape != want.shape:
            raise AssertionError(f"{name} must have shape {want.shape}, got {got.shape}")
        if name in ("meta", "ring_k", "ring_v", "sink_k", "sink_v", "prompt_q"):
            if not np.array_equal(got, want.astype(got.dtype)):
                bad = tuple(map(int, np.argwhere(got != want.astype(got.dtype))[0]))
                raise AssertionError(f"{name} differs first at {bad}: {got[bad]} != {want[bad]}")
            continue
        if not np.array_equal(np.isfinite(got), np.isfinite(want)):
            raise AssertionError(f"{name} must be finite exactly where the expected one is")
        finite = np.isfinite(want)
        tolerance = STATE_TOLERANCE * np.abs(want[finite]).max(initial=0)
        worst = np.abs(got[finite] - want[finite]).max(initial=0)
        if not worst <= tolerance:
            raise AssertionError(f"{name} is off by {worst:.3g}, tolerance {tolerance:.3g}")


@dataclass(frozen=True)
class Case:
    """One row of the test matrix.

    rows gives the inputs, the first `prompt` of which are sealed; the others come in `chunks`.
    alter may replace landmarks or mix before the layer is extended.
    """

    name: str
    config: Config
    rows: Callable[[], Rows]
    prompt: int
    chunks: tuple[int, ...]
    alter: Callable[[Mapping[str, F64]], dict[str, F64]] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.name


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
        Case("mixed-windows", Config(8, 64, 2, windows=(1, 100)), rows(220, **two), 120, (100,)),
        Case("first-row", small, rows(200, **two), 75, (1,) * 8),
        Case("exact-only", small, rows(74, **two), 10, (3, 1, 60)),
        Case("seals-itself", small, rows(300, **two), 10, (3, 1, 60, 2, 150, 74)),
        Case("seals-in-one-call", small, rows(300, **two), 0, (300,)),
        Case("dropped", small, rows(300, **two), 120, (180,), _negative_mix),
        Case("alternating", small, rows(300, peak=3.0, **two), 120, (180,), _alternating_mix),
        Case("zero-mix", small, rows(300, **two), 120, (180,), _zero_mix),
    ]
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
    return tuple(table)


@dataclass
class _Answers:
    """What the oracle says of a case; worked out once, whatever the number of backends."""

    sealed: dict[str, npt.NDArray[Any]]
    altered: dict[str, F32]
    rows: Expected
    final: dict[str, npt.NDArray[Any]]


@cache
def _answers(case: Case) -> _Answers:
    q, k, v = case.rows()
    prompt = q[: case.prompt], k[: case.prompt], v[: case.prompt]
    oracle = Oracle(case.config, prompt)
    sealed = oracle.state()
    altered: dict[str, F32] = {}
    if case.alter is not None:
        fixed = oracle.fixed()
        altered = {n: x.astype(np.float32) for n, x in case.alter(fixed).items()}
        oracle = Oracle(case.config, prompt, {**fixed, **altered})
    last = case.prompt + sum(case.chunks)
    rest = slice(case.prompt, last)
    oracle.append((q[rest], k[rest], v[rest]))
    return _Answers(sealed, altered, oracle.expected(range(case.prompt, last)), oracle.state())


def run_case(engine: O1Batch, case: Case, chunks: Sequence[int] | None = None) -> Report:
    """One case on one engine: outputs row by row, and the state after sealing and at the end.

    AssertionError naming what differs; otherwise how close the worst row came to its bound. chunks
    cuts the same rows differently.
    """
    q, k, v = case.rows()
    want = _answers(case)
    layer = engine.seal(q[: case.prompt], k[: case.prompt], v[: case.prompt], case.config)
    check_state(layer.state(), want.sealed)
    if want.altered:
        layer = engine.load(layer.state().replace(**want.altered))
    outs, at = [], case.prompt
    for size in case.chunks if chunks is None else chunks:
        rows = slice(at, at + size)
        outs.append(layer.extend(q[rows], k[rows], v[rows]))
        at += size
    report = check_output(np.concatenate(outs), want.rows, case.name)
    if report.ambiguous > max(1, AMBIGUOUS_SHARE * report.results):
        raise AssertionError(
            f"{case.name}: {report.ambiguous} of {report.results} results are ambiguous, "
            f"more than {AMBIGUOUS_SHARE:.0%}: the case checks too little"
        )
    check_state(layer.state(), want.final)
    return report


def check_backend(
    backend: str | Executor, only: Iterable[Case] | None = None, *, device: Any = None
) -> dict[str, Report]:
    """Every case on a backend, without fallback: `{case: report}`, or AssertionError."""
    with O1Batch(backend, fallback=None, device=device) as engine:
        return {case.name: run_case(engine, case) for case in (cases() if only is None else only)}
