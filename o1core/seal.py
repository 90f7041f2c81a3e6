"""Sealing: from the rows of a prompt to the state of a layer (docs/operator.md section 2)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Config, Geometry
from o1core.layout import GroupMeta
from o1core.state import LayerState

__all__ = ["seal"]


def seal(
    q: F32, k: F32, v: F32, config: Config, geometry: Geometry, batch: int | None
) -> LayerState:
    """The state after a prompt of float32 rows, sequences already folded into the groups.

    q `[rows, G*H, d]`, k `[rows, G, d]`, v `[rows, G, dv]`; geometry is
    `config.geometry(rows=len(q), ...)`. A prompt too short to seal gives an exact-only state.
    """
    exact_only = len(q) < config.seal_rows
    sinks = geometry.sinks
    pushed = len(k) - sinks
    meta = [GroupMeta(0, 0, 0).after(pushed, w) for w in geometry.windows]
    arrays: dict[str, npt.NDArray[Any]] = {
        "meta": np.array(meta, np.uint32),
        "ring_k": _ring(k[sinks:], geometry, meta),
        "ring_v": _ring(v[sinks:], geometry, meta),
        "sink_k": k[:sinks].transpose(1, 0, 2),
        "sink_v": v[:sinks].transpose(1, 0, 2),
    }
    evicted = tuple(group.far for group in meta)
    arrays.update(geometry.far.seal(q, k, v, geometry, evicted, config.ridge))
    if exact_only:
        arrays["prompt_q"] = q
    return LayerState(config, geometry, arrays, batch, exact_only)


def _ring(rows: F32, geometry: Geometry, meta: list[GroupMeta]) -> F32:
    """Each group's last rows in their slots: the p-th pushed row lies in slot `p % window`."""
    ring = np.zeros((geometry.groups, geometry.ring, rows.shape[-1]), np.float32)
    for i, (group, window) in enumerate(zip(meta, geometry.windows, strict=True)):
        kept = np.arange(group.far, group.far + group.length)
        ring[i, kept % window] = rows[kept, i]
    return ring
