"""How the numpy backend keeps a layer: groups in step, their rings as windows on linear memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.layout import GroupMeta
from o1core.plan import MAX_SUB_CHUNK

Groups = slice | npt.NDArray[np.intp]
"""Which groups of the layer: all of them (a slice, which gives views) or some (an index array)."""


@dataclass(eq=False)
class Cohort:
    """Groups whose windows and meta are equal, and therefore stay equal: one batch of products.

    `keys [G, room, d]` and `values [G, room, dv]` hold, from `start`, the live keys in the order of
    their age; the sinks stand right before them and the sub-chunk being computed right behind, so
    that near attention is one contiguous product. Evicting keys is moving `start`.

    far holds the arrays of the far field by the names of `LayerState`. They are replaced, never
    written in place: checkpoints and copies share them.
    """

    groups: Groups
    window: int
    meta: GroupMeta
    sink_k: F32
    sink_v: F32
    far: dict[str, F32]
    keys: F32
    values: F32
    start: int
    sinks_before: int = -1
    """The `start` that the sinks stand before, -1 for none."""
    scratch: dict[str, F32] = field(default_factory=dict)

    @property
    def sinks(self) -> int:
        count: int = self.sink_k.shape[1]
        return count

    @property
    def live(self) -> slice:
        """Where the live keys lie, oldest first."""
        return slice(self.start, self.start + self.meta.length)

    def evicted(self, rows: int) -> int:
        """Keys that a sub-chunk of `rows` rows evicts."""
        return max(0, self.meta.length + rows - self.window)

    def stage(self, k: F32, v: F32) -> slice:
        """Lay rows `[G, rows, dim]` behind the live keys; where sinks, live and rows now lie."""
        rows = k.shape[1]
        if self.live.stop + rows > self.keys.shape[1]:
            self._move_to_front()
        if self.sinks_before != self.start:
            before = slice(self.start - self.sinks, self.start)
            self.keys[:, before] = self.sink_k
            self.values[:, before] = self.sink_v
            self.sinks_before = self.start
        end = self.live.stop
        self.keys[:, end : end + rows] = k
        self.values[:, end : end + rows] = v
        return slice(self.start - self.sinks, end + rows)

    def _move_to_front(self) -> None:
        # `room` is so large that the old place is not touched, by this or by the rows staged next:
        # a checkpoint of a single sub-chunk still finds its keys there.
        old, self.start = self.live, self.sinks
        self.keys[:, self.live] = self.keys[:, old]
        self.values[:, self.live] = self.values[:, old]


def room(window: int, sinks: int) -> int:
    """Rows of linear memory for a ring of `window` keys.

    Twice the ring and a sub-chunk: when the live keys reach the end, the front half is free for
    them and the next rows, and moving them costs a copy only every `window + 64` rows.
    """
    return sinks + 2 * (window + MAX_SUB_CHUNK)
