"""The executor protocol: what a backend does, and nothing of what it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy.typing as npt

from o1core.checks import F32
from o1core.config import Geometry
from o1core.layout import Meta, Strategy, as_meta
from o1core.meter import Meter
from o1core.plan import MAX_SCRATCH, MAX_SLAB, MAX_SUB_CHUNK, Plan, scratch_bytes

__all__ = ["DeviceRows", "Executor"]

Buffers = Mapping[str, npt.NDArray[Any]]


class DeviceRows(ABC):
    """q, k and v of one call that lie on an executor's device already, and the output they get.

    For executors that take arrays of the device from hosts (`Executor.device_rows`). `shapes` are
    those of the caller's arrays.
    """

    shapes: Mapping[str, tuple[int, ...]]

    @abstractmethod
    def to_host(self) -> dict[str, npt.NDArray[Any]]:
        """The rows as host arrays."""

    @abstractmethod
    def from_host(self, out: F32) -> Any:
        """An array of the host as one of the kind that the caller passed, on the device."""

    @abstractmethod
    def run(
        self, plan: Plan, handle: Any, batch: int | None, limits: Mapping[str, float] | None
    ) -> tuple[Meta | None, Any]:
        """Run the plan on these rows: the meta the device holds, the output as the caller gets it.

        With limits, every `|q|`, `|k|` and `|v|` must be within its own (`o1core.checks.bad_row`
        says which is not), and the output finite (`not_finite`). Without them nothing is checked
        or waited for, and the meta is None. The handle may have advanced when this raises; the
        caller rolls it back.
        """


class Executor(ABC):
    """One device that runs plans. Subclass it, and name the class in the entry-point group.

    A *handle* is whatever the executor keeps for one layer's state; o1core never looks inside.
    Arrays that cross this interface are C-contiguous, of the shapes and dtypes of the plan's buffer
    table, and already checked: rows are finite unless the caller opted out.

    Only `open`, `allocate`, `write`, `read`, `run` and `unsupported` must be written. The others
    are derived from them, at the price of copies through the host; `encode` is for devices that a
    host drives itself.
    """

    name: ClassVar[str]
    """The name users pass as `backend=`; must be that of the entry point."""

    auto_rank: ClassVar[int] = -1
    """`backend="auto"` tries ranks from high to low; below 0 it is taken only when asked for."""

    software: bool = False
    """True for a GPU interface that runs on the CPU (llvmpipe): "auto" passes over it."""

    device: str = ""
    """What it really runs on, for people: adapter name and kind."""

    detail: str = ""
    """What else decides about its results, for `engine.reason`: which kernels it runs."""

    strategies: Sequence[Strategy] = ("sub-chunk",)
    """The strategies of plans that it runs, the one it takes by itself first."""

    strategy: Strategy = "sub-chunk"
    """That of the plans it is given; one of `strategies`."""

    max_scratch: int = MAX_SCRATCH
    """Bytes of scratch from which on a call of the strategy "whole-call" is cut into slabs.

    A sub-chunk of 64 rows is computed together also where it takes more.
    """

    max_slab: int = MAX_SLAB
    """Rows that it computes together at most, likewise."""

    @classmethod
    @abstractmethod
    def open(cls, device: Any = None) -> Self:
        """An executor on the given device, `None` for the best one.

        A backend with options of its own takes them as further keyword arguments, which `O1Batch`
        passes on; one that runs several strategies has `strategy` among them. Raises
        `BackendUnavailable` with every reason and its fix when this machine has no such device,
        TypeError or ValueError for arguments that are wrong.
        """

    @classmethod
    def why_not_auto(cls, device: Any = None) -> str:
        """Why "auto" should pass over this backend even before opening it; "" if it should not.

        For backends that are slow to open. Raises as `open` does.
        """
        del device
        return ""

    @classmethod
    def probe(cls) -> str:
        """The device that `open()` would take, for `o1core.backends()`; raises as that does.

        Opened and closed for it, unless the backend can tell without.
        """
        executor = cls.open()
        executor.close()
        return executor.device

    @classmethod
    def variants(cls) -> Mapping[str, Mapping[str, Any]]:
        """The ways to run it that the parity matrix tells apart: names, and arguments of `open`.

        Those that this machine lacks too: opening them says why. A name is that of the backend, or
        begins with it and a hyphen.
        """
        return {cls.name: {}}

    def use_strategy(self, strategy: str | None) -> None:
        """Take one of `strategies`, the first for None; ValueError for any other."""
        for known in self.strategies:
            if strategy in (known, None):
                self.strategy = known
                return
        raise ValueError(
            f"strategy must be {' or '.join(map(repr, self.strategies))} ({self.name}"
            f"{f', {self.detail}' if self.detail else ''}), got {strategy!r}"
        )

    def plan(self, geometry: Geometry, rows: int) -> Plan:
        """The plan of a call as this executor runs it."""
        return Plan.build(
            geometry,
            rows,
            strategy=self.strategy,
            scratch=max(self.max_scratch, scratch_bytes(geometry, MAX_SUB_CHUNK)),
            slab=self.max_slab,
        )

    @abstractmethod
    def unsupported(self, plan: Plan) -> list[str]:
        """All reasons why this plan cannot run here; empty means it can."""

    @abstractmethod
    def allocate(self, geometry: Geometry) -> Any:
        """A handle for the state of one layer, contents undefined until `write`."""

    @abstractmethod
    def write(self, handle: Any, buffers: Buffers) -> None:
        """Set the state buffers of a handle."""

    @abstractmethod
    def read(self, handle: Any) -> dict[str, npt.NDArray[Any]]:
        """The state buffers of a handle, as new arrays."""

    @abstractmethod
    def run(self, plan: Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
        """Run the plan's dispatches in order: fill `out`, advance the state.

        q `[rows, G*H, d]`, k `[rows, G, d]`, v `[rows, G, dv]` are read only. Returns the meta the
        device now holds, which the caller compares with `plan.meta_after`.
        """

    def steps(
        self, plan: Plan, handle: Any, q: F32, k: F32, v: F32, out: F32
    ) -> Iterator[tuple[str, ...]] | None:
        """Run as `run` does, but stop between kernels, so that each can be checked by itself.

        For plans of one slab. Yields the names of the kernels that have run since the last stop; in
        all each kernel of the plan comes once, in whatever order. At a stop `read` gives the state
        and `out` holds the output as these kernels left them: what they write by the plan is there,
        everything else is what it was. None where kernels cannot be run apart.
        """
        del plan, handle, q, k, v, out
        return None

    def check_encode(
        self, geometry: Geometry, rows: int, encoder: Any, q: Any, k: Any, v: Any, out: Any
    ) -> None:
        """Raise what is wrong with the arguments of `encode`, before rows are planned for."""
        del geometry, rows, encoder, q, k, v, out
        raise NotImplementedError(
            f"backend {self.name} has no command encoders: extend the layer with arrays"
        )

    def encode(
        self, plan: Plan, handle: Any, encoder: Any, q: Any, k: Any, v: Any, out: Any
    ) -> None:
        """Record the plan's dispatches into the host's encoder, on the host's buffers.

        Called after `check_encode`. Nothing is waited for or read back. Whatever is wrong raises
        before anything is recorded.
        """
        self.check_encode(plan.geometry, plan.rows, encoder, q, k, v, out)

    def device_rows(self, values: Mapping[str, Any]) -> DeviceRows | None:
        """q, k and v where they are on this executor's device, None if they are of the host.

        TypeError or ValueError when only some are, or when they cannot be taken as they are.
        """
        del values
        return None

    def meter(self) -> Meter:
        """What `o1core bench` measures this executor by, besides calls on arrays of the host."""
        return Meter()

    def meta(self, handle: Any) -> Meta:
        """The meta that the device holds."""
        return as_meta(self.read(handle)["meta"])

    def close(self) -> None:
        """Release the device; handles are dead afterwards."""
        return

    def copy(self, handle: Any, geometry: Geometry) -> Any:
        """An independent handle with the same state."""
        twin = self.allocate(geometry)
        self.write(twin, self.read(handle))
        return twin

    def checkpoint(self, handle: Any, plans: Sequence[Plan]) -> Any:
        """What `rollback` needs to undo running these plans; taken before they run."""
        return self.read(handle)

    def rollback(self, handle: Any, checkpoint: Any) -> None:
        """Put the handle back to the checkpoint, bit for bit, whatever happened since."""
        self.write(handle, checkpoint)
