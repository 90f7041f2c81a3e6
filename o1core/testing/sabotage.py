"""Executors that are wrong in one place, whatever they run on: a check that passes one is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.executor import Executor
from o1core.layout import GroupMeta, Meta
from o1core.plan import Plan
from o1core.testing.around import Around

__all__ = ["Sabotaged", "sabotaged"]

Buffers = dict[str, npt.NDArray[Any]]


@dataclass
class Done:
    """A call that was run: the state before and after, the output, the meta it is to return.

    state and out are changed in place; what was changed is put on the device.
    """

    before: Buffers
    state: Buffers
    out: F32
    meta: list[GroupMeta]


Fault = Callable[[Done], None]


class Sabotaged(Around):
    """Another executor with a fault in what a call leaves, or in the state that it starts from."""

    def __init__(self, inner: Executor, fault: Fault, wrong: Callable[[Buffers], None]) -> None:
        super().__init__(inner)
        self.fault, self.wrong = fault, wrong

    def run(self, plan: Plan, handle: Any, q: F32, k: F32, v: F32, out: F32) -> Meta:
        before = self.inner.read(handle)
        started = _copy(before)
        self.wrong(started)
        self.inner.write(handle, started)
        meta = self.inner.run(plan, handle, q, k, v, out)
        state = self.inner.read(handle)
        for buffer in plan.buffers:
            if buffer.role == "sealed":
                state[buffer.name] = before[buffer.name].copy()
        done = Done(before, _copy(state), out, list(meta))
        self.fault(done)
        self.inner.write(handle, done.state)
        return done.meta


def _copy(buffers: Buffers) -> Buffers:
    return {name: array.copy() for name, array in buffers.items()}


def _nothing(_: Any) -> None:
    return


def _fill(value: float) -> Fault:
    def fault(done: Done) -> None:
        done.out[:] = value

    return fault


def _stale(*names: str) -> Fault:
    """As if the kernel that writes these buffers had not run."""

    def fault(done: Done) -> None:
        for name in names:
            if name in done.state:
                done.state[name] = done.before[name].copy()

    return fault


def _changed(name: str, change: Callable[[npt.NDArray[Any]], Any], index: Any = ...) -> Fault:
    def fault(done: Done) -> None:
        if name in done.state:
            done.state[name][index] = change(done.state[name][index])

    return fault


def _output(change: Callable[[F32], Any]) -> Fault:
    def fault(done: Done) -> None:
        done.out[:] = change(done.out)

    return fault


def _one_number(done: Done) -> None:
    if done.out.size:
        done.out[-1, -1, -1] += np.abs(done.out).max() / 100


def _does_nothing(done: Done) -> None:
    _stale(*done.state)(done)
    done.out[:] = 0


def _says_a_wrong_meta(done: Done) -> None:
    done.meta = [group._replace(far=group.far + 1) for group in done.meta]


def _last_bit(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    changed: npt.NDArray[Any] = (array.view(np.uint32) ^ np.uint32(1)).view(array.dtype)
    return changed


def _landmarks_longer(state: Buffers) -> None:
    if "q_landmarks" in state:
        state["q_landmarks"] *= np.float32(1.01)


def _landmarks_of_another_head(state: Buffers) -> None:
    if "q_landmarks" in state:
        state["q_landmarks"] = np.ascontiguousarray(state["q_landmarks"][:, ::-1])


_AFTER: dict[str, Fault] = {
    "attend: zeros": _fill(0.0),
    "attend: -999": _fill(-999.0),
    "attend: NaN": _fill(np.nan),
    "attend: infinity": _fill(np.inf),
    "attend: the next row": _output(lambda out: np.roll(out, 1, axis=0)),
    "attend: another head": _output(lambda out: np.roll(out, 1, axis=1)),
    "attend: 0.1% more": _output(lambda out: out * np.float32(1.001)),
    "attend: in 16 bits": _output(lambda out: out.astype(np.float16)),
    "attend: one wrong number": _one_number,
    "far_commit: did not run": _stale("far_max_mass", "far_num"),
    "far_commit: no new numerators": _stale("far_num"),
    "far_commit: no new masses": _stale("far_max_mass"),
    "far_commit: masses 0.1% more": _changed(
        "far_max_mass", lambda x: x * np.float32(1.001), np.s_[:, :, 1]
    ),
    "far_commit: numerators of another landmark": _changed(
        "far_num", lambda x: np.roll(x, 1, axis=2)
    ),
    "ring_commit: did not run": _stale("ring_k", "ring_v"),
    "ring_commit: no new values": _stale("ring_v"),
    "ring_commit: the next slot": _changed("ring_k", lambda x: np.roll(x, 1, axis=1)),
    "ring_commit: last bits": _changed("ring_k", _last_bit),
    "meta: did not run": _stale("meta"),
    "meta: one far key more": _changed("meta", lambda x: x + np.uint32(1), np.s_[:, 2]),
    "meta: says another": _says_a_wrong_meta,
    "no kernel ran": _does_nothing,
}
_BEFORE: dict[str, Callable[[Buffers], None]] = {
    "far_e: landmarks 1% longer": _landmarks_longer,
    "far_e: landmarks of another head": _landmarks_of_another_head,
}


def sabotaged(executor: Executor) -> dict[str, Executor]:
    """The executor with one fault each, by what is wrong: `{"kernel: what": executor}`.

    Made from what every executor has (read, write, run), so they tell whether a check that runs on
    this machine and backend can fail. The executor itself must stay open.
    """
    wrong = {name: Sabotaged(executor, fault, _nothing) for name, fault in _AFTER.items()}
    wrong |= {name: Sabotaged(executor, _nothing, change) for name, change in _BEFORE.items()}
    return dict(wrong)
