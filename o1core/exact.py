"""Exact causal attention with numpy: what the O(1) operator is measured against.

It keeps every key, so a row costs as much as there are rows before it. Reports and benchmarks use
it as the truth and as the rival; no backend does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["causal_attention"]

Array = npt.NDArray[np.floating[Any]]

BLOCK_LOGITS = 2**19
"""Logits held at once: a few MB stay in cache, and the products are still large for BLAS."""


def causal_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    first_row: int = 0,
    dtype: npt.DTypeLike = np.float32,
) -> Array:
    """Softmax attention of rows `first_row..rows-1` over all keys up to the row itself.

    q `[rows, heads, d]`, k `[rows, groups, d]`, v `[rows, groups, dv]`, heads a multiple of groups;
    head `g*H + h` reads group g, H = heads / groups. scale multiplies every dot product. Returns
    `[rows - first_row, heads, dv]` in dtype, in which everything is computed; arrays that already
    have it are not copied. The logits of only a block of rows exist at a time.

    Raises ValueError when the shapes do not fit or first_row is outside `0..rows`.
    """
    _check(q, k, v, first_row)
    q, k, v = (np.asarray(x, dtype) for x in (q, k, v))
    rows, heads, _ = q.shape
    per_group = heads // k.shape[1]
    out = np.empty((rows - first_row, heads, v.shape[2]), q.dtype)
    block = min(256, max(16, BLOCK_LOGITS // (per_group * max(1, rows))))
    for group in range(k.shape[1]):
        mine = slice(group * per_group, (group + 1) * per_group)
        keys, values = k[:, group], v[:, group]
        for first in range(first_row, rows, block):
            last = min(first + block, rows)
            asked = q[first:last, mine] * q.dtype.type(scale)
            out[first - first_row : last - first_row, mine] = _block(
                asked, keys[:last], values[:last]
            )
    return out


def _block(q: Array, keys: Array, values: Array) -> Array:
    """The last rows of a sequence: q `[n, H, d]` scaled, keys `[rows, d]`, values `[rows, dv]`."""
    n, heads, dim = q.shape
    rows = len(keys)
    logits = (q.reshape(n * heads, dim) @ keys.T).reshape(n, heads, rows)
    # Only the last n columns hold keys that some row of the block must not see.
    later = np.triu(np.ones((n, n), bool), 1)
    np.copyto(logits[:, :, rows - n :], -np.inf, where=later[:, None, :])
    logits -= logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits, out=logits)
    total = weights.sum(axis=-1, keepdims=True)
    summed: Array = (weights.reshape(n * heads, rows) @ values).reshape(n, heads, -1)
    summed /= total
    return summed


def _check(q: Array, k: Array, v: Array, first_row: int) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 3:
            raise ValueError(f"{name} must have 3 axes, got shape {array.shape}")
    rows, heads, dim = q.shape
    groups = k.shape[1]
    if k.shape != (rows, groups, dim):
        raise ValueError(f"k must have shape [{rows}, groups, {dim}] like q, got {k.shape}")
    if v.shape[:2] != (rows, groups):
        raise ValueError(f"v must have shape [{rows}, {groups}, dv] like k, got {v.shape}")
    if groups == 0 or heads % groups:
        raise ValueError(
            f"q must have a multiple of the {groups} groups of k as heads, got {heads}"
        )
    if not 0 <= first_row <= rows:
        raise ValueError(f"first_row must be between 0 and {rows}, got {first_row}")
