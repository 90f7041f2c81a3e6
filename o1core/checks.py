"""The door: every argument is checked here once, and a refusal names argument, rule and value.

Numbers that pass can no longer overflow float32 further in (docs/operator.md section 8): with
`|q|, |k| <= 2^48`, `head_dim <= 2^16` and `scale <= 2^14` a logit stays below 2^126, and with
`|v| <= 2^96` the far numerator survives 2^32 evicted keys.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "F32",
    "MAX_KEY",
    "MAX_VALUE",
    "ROW_LIMITS",
    "UNCHECKED",
    "as_float32",
    "as_host_array",
    "bad_row",
    "integer",
    "not_finite",
    "real",
    "require_finite",
]

F32 = npt.NDArray[np.float32]
MAX_KEY = 2.0**48
MAX_VALUE = 2.0**96
ROW_LIMITS = {"q": MAX_KEY, "k": MAX_KEY, "v": MAX_VALUE}
UNCHECKED = " (check_finite=False skips this check)"
FLOATS = frozenset((np.float16, np.float32, np.float64))


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int within `[low, high]`; bools and floats are a TypeError."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < low or (high is not None and number > high):
        limit = f">= {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {limit}, got {number}")
    return number


def real(name: str, value: Any, low: float, high: float) -> float:
    """`value` as a float within `[low, high]`; NaN, bools and strings are refused."""
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{name} must be a real number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a real number, got {value!r}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} must be between {low:g} and {high:g}, got {number!r}")
    return number


def as_host_array(name: str, value: Any) -> npt.NDArray[Any]:
    """A numpy view (or copy, where the device or dtype demands one) of any array-like object.

    Accepts numpy arrays and whatever offers DLPack, the buffer protocol or `__array__`, with a
    float16, bfloat16, float32 or float64 dtype. Anything else is a TypeError.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: fill it first, e.g. {name}.filled(0)")
    array = value if isinstance(value, np.ndarray) else _from_protocol(name, value)
    # The name of a dtype is slow to come by and only needed for bfloat16, which numpy lacks.
    if array.dtype.type not in FLOATS and array.dtype.name != "bfloat16":
        raise TypeError(
            f"{name} must have dtype float16, bfloat16, float32 or float64, got {array.dtype}"
        )
    return array


def _from_protocol(name: str, value: Any) -> npt.NDArray[Any]:
    if type(value).__module__.partition(".")[0] == "torch":
        # numpy has no bfloat16, and autograd and device memory do not cross DLPack by themselves.
        # Nor does the negative bit of a lazily negated view: the numbers would come out unnegated.
        try:
            value = value.detach().cpu().resolve_neg()
            if str(value.dtype) == "torch.bfloat16":
                value = value.float()
        except (RuntimeError, TypeError) as fault:
            raise TypeError(f"{name} must be a plain dense tensor: {fault}") from fault
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value, device="cpu")
        except (TypeError, ValueError, BufferError, RuntimeError) as fault:
            # jax's bfloat16 has no numpy twin in DLPack but converts through __array__.
            if not hasattr(value, "__array__"):
                raise TypeError(f"{name} cannot be read through DLPack: {fault}") from fault
    if hasattr(value, "__array__") or _has_buffer(value):
        try:
            array: npt.NDArray[Any] = np.asarray(value)
        except Exception as fault:
            raise TypeError(f"{name} cannot be read as an array: {fault}") from fault
        return array
    raise TypeError(
        f"{name} must be an array (numpy, DLPack or buffer protocol), got {type(value).__name__}"
    )


def _has_buffer(value: Any) -> bool:
    try:
        memoryview(value).release()
    except TypeError:
        return False
    return not isinstance(value, (bytes, bytearray))


def as_float32(array: npt.NDArray[Any]) -> F32:
    """C-contiguous float32 of a checked array; no copy when it already is that."""
    return np.ascontiguousarray(array, dtype=np.float32)


def require_finite(
    name: str, array: npt.NDArray[Any], limit: float, *, row_axis: int = 0, way_out: str = ""
) -> None:
    """ValueError naming array, row, position and value unless every `|x| <= limit`."""
    if array.size == 0:
        return
    # One test for NaN, infinity and range: NaN survives max and min, and compares false.
    with np.errstate(invalid="ignore"):
        if -limit <= float(array.min()) and float(array.max()) <= limit:
            return
        bad = ~(np.abs(array.astype(np.float64)) <= limit)
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    raise bad_row(name, where, float(array[where]), limit, row_axis=row_axis, way_out=way_out)


def bad_row(
    name: str,
    where: Sequence[int],
    found: float,
    limit: float,
    *,
    row_axis: int = 0,
    way_out: str = UNCHECKED,
) -> ValueError:
    """The error for a number that is not finite, or beyond its limit."""
    rule = "finite" if not math.isfinite(found) else f"at most {limit:.3g} in magnitude"
    return ValueError(
        f"{name} must be {rule}: row {where[row_axis]} holds {found} at index {(*where,)}{way_out}"
    )


def not_finite(backend: str) -> RuntimeError:
    """What a backend did wrong that gives NaN or infinity for rows that are finite."""
    return RuntimeError(
        f"backend {backend} returned NaN or infinity for finite rows; "
        "the layer is as it was before the call"
    )


def shape_error(name: str, got: Sequence[int], want: Sequence[int | str]) -> ValueError:
    """The error for an array of the wrong shape; says so when two axes look swapped."""
    text = f"{name} must have shape [{', '.join(map(str, want))}], got {tuple(got)}"
    if len(got) == len(want):
        fixed = [i for i, size in enumerate(want) if isinstance(size, int)]
        for i in range(len(got) - 1):
            swapped = list(got)
            swapped[i], swapped[i + 1] = swapped[i + 1], swapped[i]
            if all(swapped[j] == want[j] for j in fixed):
                return ValueError(f"{text}: axes {i} and {i + 1} look swapped")
    return ValueError(text)
