"""Counted work of a call: what the operator needs, whichever way a backend computes it."""

from __future__ import annotations

from o1core.config import Geometry
from o1core.layout import buffers, state_buffers

__all__ = ["call_bytes", "call_flops"]


def call_flops(g: Geometry, rows: int) -> int:
    """Multiplications and additions of the products of docs/operator.md, for full windows.

    A row of a head takes `2 d (S + w + m)` for the logits of near keys and landmarks,
    `2 dv (S + w + m)` for their values and `2 m m` for the mix; the key that it evicts takes
    `2 d m` for its landmark logits and `2 dv m` for the numerators. Exponentials are not counted,
    nor what a kernel computes in vain.
    """
    d, dv, m = g.head_dim, g.value_dim, g.landmarks
    head = sum(2 * (d + dv) * (g.sinks + w + 2 * m) + 2 * m * m for w in g.windows)
    return rows * g.heads_per_group * head


def call_bytes(g: Geometry, rows: int) -> int:
    """Bytes that a call has to move at least: q, k, v and out once, the state read and written.

    The state is read once and what kernels change of it written once, of the rings no more slots
    than there are rows. An executor that takes a call in several parts moves more.
    """
    moved = sum(b.nbytes for b in buffers(g, rows) if b.role in ("input", "output"))
    for b in state_buffers(g):
        moved += b.nbytes
        if b.name in ("ring_k", "ring_v"):
            moved += b.nbytes * min(rows, g.ring) // g.ring
        elif b.role == "state":
            moved += b.nbytes
    return moved
