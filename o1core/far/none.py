"""No far field: keys that leave the window are counted and forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from o1core.far.base import Arrays, FarField
from o1core.layout import Buffer, Meta

if TYPE_CHECKING:
    from o1core.config import Geometry


class NoFarField(FarField):
    """Sinks and window alone."""

    name = "none"

    def arrays(self, g: Geometry) -> dict[str, tuple[int, ...]]:
        return {}

    def buffers(self, g: Geometry) -> tuple[Buffer, ...]:
        return ()

    def pack(self, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
        return {}

    def unpack(self, buffers: Arrays) -> dict[str, npt.NDArray[Any]]:
        return {}

    def seal(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        g: Geometry,
        evicted: tuple[int, ...],
        ridge: float,
    ) -> dict[str, npt.NDArray[Any]]:
        return {}

    def check(self, arrays: Arrays, g: Geometry, meta: Meta) -> None:
        return None


NONE = NoFarField()
