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

# exp(running - last) is divided by only above this; it is e^-30.
SMALLEST_RESCALE = 1e-13
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
    """Landmark logits of the evicted keys, `[G,e,H,m]`, and their running maxima."""
    e = c.evicted(call.rows)
    if e == 0:
        return
    groups, heads, m, d = c.far["q_landmarks"].shape
    queries = c.far["q_landmarks"].reshape(groups, heads * m, d)
    keys = c.keys[:, c.start : c.start + e]
    logits = (keys @ queries.swapaxes(1, 2)).reshape(groups, e, heads, m)
    logits *= np.float32(call.geometry.scale)
    running = logits.copy()
    np.maximum(running[:, 0], c.far["far_max"], out=running[:, 0])
    np.maximum.accumulate(running, axis=1, out=running)
    last = running[:, -1]
    c.scratch = {
        "logits": logits,
        "running": running,
        "last": last,
        "weights": np.exp(logits - last[:, None]),
        "carry": np.exp(c.far["far_max"] - last),
    }


def attend(c: Cohort, call: Call) -> None:
    """Near and far attention of every row (section 4)."""
    rows, groups, heads, d = call.q.shape
    where = c.stage(call.k.swapaxes(0, 1), call.v.swapaxes(0, 1))
    queries = np.empty((groups, heads, rows, d), np.float32)
    np.multiply(call.q.transpose(1, 2, 0, 3), np.float32(call.geometry.scale), out=queries)
    scores = queries.reshape(groups, heads * rows, d) @ c.keys[:, where].swapaxes(1, 2)
    scores = scores.reshape(groups, heads, rows, -1)
    e, sinks = c.evicted(rows), c.sinks
    gone, ahead = _bars(rows, e)
    scores[..., sinks : sinks + e] += gone
    scores[..., sinks + c.meta.length :] += ahead
    shift = scores.max(axis=-1, keepdims=True)

    far_rows, evicted = slice(rows - e, rows), slice(sinks, sinks + e)
    has_far = bool(e and c.far)
    if has_far:
        top, mass, gain, in_chunk = _far_weights(c, call.geometry, queries[:, :, far_rows])
        # A far field of negative mass is dropped; a row then keeps the shift of its near keys.
        keep = mass > 0
        np.copyto(shift[:, :, far_rows], top, where=keep & (top > shift[:, :, far_rows]))
        factor = np.exp(np.minimum(top - shift[:, :, far_rows], 0)) * keep
        gain *= factor
        in_chunk *= factor
    weights = np.exp(np.subtract(scores, shift, out=scores), out=scores)
    if has_far:
        # A row's weight on a key is near while the key is live and far once it is gone: the two
        # never meet, so one matrix holds both and one product serves both.
        weights[:, :, far_rows, evicted] += in_chunk
    total = weights.sum(axis=-1, keepdims=True)
    result = weights.reshape(groups, heads * rows, -1) @ c.values[:, where]
    result = result.reshape(groups, heads, rows, -1)
    if has_far and c.meta.far:
        total[:, :, far_rows] += gain @ c.far["far_mass"][..., None]
        result[:, :, far_rows] += gain @ c.far["far_num"]
    result /= np.maximum(total, FLOOR)
    call.out[:, c.groups] = result.transpose(2, 0, 1, 3)


def far_commit(c: Cohort, call: Call) -> None:
    """Add the evicted keys to the far sums (section 3)."""
    e = c.evicted(call.rows)
    if e == 0:
        return
    weights, carry = c.scratch["weights"], c.scratch["carry"]
    groups, _, heads, m = weights.shape
    values = c.values[:, c.start : c.start + e]
    added = weights.reshape(groups, e, heads * m).swapaxes(1, 2) @ values
    far_num = c.far["far_num"] * carry[..., None]
    far_num += added.reshape(far_num.shape)
    c.far = {
        **c.far,
        "far_max": c.scratch["last"].copy(),
        "far_mass": c.far["far_mass"] * carry + weights.sum(axis=1),
        "far_num": far_num,
    }


