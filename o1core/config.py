"""What a layer is asked to be (`Config`) and what it then is (`Geometry`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from o1core import far
from o1core.checks import integer, real

__all__ = ["Config", "Geometry", "Rectifier"]

Rectifier = Literal["aggregate", "fm"]

MIN_SCALE, MAX_SCALE = 1e-30, 2.0**14
MAX_DIM = 2**16
MAX_ROWS = 2**31
# Two of them and a few rows more must still be a number of rows.
MAX_WINDOW = 2**29


def _rectifier(value: Any) -> Rectifier:
    if value not in get_args(Rectifier):
        raise ValueError(f"rectifier must be 'aggregate' or 'fm', got {value!r}")
    return value  # type: ignore[no-any-return]


def _windows(value: Any) -> tuple[int, ...]:
    # No sets or generators: the order says which group a window belongs to.
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise TypeError(f"windows must be a sequence of integers, one a group, got {value!r}")
    windows = tuple(integer(f"windows[{g}]", w, 1, MAX_ROWS) for g, w in enumerate(value))
    if not windows:
        raise ValueError("windows must name at least one group, got ()")
    return windows


def _landmarks(value: Any) -> int:
    landmarks = integer("landmarks", value, 0, MAX_DIM)
    if 0 < landmarks < 4:
        raise ValueError(f"landmarks must be 0 (no far field) or at least 4, got {landmarks}")
    return landmarks


def default_scale(head_dim: int) -> float:
    """`1/sqrt(head_dim)`."""
    return 1.0 / math.sqrt(integer("head_dim", head_dim, 1, MAX_DIM))


@dataclass(frozen=True)
class Config:
    """The settings of a layer, before any key is seen (docs/operator.md section 1).

    landmarks: budget of landmarks; 0 keeps sinks and window only, else at least 4.
    window: keys of the exact window, the current row included.
    sinks: first keys of the prompt that stay exact for ever.
    rectifier: "aggregate", or "fm" (each landmark weight clamped at 0).
    windows: one window a group, where groups differ; `window` then only decides when to seal.
    scale: factor on every dot product; `None` is `1/sqrt(head_dim)`.
    ridge: relative regularisation of the mixing matrix.

    Raises TypeError or ValueError naming the argument, the rule and the value.
    """

    landmarks: int = 32
    window: int = 128
    sinks: int = 4
    rectifier: Rectifier = "aggregate"
    windows: tuple[int, ...] | None = None
    scale: float | None = None
    ridge: float = 1e-6

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "landmarks", _landmarks(self.landmarks))
        put(self, "window", integer("window", self.window, 1, MAX_WINDOW))
        put(self, "sinks", integer("sinks", self.sinks, 0, MAX_WINDOW))
        put(self, "rectifier", _rectifier(self.rectifier))
        if self.windows is not None:
            put(self, "windows", _windows(self.windows))
        if self.scale is not None:
            put(self, "scale", real("scale", self.scale, MIN_SCALE, MAX_SCALE))
        put(self, "ridge", real("ridge", self.ridge, 1e-30, 1e6))

    @property
    def seal_rows(self) -> int:
        """Rows from which a layer can be sealed; a shorter one is exact-only (section 7).

        Without a far field there is nothing to build, so the sinks alone have to be there.
        """
        return self.window + self.sinks + 9 if self.landmarks else self.sinks

    def geometry(
        self,
        *,
        groups: int,
        heads_per_group: int,
        head_dim: int,
        value_dim: int,
        rows: int,
        batch: int = 1,
    ) -> Geometry:
        """The geometry of a layer whose prompt has `rows` rows; `batch` sequences become groups."""
        windows = self.windows or (self.window,) * groups
        if len(windows) != groups:
            raise ValueError(
                f"windows must name one window for each of the {groups} groups, got {len(windows)}"
            )
        sealed = rows >= self.seal_rows
        budget = self.landmarks if sealed else 0
        return Geometry(
            groups=batch * groups,
            heads_per_group=heads_per_group,
            head_dim=head_dim,
            value_dim=value_dim,
            # An exact-only layer is one whose ring holds every row up to the sealing one.
            windows=windows * batch if sealed else (max(1, self.seal_rows),) * (batch * groups),
            sinks=self.sinks if sealed else 0,
            landmarks=min(max(rows // 8, 4), budget),
            scale=default_scale(head_dim) if self.scale is None else self.scale,
            rectifier=self.rectifier,
        )

    def geometry_like(self, other: Geometry, *, rows: int, batch: int | None) -> Geometry:
        """The geometry after `rows` rows of a layer with the heads and widths of `other`."""
        sequences = batch or 1
        return self.geometry(
            groups=other.groups // sequences,
            heads_per_group=other.heads_per_group,
            head_dim=other.head_dim,
            value_dim=other.value_dim,
            rows=rows,
            batch=sequences,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `Config(**d)` gives the same configuration back."""
        return asdict(self)


