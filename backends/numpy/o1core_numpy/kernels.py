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
import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Geometry
from o1core.far.nystrom import absorb, weigh
from o1core_numpy.cohort import Cohort

# Far maxima that differ by less than this can share one scale in float32 (e^-30 is 1e-13), and so
# can a row's landmark logits (e^-60 is 1e-26, and their weights still get multiplied by the mix).
EVEN = 30.0
EVEN_LOGITS = 60.0
# The floor of the denominator (section 4).
FLOOR = np.float32(1e-30)
# Rows and columns of a mix whose largest entry lies within 2^-16 .. 2^16 are used as they are.
PLAIN_EXPONENT = 16
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
    logits = keys @ queries.swapaxes(1, 2)
    logits *= np.float32(call.geometry.scale)
    after, weights, carry = weigh(c.far["far_max"].reshape(groups, heads * m), logits)
    by_head, by_key = (groups, heads, m), (groups, e, heads, m)
    c.scratch = {
        "logits": logits.reshape(by_key),
        "far_max": after.reshape(by_head),
        "weights": weights.reshape(by_key),
        "carry": carry.reshape(by_head),
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
        factor = np.exp(np.minimum(far.top - near, 0)) * kept
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
    groups, _, heads, m = c.scratch["weights"].shape
    far_mass, far_num = absorb(
        c.far["far_mass"].reshape(groups, heads * m),
        c.far["far_num"].reshape(groups, heads * m, -1),
        c.scratch["weights"].reshape(groups, e, heads * m),
        c.scratch["carry"].reshape(groups, heads * m),
        c.values[:, c.start : c.start + e],
    )
    c.far = {
        **c.far,
        "far_max": c.scratch["far_max"],
        "far_mass": far_mass.reshape(groups, heads, m),
        "far_num": far_num.reshape(groups, heads, m, -1),
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
    """`mix [G,H,m,m]`, rows and columns of extreme size brought to around 1, and their logarithms.

    Powers of two, so nothing is rounded. The logarithm of a row joins the logits of its landmark
    key, `[G,H,1,m]` and -inf for a row of zeros; that of a column joins the far maximum, `[G,H,m]`.
    A landmark key that hardly counts then does not set the scale of those that do, and products
    neither overflow nor lose bits to denormals.
    """
    size = np.abs(mix)
    rows = _extreme_exponent(size.max(axis=-1))
    scaled = np.ldexp(mix, -rows[..., :, None])
    columns = _extreme_exponent(np.abs(scaled).max(axis=-2))
    scaled = np.ldexp(scaled, -columns[..., None, :])
    row_log = np.where(size.max(axis=-1) > 0, rows * LN2, -np.inf).astype(np.float32)
    column_log = (columns * LN2).astype(np.float32)
    return {"mix_scaled": scaled, "row_log": row_log[:, :, None], "column_log": column_log}


def _extreme_exponent(size: F32) -> npt.NDArray[np.int32]:
    exponent = np.frexp(size)[1]
    exponent[np.abs(exponent) <= PLAIN_EXPONENT] = 0
    return exponent


@dataclass
class _Far:
    """What the last e rows take from the far field, before it is joined with the near one.

    Everything is relative to `exp(top)`, top `[G,H,e,1]`, -inf where nothing contributes: gain
    `[G,H,e,m]`, the weights on the far sums from before the sub-chunk; in_chunk `[G,H,e,e]`, those
    on the evicted keys; mass `[G,H,e,1]`, the far denominator D.
    """

    top: F32
    gain: F32
    in_chunk: F32
    mass: F32


def _far_weights(c: Cohort, g: Geometry, logits: F32) -> _Far:
    """The far weights of the last e rows, from their logits with the landmark keys, `[G,H,e,m]`.

    Every row reads its far field relative to the maxima *at that row* (section 4): those after the
    sub-chunk may lie hundreds above, and the row would vanish. As long as all maxima of a head,
    over landmarks and over the sub-chunk, are close to each other, one scale serves them all;
    otherwise each row and landmark gets its own. The same holds for the logits of a row.
    """
    logits += c.far["row_log"]
    f = logits.max(axis=-1, keepdims=True)
    np.copyto(f, 0, where=np.isneginf(f))
    logits -= f
    columns = None
    if logits.min() >= -EVEN_LOGITS or logits[np.isfinite(logits)].min(initial=0) >= -EVEN_LOGITS:
        u = np.exp(logits, out=logits) @ c.far["mix_scaled"]
    else:
        u, columns = _mix_by_column(logits, c.far["mix_scaled"])
    if g.rectifier == "fm":
        np.maximum(u, 0, out=u)
    before, column_log = c.far["far_max"], c.far["column_log"]
    after = c.scratch["far_max"] + column_log
    shared = after.max(axis=-1, keepdims=True)
    first = np.maximum(before, c.scratch["logits"][:, 0]) + column_log
    if columns is None and (shared - first).max() <= EVEN:
        top, gain, in_chunk = _weigh_evenly(c, u, after[:, :, None], shared[..., None])
    else:
        top, gain, in_chunk = _weigh_apart(c, u, columns)
    if in_chunk.shape[-1] > 1:
        in_chunk *= _causal(in_chunk.shape[-1])
    mass = np.add.reduce(in_chunk, axis=-1, keepdims=True)
    if c.meta.far:
        mass += gain @ c.far["far_mass"][..., None]
    return _Far(top + f, gain, in_chunk, mass)


def _mix_by_column(logits: F32, mix: F32) -> tuple[F32, F32]:
    """`u = exp(logits) @ mix` as u' and logarithms, u = u' exp(log), both `[G,H,e,m]`.

    For logits so far apart that one scale a row would lose the landmarks that count for a column.
    A group at a time, to bound the memory.
    """
    u, columns = np.empty_like(logits), np.empty_like(logits)
    for i in range(len(logits)):
        terms = logits[i][..., None] + np.log(np.abs(mix[i]))[:, None]
        columns[i] = terms.max(axis=-2)
        np.copyto(columns[i], 0, where=np.isneginf(columns[i]))
        np.exp(np.subtract(terms, columns[i][..., None, :], out=terms), out=terms)
        u[i] = np.copysign(terms, mix[i][:, None]).sum(axis=-2)
    return u, columns


def _weigh_evenly(c: Cohort, u: F32, after: F32, shared: F32) -> tuple[F32, F32, F32]:
    """All weights at the scale of `shared`, the largest maximum after the sub-chunk.

    after `[G,H,1,m]`, shared `[G,H,1,1]`; u is overwritten. Returns top, gain and in_chunk of
    `_Far`, in_chunk still with weights on keys later than the row. The top is at most `EVEN` above
    the row's own.
    """
    # The sum of sizes is as good a unit as the largest, and a product is faster than a maximum.
    unit = np.abs(u) @ _ones(u.shape[-1])
    gain = u
    gain *= np.exp(after - shared)
    gain /= np.where(unit > 0, unit, 1)
    in_chunk = gain @ c.scratch["weights"].transpose(0, 2, 3, 1)
    gain *= c.scratch["carry"][:, :, None]
    return np.log(unit) + shared, gain, in_chunk


def _weigh_apart(c: Cohort, u: F32, columns: F32 | None) -> tuple[F32, F32, F32]:
    """Each row and landmark at its own scale, with exponentials of their own on every evicted key.

    Returns the same. columns are the logarithms that belong to u, if any. e times the work of the
    common case, done a group at a time to bound the memory.
    """
    logits = c.scratch["logits"]
    running = np.concatenate((c.far["far_max"][:, None], logits), axis=1)
    running = np.maximum.accumulate(running, axis=1)[:, 1:].swapaxes(1, 2)
    # Landmark b has the scale f + far_max_b + log|u_b|: one that contributes nothing has none. What
    # the landmarks of a row share is left to the end, since every addition rounds.
    level = running + c.far["column_log"][:, :, None]
    if columns is not None:
        level += columns
    log_u = np.log(np.abs(u))
    best = (level + log_u).argmax(axis=-1, keepdims=True)
    base = np.take_along_axis(level, best, axis=-1)
    top = np.take_along_axis(log_u, best, axis=-1)
    scale = level - base
    scale += log_u
    scale -= np.where(np.isneginf(top), 0, top)
    gain = np.copysign(np.exp(np.minimum(scale, 0, out=scale), out=scale), u, out=scale)
    in_chunk = np.empty((*gain.shape[:3], gain.shape[2]), np.float32)
    for i in range(len(gain)):
        apart = logits[i].transpose(1, 2, 0)[:, None] - running[i][..., None]
        # Keys later than the row may exceed its maximum; `_causal` cuts them off.
        np.exp(np.minimum(apart, 0, out=apart), out=apart)
        in_chunk[i] = (gain[i][:, :, None] @ apart)[:, :, 0]
    gain *= np.exp(c.far["far_max"][:, :, None] - running)
    return top + base, gain, in_chunk


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
