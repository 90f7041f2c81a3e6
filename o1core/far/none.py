"""No far field: keys that leave the window are counted and forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt

from o1core.far.base import Arrays, FarField
from o1core.layout import Buffer, Kernel, Meta, Strategy

if TYPE_CHECKING:
    from o1core.config import Geometry


class NoFarField(FarField):
    """Sinks and window alone."""

    name = "none"
    around_attend: ClassVar[Mapping[Strategy, tuple[tuple[Kernel, ...], tuple[Kernel, ...]]]] = {
        "sub-chunk": ((), ()),
        "whole-call": ((), ()),
    }
    attend_reads: ClassVar[Mapping[Strategy, tuple[str, ...]]] = {
        "sub-chunk": (),
        "whole-call": (),
    }

    def scratch_parts(self, g: Geometry, rows: int, sub_chunks: int) -> dict[str, tuple[int, ...]]:
        return {}

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