@dataclass(frozen=True)
class Geometry:
    """The sizes that kernels and buffers are made for (docs/operator.md section 1).

    groups: KV groups; sequences of a batch are folded in, so this is batch x KV heads.
    heads_per_group: query heads that share a group's keys; head `g*H + h` belongs to group g.
    head_dim, value_dim: widths of keys and of values.
    windows: each group's window.
    landmarks: landmarks in use, 0 or at least 4.
    scale: factor on every dot product, rounded to float32.

    `Geometry.of` fills in what is usual. Raises TypeError or ValueError naming argument, rule and
    value.
    """

    groups: int
    heads_per_group: int
    head_dim: int
    value_dim: int
    windows: tuple[int, ...]
    sinks: int
    landmarks: int
    scale: float
    rectifier: Rectifier = "aggregate"

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "groups", integer("groups", self.groups, 1, MAX_DIM))
        put(self, "heads_per_group", integer("heads_per_group", self.heads_per_group, 1, MAX_DIM))
        put(self, "head_dim", integer("head_dim", self.head_dim, 1, MAX_DIM))
        put(self, "value_dim", integer("value_dim", self.value_dim, 1, MAX_DIM))
        windows = _windows(self.windows)
        if len(windows) != self.groups:
            raise ValueError(
                f"windows must name one window for each of the {self.groups} groups, "
                f"got {len(windows)}"
            )
        put(self, "windows", windows)
        put(self, "sinks", integer("sinks", self.sinks, 0, MAX_ROWS))
        put(self, "landmarks", _landmarks(self.landmarks))
        put(self, "scale", float(np.float32(real("scale", self.scale, MIN_SCALE, MAX_SCALE))))
        put(self, "rectifier", _rectifier(self.rectifier))

    @classmethod
    def of(
        cls,
        groups: int,
        heads_per_group: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        window: int | tuple[int, ...] = 128,
        sinks: int = 4,
        landmarks: int = 32,
        scale: float | None = None,
        rectifier: Rectifier = "aggregate",
    ) -> Geometry:
        """A geometry with the usual values; one `window` stands for all groups."""
        if not isinstance(window, (Sequence, np.ndarray)):
            window = (integer("window", window, 1, MAX_ROWS),) * integer(
                "groups", groups, 1, MAX_DIM
            )
        return cls(
            groups=groups,
            heads_per_group=heads_per_group,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
            windows=window,
            sinks=sinks,
            landmarks=landmarks,
            scale=default_scale(head_dim) if scale is None else scale,
            rectifier=rectifier,
        )

    @property
    def heads(self) -> int:
        """Query heads in all: `groups * heads_per_group`."""
        return self.groups * self.heads_per_group

    @property
    def ring(self) -> int:
        """Ring stride in memory: the widest window."""
        return max(self.windows)

    @property
    def far(self) -> far.FarField:
        """The kind of far field: which state it owns and which kernels it adds."""
        return far.NYSTROM if self.landmarks else far.NONE

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `Geometry(**d)` gives the same geometry back."""
        return {**asdict(self), "windows": list(self.windows)}
