"""The operator, written to be read: one row, one group, one head at a time.

This is docs/operator.md as code, in any float dtype, without any of the tricks of the backends and
without sharing a line with them. It is the definition; the backends are compared with it.

    layer = o1core.reference.seal(q, k, v, config, dtype=np.float64)
    out = layer.extend(q, k, v)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.config import Config, Geometry
from o1core.state import LayerState

__all__ = ["SerialLayer", "load", "seal"]

Array = npt.NDArray[Any]


@dataclass
class Head:
    """What one query head knows of the keys that left the window."""

    q_landmarks: Array  # [m, d]
    mix: Array  # [m, m]
    far_max: Array  # [m]       largest landmark logit of any evicted key
    far_mass: Array  # [m]       sum of exp(logit - far_max)
    far_num: Array  # [m, dv]   sum of exp(logit - far_max) * value


@dataclass
class Group:
    """Keys and values that a group's heads share."""

    window: int
    sink_k: Array  # [S, d]
    sink_v: Array  # [S, dv]
    ring_k: Array  # [window, d]
    ring_v: Array  # [window, dv]
    k_landmarks: Array  # [m, d]
    heads: list[Head]
    length: int = 0
    head: int = 0
    far: int = 0


class SerialLayer:
    """One layer, row by row. `extend` has the shapes of `o1core.Layer.extend`, without a batch."""

    def __init__(self, config: Config, geometry: Geometry, dtype: npt.DTypeLike) -> None:
        self.config = config
        self.geometry = geometry
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.scale: Any = np.asarray(geometry.scale, self.dtype)[()]
        self.groups: list[Group] = []
        self.batch = 1
        # All rows of an exact-only layer; `None` once it is sealed.
        self.history: tuple[Array, Array, Array] | None = None

    def extend(self, q: Array, k: Array, v: Array) -> Array:
        """Push each row, then read it (sections 3 and 4).

        q `[rows, G*H, d]`, k `[rows, G, d]`, v `[rows, G, dv]` -> `[rows, G*H, dv]` in the layer's
        dtype.
        """
        q, k, v = (np.asarray(x).astype(self.dtype) for x in (q, k, v))
        g = self.geometry
        out = np.empty((len(q), g.heads, g.value_dim), self.dtype)
        with np.errstate(under="ignore"):
            for i in range(len(q)):
                if self.history is not None:
                    out[i] = self._exact_row(q[i], k[i], v[i])
                    continue
                for n, group in enumerate(self.groups):
                    self._push(group, k[i, n], v[i, n])
                    for h in range(g.heads_per_group):
                        row = n * g.heads_per_group + h
                        out[i, row] = self._read(group, group.heads[h], q[i, row])
        return out

    def _push(self, group: Group, key: Array, value: Array) -> None:
        """Section 3: the oldest key goes far when the ring is full, the new one takes a slot."""
        if group.length < group.window:
            slot = (group.head + group.length) % group.window
            group.length += 1
        else:
            slot = group.head
            for head in group.heads:
                self._evict(head, group.ring_k[slot], group.ring_v[slot])
            group.head = (group.head + 1) % group.window
            group.far += 1
        group.ring_k[slot] = key
        group.ring_v[slot] = value

    def _evict(self, head: Head, key: Array, value: Array) -> None:
        for b in range(len(head.q_landmarks)):
            logit = self.scale * (head.q_landmarks[b] @ key)
            top = max(head.far_max[b], logit)
            carry = np.exp(head.far_max[b] - top)
            weight = np.exp(logit - top)
            head.far_max[b] = top
            head.far_mass[b] = head.far_mass[b] * carry + weight
            head.far_num[b] = head.far_num[b] * carry + weight * value

    def _read(self, group: Group, head: Head, query: Array) -> Array:
        """Section 4: softmax over the near keys, plus what the landmarks say of the far ones."""
        filled = (group.head + np.arange(group.length)) % group.window
        near_k = np.concatenate((group.sink_k, group.ring_k[filled]))
        near_v = np.concatenate((group.sink_v, group.ring_v[filled]))
        near = self.scale * (near_k @ query)
        shift = near.max()
        far = self._far(group, head, query)
        if far is not None:
            far_shift, signed = far
            # D and N at the scale exp(far_shift), where signed weights are at most 1 in size. D = 0
            # happens only when everything cancels or nothing is there: then nothing is added.
            mass = signed @ head.far_mass
            if mass > 0:
                shift = max(shift, far_shift)
                weights = np.exp(near - shift)
                factor = np.exp(far_shift - shift)
                numerator = weights @ near_v + factor * (signed @ head.far_num)
                return self._divide(numerator, weights.sum() + factor * mass)
        weights = np.exp(near - shift)
        return self._divide(weights @ near_v, weights.sum())

    def _far(self, group: Group, head: Head, query: Array) -> tuple[Any, Array] | None:
        """The landmark weights `u_b exp(far_max_b)` as `(scale, signed weights relative to it)`.

        `None` when nothing is far or no landmark contributes.
        """
        if group.far == 0 or len(group.k_landmarks) == 0:
            return None
        logits = self.scale * (group.k_landmarks @ query)
        # u_b = Σ_a exp(logit_a) mix[a,b], each landmark at a scale of its own: the largest of its
        # terms. A landmark key that hardly counts, or not at all, then cannot drown the others.
        with np.errstate(divide="ignore"):
            terms = logits[:, None] + np.log(np.abs(head.mix))
        scale = terms.max(axis=0)
        some = np.isfinite(scale)
        u = np.zeros(len(scale), self.dtype)
        u[some] = (np.sign(head.mix[:, some]) * np.exp(terms[:, some] - scale[some])).sum(axis=0)
        if self.geometry.rectifier == "fm":
            u = np.maximum(u, 0)
        used = u != 0
        if not used.any():
            return None
        scale[used] += head.far_max[used] + np.log(np.abs(u[used]))
        top = scale[used].max()
        signed = np.zeros(len(scale), self.dtype)
        signed[used] = np.sign(u[used]) * np.exp(scale[used] - top)
        return top, signed

    def _divide(self, numerator: Array, denominator: Any) -> Array:
        result: Array = numerator / max(denominator, self.dtype.type(1e-30))
        return result

    def _exact_row(self, q: Array, k: Array, v: Array) -> Array:
        """Section 7: plain causal softmax over all rows, until there are enough to seal."""
        assert self.history is not None
        history = tuple(
            np.concatenate((past, row[None]))
            for past, row in zip(self.history, (q, k, v), strict=True)
        )
        self.history = (history[0], history[1], history[2])
        _, keys, values = self.history
        g = self.geometry
        out = np.empty((g.heads, g.value_dim), self.dtype)
        for row in range(g.heads):
            n = row // g.heads_per_group
            logits = self.scale * (keys[:, n] @ q[row])
            weights = np.exp(logits - logits.max())
            out[row] = (weights @ values[:, n]) / weights.sum()
        if len(keys) == self.config.seal_rows:
            self._seal(*self.history)
        return out

    def _seal(self, q: Array, k: Array, v: Array) -> None:
        """Section 2, with all keys after the sinks pushed one by one."""
        g = self.config.geometry_like(self.geometry, rows=len(k), batch=self.batch)
        self.geometry = g
        self.history = None
        t, m, sinks = len(k), g.landmarks, g.sinks
        segments = [slice(i * t // m, (i + 1) * t // m) for i in range(m)]

        def means(rows: Array) -> Array:
            wide = rows.astype(np.float64)
            return np.array([wide[s].mean(axis=0) for s in segments]).reshape(m, rows.shape[1])

        for n, window in enumerate(g.windows):
            k_means = means(k[:, n])
            heads = []
            for h in range(g.heads_per_group):
                q_means = means(q[:, n * g.heads_per_group + h])
                heads.append(
                    Head(
                        q_landmarks=self._rounded(q_means),
                        mix=self._rounded(self._mix(q_means, k_means)),
                        far_max=np.full(m, -np.inf, self.dtype),
                        far_mass=np.zeros(m, self.dtype),
                        far_num=np.zeros((m, g.value_dim), self.dtype),
                    )
                )
            group = Group(
                window=window,
                sink_k=k[:sinks, n],
                sink_v=v[:sinks, n],
                ring_k=np.zeros((window, g.head_dim), self.dtype),
                ring_v=np.zeros((window, g.value_dim), self.dtype),
                k_landmarks=self._rounded(k_means),
                heads=heads,
            )
            for i in range(sinks, t):
                self._push(group, k[i, n], v[i, n])
            self.groups.append(group)

    def _mix(self, q_means: Array, k_means: Array) -> Array:
        """`(AᵀA + λI)⁻¹ Aᵀ`, worked relative to the largest entry of A."""
        if len(q_means) == 0:
            return np.zeros((0, 0))
        logits = self.geometry.scale * (q_means @ k_means.T)
        top = logits.max()
        a = np.exp(logits - top)
        gram = a.T @ a
        ridge = self.config.ridge * np.trace(gram) / len(a)
        mix: Array = np.linalg.solve(gram + ridge * np.eye(len(a)), a.T) * np.exp(-top)
        return mix

    def _rounded(self, x: Array) -> Array:
        # Results of sealing are float32 whatever the dtype that extends (section 2).
        return x.astype(np.float32).astype(self.dtype)


def seal(
    q: Array, k: Array, v: Array, config: Config, dtype: npt.DTypeLike = np.float64
) -> SerialLayer:
    """A serial layer from the rows of a prompt (section 2); shapes as `SerialLayer.extend`."""
    rows = [np.asarray(x).astype(dtype) for x in (q, k, v)]
    geometry = config.geometry(
        groups=k.shape[1],
        heads_per_group=q.shape[1] // k.shape[1],
        head_dim=k.shape[2],
        value_dim=v.shape[2],
        rows=len(k),
    )
    layer = SerialLayer(config, geometry, dtype)
    with np.errstate(under="ignore"):
        if len(k) < config.seal_rows:
            layer.history = (rows[0], rows[1], rows[2])
        else:
            layer._seal(*rows)
    return layer


def load(state: LayerState, dtype: npt.DTypeLike = np.float64) -> SerialLayer:
    """A serial layer that goes on from a state; sequences of a batch are further groups."""
    g = state.geometry
    layer = SerialLayer(state.config, g, dtype)
    layer.batch = state.batch or 1
    arrays = {
        name: array if name == "meta" else array.astype(dtype)
        for name, array in state.arrays.items()
    }
    if state.exact_only:
        rows = state.rows_seen
        layer.history = (
            arrays["prompt_q"],
            arrays["ring_k"][:, :rows].swapaxes(0, 1),
            arrays["ring_v"][:, :rows].swapaxes(0, 1),
        )
        return layer
    # Without landmarks a head still is a head: its arrays are empty.
    empty = {
        "k_landmarks": np.zeros((g.groups, 0, g.head_dim), dtype),
        "q_landmarks": np.zeros((g.groups, g.heads_per_group, 0, g.head_dim), dtype),
        "mix": np.zeros((g.groups, g.heads_per_group, 0, 0), dtype),
        "far_max": np.zeros((g.groups, g.heads_per_group, 0), dtype),
        "far_mass": np.zeros((g.groups, g.heads_per_group, 0), dtype),
        "far_num": np.zeros((g.groups, g.heads_per_group, 0, g.value_dim), dtype),
    }
    arrays = {**empty, **arrays}
    for n, window in enumerate(g.windows):
        heads = [
            Head(*(arrays[f][n, h].copy() for f in Head.__dataclass_fields__))
            for h in range(g.heads_per_group)
        ]
        layer.groups.append(
            Group(
                window,
                arrays["sink_k"][n],
                arrays["sink_v"][n],
                arrays["ring_k"][n, :window].copy(),
                arrays["ring_v"][n, :window].copy(),
                arrays["k_landmarks"][n],
                heads,
                *state.groups_meta[n],
            )
        )
    return layer
