"""The oracle: what rows and states must be, from the whole history of a sequence in float64.

It has no ring and no recursion, so it cannot share a fault with a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Config, Geometry
from o1core.layout import GroupMeta

__all__ = ["CONSTANTS", "Expected", "Oracle", "Rows", "geometry_of"]

F64 = npt.NDArray[np.float64]
Rows = tuple[F32, F32, F32]
"""q `[rows, heads, head_dim]`, k `[rows, groups, head_dim]`, v `[rows, groups, value_dim]`."""

EPS = 2.0**-24
LEAST = 2.0**-126
"""The least number that every device tells from 0: those that flush denormals lose up to it."""

CONSTANTS = ("k_landmarks", "q_landmarks", "mix")
"""What sealing settles for good, under the names of `LayerState`."""


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


def geometry_of(config: Config, rows: Sequence[npt.NDArray[Any]], count: int) -> Geometry:
    """The sizes of a layer that has seen `count` rows of this q, k and v."""
    q, k, v = rows
    return config.geometry(
        groups=k.shape[1],
        heads_per_group=q.shape[1] // k.shape[1],
        head_dim=k.shape[2],
        value_dim=v.shape[2],
        rows=count,
    )


class Oracle:
    """One sequence: its prompt and, after `append`, the rows that followed.

    constants replaces the landmarks and the mix that the oracle derives from the prompt, under the
    names of `LayerState` (see `o1core.testing.adopt`); it must when a state was altered.
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
        count = min(self.sealed_rows, len(self.k))
        return geometry_of(self.config, (self.q, self.k, self.v), count)

    def fixed(self) -> dict[str, F64]:
        """Landmarks and mix, from the definition, as float64 of their float32 values."""
        g, t = self.geometry, self.sealed_rows
        m, heads = g.landmarks, g.heads_per_group
        if self.constants is None:
            cut = [(i * t // m, (i + 1) * t // m) for i in range(m)]
            k_mean = np.array([self.k[a:b].mean(axis=0) for a, b in cut])
            q_mean = np.array([self.q[a:b].mean(axis=0) for a, b in cut])
            mix = np.empty((g.groups, heads, m, m))
            for i in range(g.groups):
                for h in range(heads):
                    logit = g.scale * q_mean[:, i * heads + h] @ k_mean[:, i].T
                    mix[i, h] = self._mix(logit - logit.max()) * np.exp(-logit.max())
            self.constants = {
                "k_landmarks": k_mean.transpose(1, 0, 2),
                "q_landmarks": q_mean.transpose(1, 0, 2).reshape(g.groups, heads, m, -1),
                "mix": mix,
            }
        return {n: self.constants[n].astype(np.float32).astype(np.float64) for n in CONSTANTS}

    def _mix(self, logits: F64) -> F64:
        """`(AᵀA + λI)⁻¹ Aᵀ` of `A = exp(logits)`, from the singular values of A.

        AᵀA, which sealing factors, has the square of A's condition; this has A's own.
        """
        u, size, vt = np.linalg.svd(np.exp(logits))
        ridge = self.config.ridge * np.mean(size**2)
        mix: F64 = (vt.T * (size / (size**2 + ridge))) @ u.T
        return mix

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
        # Products that underflow: one for each key, and for each landmark.
        floor = LEAST * (len(keep) + g.landmarks)
        without = alone, largest * (2e-6 + 8 * EPS * (1 + size)) + floor
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
        joint = out, max(largest, float(np.abs(out).max())) * (2e-6 + relative) + floor
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
