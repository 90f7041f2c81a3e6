"""The five kernels on BLAS: a whole sub-chunk of a whole cohort at once.

Axes: G groups of the cohort, H heads a group, r rows of the sub-chunk, e keys that they evict (row
`r - e + x` evicts key x, so only the last e rows have a far field that grows), m landmarks. Section
numbers are those of docs/operator.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from o1core.checks import F32
from o1core.config import Geometry
from o1core_numpy.cohort import Cohort

# Far maxima that differ by less than this can share one scale in float32 (e^-30 is 1e-13).
EVEN = 30.0
# The floor of the denominator (section 4).
FLOOR = np.float32(1e-30)
# A mix whose largest entry lies within 2^-32 .. 2^32 is used as it is.
PLAIN_EXPONENT = 32
LN2 = np.float32(np.log(2.0))


@dataclass
class Call:
    """The rows of one sub-chunk for one cohort, and where their output goes.

    q `[r,G,H,d]`, k `[r,G,d]`, v `[r,G,dv]`; out `[r,groups of the layer,H,dv]`.
    """

    geometry: Geometry
    q: F32
    k: F32
    v: F32
    out: F32

    @property
    def rows(self) -> int:
        return len(self.q)


def far_e(c: Cohort, call: Call) -> None:
    """Landmark logits of the evicted keys, `[G,e,H,m]`, and their weights at the new maxima."""
    e = c.evicted(call.rows)
    if e == 0:
        return
    groups, heads, m, d = c.far["q_landmarks"].shape
    queries = c.far["q_landmarks"].reshape(groups, heads * m, d)
    keys = c.keys[:, c.start : c.start + e]
    logits = (keys @ queries.swapaxes(1, 2)).reshape(groups, e, heads, m)
    logits *= np.float32(call.geometry.scale)
    before = c.far["far_max"]
    after = np.maximum(before, logits.max(axis=1))
    c.scratch = {
        "logits": logits,
        "far_max": after,
        "weights": np.exp(logits - after[:, None]),
        "carry": np.exp(before - after),
    }


def attend(c: Cohort, call: Call) -> None:
    """Near and far attention of every row (section 4)."""
    rows, groups, heads, d = call.q.shape
    where = c.stage(call.k.swapaxes(0, 1), call.v.swapaxes(0, 1))
    queries = np.empty((groups, heads, rows, d), np.float32)
    np.multiply(call.q.transpose(1, 2, 0, 3), np.float32(call.geometry.scale), out=queries)
    flat = queries.reshape(groups, heads * rows, d)
    scores = (flat @ c.keys[:, where].swapaxes(1, 2)).reshape(groups, heads, rows, -1)
    e, sinks = c.evicted(rows), c.sinks
    scores += _bars(sinks, c.meta.length, rows, e)
    shift = scores.max(axis=-1, keepdims=True)

    far_rows, evicted = slice(rows - e, rows), slice(sinks, sinks + e)
    far = None
    if e and c.far:
        landmarks = flat @ c.far["k_landmarks"].swapaxes(1, 2)
        landmarks = landmarks.reshape(groups, heads, rows, -1)[:, :, far_rows]
        far = _far_weights(c, call.geometry, landmarks)
        # A far field of negative mass is dropped; its row then keeps the shift of the near keys.
        kept = far.mass > 0
        near = shift[:, :, far_rows]
        np.copyto(near, far.top, where=kept & (far.top > near))
        factor = np.zeros(far.mass.shape, np.float32)
        np.divide(np.exp(np.minimum(far.top - near, 0)), far.unit, out=factor, where=kept)
    weights = np.exp(np.subtract(scores, shift, out=scores), out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    if far is not None:
        total[:, :, far_rows] += far.mass * factor
    np.maximum(total, FLOOR, out=total)
    weights *= np.reciprocal(total, out=total)
    if far is not None:
        factor *= total[:, :, far_rows]
        far.gain *= factor
        far.in_chunk *= factor
        # A row's weight on a key is near while the key is live and far once it is gone: the two
        # never meet, so one matrix holds both and one product serves both.
        weights[:, :, far_rows, evicted] += far.in_chunk
    result = weights.reshape(groups, heads * rows, -1) @ c.values[:, where]
    result = result.reshape(groups, heads, rows, -1)
    if far is not None and c.meta.far:
        result[:, :, far_rows] += far.gain @ c.far["far_num"]
    call.out[:, c.groups] = result.transpose(2, 0, 1, 3)


def far_commit(c: Cohort, call: Call) -> None:
    """Add the evicted keys to the far sums (section 3)."""
    e = c.evicted(call.rows)
    if e == 0:
        return
    weights, carry = c.scratch["weights"], c.scratch["carry"]
    groups, _, heads, m = weights.shape
    values = c.values[:, c.start : c.start + e]
    by_key = weights.reshape(groups, e, heads * m).swapaxes(1, 2)
    # With nothing to sum up, BLAS takes three times as long as numpy.
    added = by_key * values if e == 1 else by_key @ values
    far_num = added.reshape(c.far["far_num"].shape)
    far_num += c.far["far_num"] if (carry == 1).all() else c.far["far_num"] * carry[..., None]
    c.far = {
        **c.far,
        "far_max": c.scratch["far_max"],
        "far_mass": c.far["far_mass"] * carry + weights.sum(axis=1),
        "far_num": far_num,
    }


def ring_commit(c: Cohort, call: Call) -> None:
    """The staged rows join the ring, the evicted keys leave it."""
    c.start += c.evicted(call.rows)


def meta(c: Cohort, call: Call) -> None:
    """Length, head and far count after the sub-chunk."""
    c.meta = c.meta.after(call.rows, c.window)


Kernel = Callable[[Cohort, Call], None]

KERNELS: dict[str, Kernel] = {
    "far_e": far_e,
    "attend": attend,
    "far_commit": far_commit,
    "ring_commit": ring_commit,
    "meta": meta,
}


def scaled_mix(mix: F32) -> dict[str, F32]:
    """`mix` brought to around 1, where it is extreme, and the logarithm of what was taken out.

    A power of two a head, so nothing is rounded; products then neither overflow nor lose bits to
    denormals, and the logarithm joins the row's shift.
    """
    exponent = np.frexp(np.abs(mix).max(axis=(-2, -1), keepdims=True))[1]
    exponent[np.abs(exponent) <= PLAIN_EXPONENT] = 0
    log = exponent * LN2
    return {"mix_scaled": np.ldexp(mix, -exponent) if exponent.any() else mix, "mix_log": log}


@dataclass
class _Far:
    """What the last e rows take from the far field, before it is joined with the near one.

    The weights are relative to `exp(top) / unit`, both `[G,H,e,1]`: gain `[G,H,e,m]` on the far
    sums from before the sub-chunk, in_chunk `[G,H,e,e]` on the evicted keys. mass `[G,H,e,1]` is
    their sum, the far denominator D. top is -inf where nothing contributes.
    """

    top: F32
    unit: F32 | np.float32
    mass: F32
    gain: F32
    in_chunk: F32


def _far_weights(c: Cohort, g: Geometry, logits: F32) -> _Far:
    """The far weights of the last e rows, from their logits with the landmark keys, `[G,H,e,m]`.

    Every row reads its far field relative to the maxima *at that row* (section 4): those after the
    sub-chunk may lie hundreds above, and the row would vanish. As long as all maxima of a head,
    over landmarks and over the sub-chunk, are close to each other, one scale serves them all;
    otherwise each row and landmark gets its own.
    """
    f = logits.max(axis=-1, keepdims=True)
    u = np.exp(logits - f) @ c.far["mix_scaled"]
    if g.rectifier == "fm":
        np.maximum(u, 0, out=u)
    after = c.scratch["far_max"]
    shared = after.max(axis=-1, keepdims=True)
    first = np.maximum(c.far["far_max"], c.scratch["logits"][:, 0])
    weigh = _weigh_evenly if (shared - first).max() <= EVEN else _weigh_apart
    far = weigh(c, u, shared[..., None])
    far.top += shared[..., None] + (f + c.far["mix_log"])
    if far.in_chunk.shape[-1] > 1:
        far.in_chunk *= _causal(far.in_chunk.shape[-1])
    np.add.reduce(far.in_chunk, axis=-1, keepdims=True, out=far.mass)
    if c.meta.far:
        far.mass += far.gain @ c.far["far_mass"][..., None]
    return far


def _weigh_evenly(c: Cohort, u: F32, shared: F32) -> _Far:
    """All weights at the scale of `shared`, the largest maximum after the sub-chunk."""
    gain = u
    gain *= np.exp(c.scratch["far_max"][:, :, None] - shared)
    # The sum of sizes is as good a unit as the largest, and a product is faster than a maximum.
    unit = np.abs(gain) @ _ones(gain.shape[-1])
    in_chunk = gain @ c.scratch["weights"].transpose(0, 2, 3, 1)
    gain *= c.scratch["carry"][:, :, None]
    return _Far(np.log(unit), unit, np.empty_like(unit), gain, in_chunk)


def _weigh_apart(c: Cohort, u: F32, shared: F32) -> _Far:
    """Each row and landmark at its own scale, with exponentials of their own on every evicted key.

    e times the work of the common case, done a group at a time to bound the memory.
    """
    logits = c.scratch["logits"]
    running = np.concatenate((c.far["far_max"][:, None], logits), axis=1)
    running = np.maximum.accumulate(running, axis=1)[:, 1:].swapaxes(1, 2)
    # Landmark b has the scale f + far_max_b + log|u_b|: one that contributes nothing has none. What
    # the landmarks share, f and `shared`, is left to the end, since every addition rounds.
    scale = np.log(np.abs(u))
    scale += running - shared
    top = scale.max(axis=-1, keepdims=True)
    scale -= np.where(np.isneginf(top), 0, top)
    gain = np.copysign(np.exp(scale, out=scale), u, out=scale)
    in_chunk = np.empty((*gain.shape[:3], gain.shape[2]), np.float32)
    for i in range(len(gain)):
        apart = logits[i].transpose(1, 2, 0)[:, None] - running[i][..., None]
        # Keys later than the row may exceed its maximum; `_causal` cuts them off.
        np.exp(np.minimum(apart, 0, out=apart), out=apart)
        in_chunk[i] = (gain[i][:, :, None] @ apart)[:, :, 0]
    gain *= np.exp(c.far["far_max"][:, :, None] - running)
    return _Far(top, np.float32(1), np.empty_like(top), gain, in_chunk)


@lru_cache(maxsize=8)
def _bars(sinks: int, length: int, rows: int, e: int) -> F32:
    """-inf where a row may not look: at keys it has evicted, and at rows of the chunk to come.

    `[rows, sinks + length + rows]`, for sinks, ring and chunk side by side.
    """
    i = np.arange(rows)[:, None]
    bars = np.zeros((rows, sinks + length + rows), np.float32)
    bars[:, sinks : sinks + e][np.arange(e) <= i - (rows - e)] = -np.inf
    bars[:, sinks + length :][np.arange(rows) > i] = -np.inf
    return bars


@lru_cache(maxsize=8)
def _ones(count: int) -> F32:
    return np.ones((count, 1), np.float32)


@lru_cache(maxsize=64)
def _causal(e: int) -> F32:
    return np.tri(e, dtype=np.float32)
