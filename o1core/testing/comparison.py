"""Comparison: with the oracle, and of two backends with each other (docs/operator.md section 9)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32
from o1core.state import LayerState
from o1core.testing.oracle import CONSTANTS, EPS, F64, LEAST, Expected, Oracle

__all__ = [
    "Report",
    "adopt",
    "check_arrays",
    "check_output",
    "check_same_output",
    "check_state",
    "compare",
]

Arrays = Mapping[str, npt.NDArray[Any]]

STATE_TOLERANCE = 1e-4
EXACT = ("meta", "ring_k", "ring_v", "sink_k", "sink_v", "prompt_q")
"""What an executor only moves, so that every bit must be right."""
UNTOUCHED = (*EXACT, *CONSTANTS)
"""And what sealing has settled, once that is known to be right."""


@dataclass
class Report:
    """How a comparison went, counted in results: one for each row and head.

    worst: the largest error over its bound; ambiguous: float32 cannot tell whether the far field is
    kept; undecided: ambiguous, and any finite answer passes.
    """

    worst: float = 0.0
    results: int = 0
    ambiguous: int = 0
    undecided: int = 0

    def add(self, other: Report) -> None:
        self.worst = max(self.worst, other.worst)
        self.results += other.results
        self.ambiguous += other.ambiguous
        self.undecided += other.undecided


def _over(a: F64 | F32, b: F64 | F32, bound: F64) -> F64:
    """Largest difference of each row and head, over its bound."""
    error: F64 = np.abs(np.subtract(a, b, dtype=np.float64)).max(axis=-1) / bound
    return error


def _counted(error: F64, expected: Expected) -> Report:
    undecided = np.isinf(expected.bound) | np.isinf(expected.other_bound)
    counts = int(expected.ambiguous.sum()), int((expected.ambiguous & undecided).sum())
    return Report(float(error.max(initial=0)), error.size, *counts)


def compare(out: F32, expected: Expected) -> tuple[Report, npt.NDArray[np.float64]]:
    """How close results of the right shape come: a report, and error over bound by row and head.

    An ambiguous row is held against both answers and keeps the better.
    """
    error = _over(out, expected.out, expected.bound)
    opposite = _over(out, expected.other, expected.other_bound)
    error = np.where(expected.ambiguous, np.minimum(error, opposite), error)
    return _counted(error, expected), error


def _check_form(out: npt.NDArray[Any], expected: Expected, label: str) -> None:
    if not isinstance(out, np.ndarray) or out.dtype != np.float32:
        raise AssertionError(f"{label} must be a float32 array, got {getattr(out, 'dtype', out)}")
    if out.shape != expected.out.shape:
        raise AssertionError(f"{label} must have shape {expected.out.shape}, got {out.shape}")
    if not np.isfinite(out).all():
        bad = tuple(map(int, np.argwhere(~np.isfinite(out))[0]))
        raise AssertionError(f"{label} must be finite, got {out[bad]} at {bad}")


def _check_error(
    report: Report, error: F64, expected: Expected, label: str, got: F32, want: Any
) -> Report:
    # A NaN here would mean a bound that is none: it must not pass either.
    if not report.worst <= 1:
        row, head = np.unravel_index(int(np.argmax(error)), error.shape)
        raise AssertionError(
            f"{label} row {row} head {head} is off by {error[row, head]:.3g} times its bound "
            f"{expected.bound[row, head]:.3g}: got {got[row, head][:4]}..., "
            f"want {want[row, head][:4]}..."
        )
    return report


def check_output(out: npt.NDArray[Any], expected: Expected, label: str = "out") -> Report:
    """AssertionError unless every row of `out` is within its bound; how close it came otherwise.

    Type, shape and NaN are tested before any tolerance is applied.
    """
    _check_form(out, expected, label)
    report, error = compare(out, expected)
    return _check_error(report, error, expected, label, out, expected.out)


def check_same_output(
    a: npt.NDArray[Any], b: npt.NDArray[Any], expected: Expected, label: str = "out"
) -> Report:
    """AssertionError unless two outputs agree, within the bound that each has by itself.

    That is stricter than what follows from both being right. Where they decided an ambiguous row
    differently there is nothing to compare.
    """
    _check_form(a, expected, label)
    _check_form(b, expected, label)
    near = [
        _over(x, expected.out, expected.bound) <= _over(x, expected.other, expected.other_bound)
        for x in (a, b)
    ]
    bound = np.where(expected.ambiguous & ~near[0], expected.other_bound, expected.bound)
    error = np.where(expected.ambiguous & (near[0] != near[1]), 0, _over(a, b, bound))
    return _check_error(_counted(error, expected), error, expected, label, a, b)


def check_arrays(got: Arrays, want: Arrays, exact: tuple[str, ...] = EXACT) -> float:
    """AssertionError unless arrays of a state, by the names of `LayerState`, are as wanted.

    Those in `exact` must be equal bit for bit, the others within 1e-4 of the largest entry of their
    head; far sums have the tolerance of their logits where these are so large that float32 cannot
    keep to that. Returns the largest error over its tolerance.
    """
    worst = 0.0
    for name, array in want.items():
        found = got[name]
        if found.shape != array.shape:
            raise AssertionError(f"{name} must have shape {array.shape}, got {found.shape}")
        if name in exact:
            wanted = array.astype(found.dtype)
            differs = found.view(np.uint32) != wanted.view(np.uint32)
            if differs.any():
                bad = tuple(map(int, np.argwhere(differs)[0]))
                raise AssertionError(
                    f"{name} differs first at {bad}: {found[bad]} != {wanted[bad]}"
                )
            continue
        finite = np.isfinite(array)
        if not np.array_equal(np.isfinite(found), finite):
            raise AssertionError(f"{name} must be finite exactly where the expected one is")
        # A head has its own size, and so its own tolerance; key landmarks belong to a group.
        lead = array.shape[:1] if name == "k_landmarks" else array.shape[:2]
        off = np.where(finite, found, 0).astype(np.float64) - np.where(finite, array, 0)
        error = np.abs(off).reshape(*lead, -1).max(axis=-1, initial=0)
        size = np.abs(np.where(finite, array, 0), dtype=np.float64)
        tolerance = STATE_TOLERANCE * size.reshape(*lead, -1).max(axis=-1, initial=0)
        if "far_max" in want and name in ("far_max", "far_mass", "far_num"):
            logits = np.abs(np.where(np.isfinite(want["far_max"]), want["far_max"], 0))
            tolerance *= np.maximum(1, 8 * EPS * (1 + logits.max(axis=-1)) / STATE_TOLERANCE)
            # Products of weights and values that underflow; a mass of n is at least n keys.
            mass = np.abs(want["far_mass"]).max(axis=-1)
            tolerance += LEAST * (1 + mass)
            if name == "far_num":
                # Values of both signs may cancel; the sum still errs by the size of its terms.
                # Of the ring, between two kernels, some slots may not be written yet.
                values = [
                    np.abs(got[n][np.isfinite(got[n])]).max(initial=0)
                    for n in ("ring_v", "sink_v")
                    if n in got
                ]
                tolerance += 8 * EPS * mass * max(values, default=0.0)
        share = np.where(error == 0, 0.0, np.inf)
        np.divide(error, tolerance, out=share, where=tolerance > 0)
        if not share.max(initial=0) <= 1:
            bad = tuple(map(int, np.unravel_index(int(np.argmax(share)), share.shape)))
            raise AssertionError(
                f"{name} of {'group' if len(bad) == 1 else 'group and head'} {bad} is off by "
                f"{error[bad]:.3g}, tolerance {tolerance[bad]:.3g}"
            )
        worst = max(worst, float(share.max(initial=0)))
    return worst


def check_state(state: LayerState, expected: Arrays, exact: tuple[str, ...] = EXACT) -> float:
    """AssertionError unless a state is the expected one (see `Oracle.state` and `check_arrays`)."""
    if set(state.arrays) != set(expected):
        raise AssertionError(f"state must hold {sorted(expected)}, got {sorted(state.arrays)}")
    return check_arrays(state.arrays, expected, exact)


def adopt(oracle: Oracle, state: LayerState) -> None:
    """Let an oracle go on with the landmarks and the mix of a sealed layer, once they are checked.

    A mix is the solution of a system that may be ill conditioned, known to float64 by the size of
    its largest entries only; queries of extreme logits then see little but the others (section 9).
    Whoever extends the layer answers for what it makes of the mix it has, not for that.
    """
    if oracle.sealed and oracle.geometry.landmarks:
        definition = oracle.fixed()
        check_arrays(state.arrays, definition)
        oracle.constants = {n: state.arrays[n] for n in CONSTANTS}
