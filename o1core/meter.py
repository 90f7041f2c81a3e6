"""What an executor offers to be measured by: rows on its device, its clock, its ceilings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from o1core.checks import F32

if TYPE_CHECKING:
    from o1core.engine import Layer

__all__ = ["Ceiling", "Meter", "Resident"]


class Resident(ABC):
    """Calls of one layer on the same rows, which lie on its device, as does the output."""

    has_clock: bool = False
    """Whether the device can say by itself how long a call took."""

    @abstractmethod
    def start(self) -> None:
        """Start a call; it need not have ended when this returns."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for every call that was started."""

    @abstractmethod
    def out(self) -> F32:
        """The output of the last call, waited for and copied to the host."""

    def device_seconds(self) -> float:
        """Run a call, and wait: how long it took by the device's own clock, if it has one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ceiling:
    """Work so simple that its rate bounds what a kernel can reach; amount is that of one start."""

    name: str
    unit: Literal["FLOP/s", "B/s"]
    amount: float
    start: Callable[[], object]
    wait: Callable[[], object]


class Meter:
    """See `Executor.meter`. By itself it offers nothing, and only calls on host arrays are timed.

    Not for hosts: what it gives is made for repeated, unchecked calls.
    """

    def resident(self, layer: Layer, q: F32, k: F32, v: F32) -> Resident | None:
        """Calls on these rows, copied to the device; None where rows are of the host anyway."""
        del layer, q, k, v
        return None

    def ceilings(self) -> Sequence[Ceiling]:
        """What the device can do: a product of float32 matrices, a copy. Each is correct."""
        return ()
