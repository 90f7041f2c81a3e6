"""Timing: candidates take turns, so that a machine that drifts hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

__all__ = ["Work", "clocked", "in_turns"]

K = TypeVar("K", bound=Hashable)

Work = Callable[[], float]
"""Does something once, and says how many seconds one call of it took."""

LEAST = 3
"""Repetitions that are made however long they take."""

STILL_SECONDS = 0.012
"""Of a look at what the process does; systems count its time in steps of up to 4 ms."""
MOST_LOOKS = 20


def clocked(*steps: Callable[[], object], calls: int = 1) -> Work:
    """The wall time of the steps, one after the other, divided by the calls that they are."""

    def work() -> float:
        begun = time.perf_counter()
        for step in steps:
            step()
        # A clock may be too coarse for a tiny call; a rate must stay a number.
        return max(time.perf_counter() - begun, 1e-9) / calls

    return work


def in_turns(
    work: Mapping[K, Work], repeats: int, budget: float
) -> tuple[dict[K, tuple[float, ...]], dict[K, Exception]]:
    """Seconds of each piece of work in each repetition, and what those that failed raised.

    One repetition comes first that does not count. After `budget` seconds no further one begins,
    though `LEAST` are made. Threads that work leaves busy are waited for: those of BLAS and OpenMP
    spin for some 0.1 s, on cores that the next candidate may need.
    """
    seconds: dict[K, list[float]] = {key: [] for key in work}
    failed: dict[K, Exception] = {}
    restless: set[K] = set()
    begun = 0.0
    for repetition in range(repeats + 1):
        if repetition == 1:
            begun = time.perf_counter()
        elif repetition > LEAST and time.perf_counter() - begun > budget:
            break
        for key, run in work.items():
            if key in failed:
                continue
            try:
                taken = run()
            except Exception as fault:  # whatever it is, the others still get their turns
                failed[key] = fault
                continue
            finally:
                # Others are not followed by a pause, in which the clock of a GPU falls.
                if (repetition == 0 or key in restless) and _wait_until_still():
                    restless.add(key)
            if repetition:
                seconds[key].append(taken)
    return {key: tuple(x) for key, x in seconds.items() if key not in failed}, failed


def _wait_until_still() -> bool:
    """Wait for the threads of this process, though not for ever; whether any was at work."""
    for look in range(MOST_LOOKS):
        wall, cpu = time.perf_counter(), time.process_time()
        time.sleep(STILL_SECONDS)
        if time.process_time() - cpu < 0.3 * (time.perf_counter() - wall):
            return look > 0
    return True
