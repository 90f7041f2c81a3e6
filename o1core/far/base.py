"""What every kind of far field answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy.typing as npt

from o1core.layout import Buffer, Kernel, Meta, Strategy

if TYPE_CHECKING:
    from o1core.config import Geometry

Arrays = Mapping[str, npt.NDArray[Any]]


class FarField(ABC):
    """State, kernels and sealing of one kind of far field."""

    name: ClassVar[str]
    around_attend: ClassVar[Mapping[Strategy, tuple[tuple[Kernel, ...], tuple[Kernel, ...]]]]
    """By strategy: its kernels before attend, and those after it."""
    attend_reads: ClassVar[Mapping[Strategy, tuple[str, ...]]]
    """By strategy: what attend reads of it."""

    @abstractmethod
    def scratch_parts(self, g: Geometry, rows: int, sub_chunks: int) -> dict[str, tuple[int, ...]]:
        """What its kernels tell each other and attend in a whole call, at most; name -> shape."""

    @abstractmethod
    def arrays(self, g: Geometry) -> dict[str, tuple[int, ...]]:
        """The kind's arrays in a `LayerState`: name -> shape, all float32."""

    @abstractmethod
    def buffers(self, g: Geometry) -> tuple[Buffer, ...]:
        """The kind's rows of the buffer table."""

    @abstractmethod
    def pack(self, arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
        """The arrays of a state as they lie in the buffers."""

    @abstractmethod
    def unpack(self, buffers: Arrays) -> dict[str, npt.NDArray[Any]]:
        """The inverse of `pack`."""

    @abstractmethod
    def seal(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        g: Geometry,
        evicted: tuple[int, ...],
        ridge: float,
    ) -> dict[str, npt.NDArray[Any]]:
        """The kind's arrays after a prompt.

        q `[rows, G*H, head_dim]`, k `[rows, G, head_dim]`, v `[rows, G, value_dim]` in float32; the
        keys that left group i's window are rows `sinks .. sinks + evicted[i] - 1`.
        """

    @abstractmethod
    def check(self, arrays: Arrays, g: Geometry, meta: Meta) -> None:
        """ValueError unless the arrays can be this kind's state beside `meta`."""
