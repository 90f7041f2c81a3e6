"""An executor in a process of its own.

So that what one process cannot hold can be compared in one: two arches of Taichi, a driver that
ends its process, a GPU library beside a host that uses it too. Requests and answers are pickled to
the other process's stdin and from its stdout.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from o1core import registry
from o1core.checks import F32
from o1core.config import Geometry
from o1core.errors import BackendUnavailable
from o1core.executor import Buffers, Executor
from o1core.layout import Meta
from o1core.plan import Plan
from o1core.testing.around import Hostile

__all__ = ["Process", "Remote"]


class Reference:
    """What another process keeps: a handle, or a checkpoint."""

    def __init__(self, number: int) -> None:
        self.number = number


class Process:
    """Another process, and the requests to it (see `serve`).

    Should it end, every request is a RuntimeError that says how it did; one that takes longer than
    `PATIENCE` is ended.
    """

    PATIENCE = 300.0

    def __init__(self, label: str) -> None:
        self.label = label
        self._overdue = self._interrupted = False
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed in close()
        self._lock = threading.Lock()
        self._gone: list[int] = []
        path = os.pathsep.join(str(Path(p or ".").resolve()) for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from o1core.testing.remote import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # Not what lies in the working directory, which may be anything.
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )

    def ask(self, verb: str, *arguments: Any) -> Any:
        """What the verb of `_Server` returns, or raises."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        with self._lock:
            if self._interrupted:
                # What is undone on the way out must not take an interrupt's place.
                raise KeyboardInterrupt
            gone, self._gone = self._gone, []
            watchdog = threading.Timer(self.PATIENCE, self._give_up)
            watchdog.daemon = True
            watchdog.start()
            try:
                pickle.dump((verb, arguments, gone), requests)
                requests.flush()
                done, value = pickle.load(answers)
            except (OSError, EOFError, ValueError, pickle.UnpicklingError) as fault:
                raise RuntimeError(self._end()) from fault
            except KeyboardInterrupt:
                self._interrupted = True
                self._process.kill()
                raise
            finally:
                watchdog.cancel()
        if not done:
            raise value
        return value

    def _give_up(self) -> None:
        self._overdue = True
        self._process.kill()

    def _end(self) -> str:
        if self._overdue:
            return f"{self.label} gave no answer in {self.PATIENCE:g} s, and was ended"
        try:
            code = f"with code {self._process.wait(10)}"
        except subprocess.TimeoutExpired:
            code = "its answers"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").split("\n")
        last = [line.strip() for line in said if line.strip()][-1:]
        return ": ".join([f"the process of {self.label} ended {code}", *last])

    def drop(self, number: int) -> None:
        """Let go of what is kept under a number, with the next request."""
        self._gone.append(number)

    def close(self) -> None:
        """End it."""
        with suppress(OSError):  # of requests that it did not live to read
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


class Remote(Executor):
    """Runs on a backend that another process has opened, with hostile memory (see `Hostile`).

    arguments are those of the backend's `open`; label is what errors call it. Raises what `open`
    raises.
    """

    name = "remote"

    def __init__(self, backend: str, arguments: Mapping[str, Any], label: str = "") -> None:
        self.name = backend  # type: ignore[misc]  # of the class in others, for their entry point
        self._stop: tuple[int, dict[str, npt.NDArray[Any]]] | None = None
        self._process = Process(f"backend {label or backend}")
        self._ask = self._process.ask
        try:
            for name, value in self._ask("open", backend, dict(arguments)).items():
                setattr(self, name, value)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, device: Any = None) -> Self:
        raise TypeError(f"Remote is made from a backend's name, not opened on {device!r}")

    def _kept(self, number: int) -> Reference:
        reference = Reference(number)
        weakref.finalize(reference, self._process.drop, number).atexit = False
        return reference

    def unsupported(self, plan: Plan) -> list[str]:
        reasons: list[str] = self._ask("unsupported", plan)
        return reasons

    def allocate(self, geometry: Geometry) -> Reference:
        return self._kept(self._ask("allocate", geometry))

    def write(self, handle: Reference, buffers: Buffers) -> None:
        self._ask("write", handle.number, dict(buffers))

    def read(self, handle: Reference) -> dict[str, npt.NDArray[Any]]:
        if self._stop is not None and self._stop[0] == handle.number:
            return {name: array.copy() for name, array in self._stop[1].items()}
        buffers: dict[str, npt.NDArray[Any]] = self._ask("read", handle.number)
        return buffers

    def run(self, plan: Plan, handle: Reference, q: F32, k: F32, v: F32, out: F32) -> Meta:
        meta, out[...] = self._ask("run", plan, handle.number, q, k, v)
        return list(meta)

    def steps(
        self, plan: Plan, handle: Reference, q: F32, k: F32, v: F32, out: F32
    ) -> Iterator[tuple[str, ...]] | None:
        stops = self._ask("steps", plan, handle.number, q, k, v)
        return None if stops is None else self._replay(stops, handle, out)

    def _replay(self, stops: Any, handle: Reference, out: F32) -> Iterator[tuple[str, ...]]:
        try:
            for names, buffers, so_far in stops:
                self._stop, out[...] = (handle.number, buffers), so_far
                yield names
        finally:
            self._stop = None

    def meta(self, handle: Reference) -> Meta:
        meta: Meta = self._ask("meta", handle.number)
        return meta

    def copy(self, handle: Reference, geometry: Geometry) -> Reference:
        return self._kept(self._ask("copy", handle.number, geometry))

    def checkpoint(self, handle: Reference, plans: Sequence[Plan]) -> Reference:
        return self._kept(self._ask("checkpoint", handle.number, list(plans)))

    def rollback(self, handle: Reference, checkpoint: Reference) -> None:
        self._ask("rollback", handle.number, checkpoint.number)

    def close(self) -> None:
        """End the other process."""
        self._process.close()