def ring_commit(c: Cohort, call: Call) -> None:
    """The staged rows join the ring, the evicted keys leave it."""
    c.start += c.evicted(call.rows)


def meta(c: Cohort, call: Call) -> None:
    """Length, head and far count after the sub-chunk."""
    c.meta = c.meta.after(call.rows, c.window)


KERNELS: dict[str, Callable[[Cohort, Call], None]] = {
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


def _far_weights(c: Cohort, g: Geometry, queries: F32) -> tuple[F32, F32, F32, F32]:
    """What the last e rows take from the far field, relative to each row's own far scale.

    queries `[G,H,e,d]`. Returns that scale `[G,H,e,1]` (-inf where nothing contributes); the far
    denominator D `[G,H,e,1]`; the weights on the far sums from before the sub-chunk `[G,H,e,m]`;
    the weights on the evicted keys `[G,H,e,e]`.

    Every row reads its far field relative to the maxima *at that row*: those after the sub-chunk
    may lie hundreds above, and the row would vanish.
    """
    logits = queries @ c.far["k_landmarks"][:, None].swapaxes(-1, -2)
    f = logits.max(axis=-1, keepdims=True)
    u = np.exp(np.subtract(logits, f, out=logits), out=logits) @ c.far["mix_scaled"]
    if g.rectifier == "fm":
        np.maximum(u, 0, out=u)
    running = c.scratch["running"].swapaxes(1, 2)
    last = c.scratch["last"][:, :, None]
    # Landmark b has the scale f + far_max_b + log|u_b|: one that contributes nothing has none. What
    # all landmarks share is left out until the end, since every addition rounds.
    shared = last.max(axis=-1, keepdims=True)
    scale = np.log(np.abs(u))
    scale += running - shared
    top = scale.max(axis=-1, keepdims=True)
    scale -= np.where(np.isneginf(top), 0, top)
    gain = np.copysign(np.exp(scale, out=scale), u, out=scale)
    top += shared
    top += f + c.far["mix_log"]
    rescale = np.exp(running - last)
    if rescale.min() >= SMALLEST_RESCALE:
        gain /= rescale
        in_chunk = gain @ c.scratch["weights"].transpose(0, 2, 3, 1)
        gain *= c.scratch["carry"][:, :, None]
    else:
        in_chunk = _in_chunk_by_row(gain, running, c.scratch["logits"].transpose(0, 2, 3, 1))
        gain *= np.exp(c.far["far_max"][:, :, None] - running)
    in_chunk *= _causal(in_chunk.shape[-1])
    mass = in_chunk.sum(axis=-1, keepdims=True)
    mass += gain @ c.far["far_mass"][..., None]
    return top, mass, gain, in_chunk


def _in_chunk_by_row(gain: F32, running: F32, logits: F32) -> F32:
    """Weights on the evicted keys when a maximum jumps inside the sub-chunk.

    gain, running `[G,H,e,m]`, logits `[G,H,m,e]`. Each row gets exponentials of its own, e times
    the work of the common case, a group at a time to bound the memory.
    """
    in_chunk = np.empty((*gain.shape[:3], logits.shape[-1]), np.float32)
    for i in range(len(gain)):
        apart = logits[i][:, None] - running[i][..., None]
        # Keys later than the row may exceed its maximum; `_causal` cuts them off.
        np.exp(np.minimum(apart, 0, out=apart), out=apart)
        in_chunk[i] = (gain[i][:, :, None] @ apart)[:, :, 0]
    return in_chunk


@lru_cache(maxsize=64)
def _bars(rows: int, e: int) -> tuple[F32, F32]:
    """-inf where a row may not look: at keys already evicted, and at rows of the chunk to come."""
    i = np.arange(rows)[:, None]
    gone = np.where(np.arange(e) <= i - (rows - e), -np.inf, 0).astype(np.float32)
    ahead = np.where(np.arange(rows) > i, -np.inf, 0).astype(np.float32)
    return gone, ahead


@lru_cache(maxsize=64)
def _causal(e: int) -> F32:
    return np.tri(e, dtype=np.float32)