# The other process ------------------------------------------------------------------------------


def serve() -> None:
    """Answer requests until stdin ends. What the backend prints goes to stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    server = _Server()
    while True:
        try:
            verb, arguments, gone = pickle.load(requests)
        except EOFError:
            break
        try:
            value = True, getattr(server, verb)(*arguments)
        except Exception as fault:
            value = False, _as_told(fault)
        for number in gone:
            server.kept.pop(number, None)
        pickle.dump(value, answers)
        answers.flush()
    server.kept.clear()
    if server.executor is not None:
        server.executor.close()


def _as_told(fault: Exception) -> Exception:
    """The exception as one that can be pickled and tells the same."""
    if isinstance(fault, BackendUnavailable):
        return fault
    known = (AssertionError, TypeError, ValueError, NotImplementedError, OSError, MemoryError)
    if type(fault) in known:
        return type(fault)(str(fault))
    if isinstance(fault, RuntimeError):
        return RuntimeError(str(fault))
    return RuntimeError(f"{type(fault).__name__}: {fault}")


class _Server:
    """The verbs, on numbers in place of handles and checkpoints."""

    executor: Executor | None = None

    def __init__(self) -> None:
        self.kept: dict[int, Any] = {}
        self._numbers = itertools.count()

    def _keep(self, thing: Any) -> int:
        number = next(self._numbers)
        self.kept[number] = thing
        return number

    @property
    def _inner(self) -> Executor:
        assert self.executor is not None
        return self.executor

    def held(self) -> int:
        return len(self.kept)

    def variants(self, backend: str) -> dict[str, dict[str, Any]]:
        return {name: dict(x) for name, x in registry.variants(backend).items()}

    def open(self, backend: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What the executor says of itself."""
        device = arguments.pop("device", None)
        inner = registry.open_backend(backend, device, arguments)
        self.executor = Hostile(inner)
        return {
            "device": str(inner.device),
            "detail": str(inner.detail),
            "software": bool(inner.software),
            "strategies": tuple(inner.strategies),
            "strategy": inner.strategy,
            "max_scratch": int(inner.max_scratch),
            "max_slab": int(inner.max_slab),
        }

    def unsupported(self, plan: Plan) -> list[str]:
        return self._inner.unsupported(plan)

    def allocate(self, geometry: Geometry) -> int:
        return self._keep(self._inner.allocate(geometry))

    def write(self, handle: int, buffers: Buffers) -> None:
        self._inner.write(self.kept[handle], buffers)

    def read(self, handle: int) -> dict[str, npt.NDArray[Any]]:
        return self._inner.read(self.kept[handle])

    def run(self, plan: Plan, handle: int, q: F32, k: F32, v: F32) -> tuple[Meta, F32]:
        out = _poisoned(plan)
        return list(self._inner.run(plan, self.kept[handle], q, k, v, out)), out

    def steps(self, plan: Plan, handle: int, q: F32, k: F32, v: F32) -> Any:
        out = _poisoned(plan)
        stops = self._inner.steps(plan, self.kept[handle], q, k, v, out)
        if stops is None:
            return None
        return [(names, self._inner.read(self.kept[handle]), out.copy()) for names in stops]

    def meta(self, handle: int) -> Meta:
        return list(self._inner.meta(self.kept[handle]))

    def copy(self, handle: int, geometry: Geometry) -> int:
        return self._keep(self._inner.copy(self.kept[handle], geometry))

    def checkpoint(self, handle: int, plans: list[Plan]) -> int:
        return self._keep(self._inner.checkpoint(self.kept[handle], plans))

    def rollback(self, handle: int, checkpoint: int) -> None:
        self._inner.rollback(self.kept[handle], self.kept[checkpoint])


def _poisoned(plan: Plan) -> F32:
    g = plan.geometry
    return np.full((plan.rows, g.heads, g.value_dim), np.nan, np.float32)
