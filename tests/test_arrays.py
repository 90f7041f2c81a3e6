"""What callers may hand over: dtypes, layouts, protocols; what is refused, and how."""

from __future__ import annotations

import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import SMALL, same_state, small_layer, small_rows

import o1core


class Exporter:
    """A tensor of another library: DLPack and nothing else."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()


def variants(x: np.ndarray) -> dict[str, Any]:
    strided = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    strided[..., ::2] = x
    strided[..., 1::2] = np.nan
    readonly = x.copy()
    readonly.flags.writeable = False
    padded = np.full((x.shape[0] + 4, *x.shape[1:]), np.nan, x.dtype)
    padded[2:-2] = x
    return {
        "strided": strided[..., ::2],
        "read-only": readonly,
        "fortran": np.asfortranarray(x),
        "reversed": x[::-1].copy()[::-1],
        "middle": padded[2:-2],
        "transposed": np.ascontiguousarray(x.transpose(2, 0, 1)).transpose(1, 2, 0),
        "big-endian": x.astype(">f4"),
        "float64": x.astype(np.float64),
        "dlpack": Exporter(x),
        "memoryview": memoryview(x.data),
    }


@pytest.mark.parametrize("name", variants(np.zeros((1, 1, 1), np.float32)))
def test_layouts_give_the_same_bytes(engine: o1core.O1Batch, name: str) -> None:
    want, rows = small_layer(engine)
    q, k, v = (variants(x[:80])[name] for x in small_rows(280))
    layer = engine.seal(q, k, v, SMALL)
    assert same_state(layer.state(), want.state())
    given = [variants(x)[name] for x in rows]
    kept = [np.array(x.data if isinstance(x, Exporter) else x) for x in given]
    assert layer.extend(*given).tobytes() == want.extend(*rows).tobytes()
    for before, after in zip(kept, given, strict=True):
        after = np.asarray(after.data if isinstance(after, Exporter) else after)
        assert before.tobytes() == np.array(after).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_small_floats_are_widened_exactly(engine: o1core.O1Batch, dtype: Any) -> None:
    layer, rows = small_layer(engine)
    twin = layer.fork()
    small = [x.astype(dtype) for x in rows]
    wide = [x.astype(np.float32) for x in small]
    assert layer.extend(*small).tobytes() == twin.extend(*wide).tobytes()


def test_float64_is_rounded_once(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    twin = layer.fork()
    wide = [x.astype(np.float64) * (1 + 1e-12) for x in rows]
    out = layer.extend(*wide)
    assert out.dtype == np.float32
    assert out.tobytes() == twin.extend(*(x.astype(np.float32) for x in wide)).tobytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x.astype(np.int32), "k must have dtype float16, .*, got int32"),
        (lambda x: x.astype(bool), "k must have dtype .*, got bool"),
        (lambda x: x.astype(np.complex64), "k must have dtype .*, got complex64"),
        (lambda x: x.astype(object), "k must have dtype .*, got object"),
        (lambda x: x.astype(np.longdouble), "k must have dtype .*, got (longdouble|float128)"),
        (lambda x: x.tolist(), r"k must be an array .*, got list"),
        (lambda x: None, r"k must be an array .*, got NoneType"),
        (lambda x: "k", r"k must be an array .*, got str"),
        (lambda x: b"k", r"k must be an array .*, got bytes"),
        (lambda x: np.ma.masked_array(x, x > 0), "k must not be a masked array"),
        (lambda x: array.array("i", [1]), "k must have dtype .*, got int32"),
    ],
)
def test_wrong_types_are_refused(engine: o1core.O1Batch, make: Any, message: str) -> None:
    layer, (q, k, v) = small_layer(engine)
    before = layer.state()
    with pytest.raises(TypeError, match=message):
        layer.extend(q, make(k), v)
    with pytest.raises(TypeError, match=message):
        engine.seal(q, make(k), v)
    assert same_state(layer.state(), before)


class Stubborn:
    """An array of a library that will not part with its numbers."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("on another planet")


def test_a_failing_conversion_names_the_argument(engine: o1core.O1Batch) -> None:
    layer, (q, _, v) = small_layer(engine)
    with pytest.raises(TypeError, match="k cannot be read as an array: on another planet"):
        layer.extend(q, Stubborn(), v)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((5, 4, 16), (5, 2, 16), (5, 2, 11)), r"v must have shape \[rows, 2, 12\], got"),
        (((5, 4, 16), (5, 2, 15), (5, 2, 12)), r"k must have shape \[rows, 2, 16\], got"),
        (((4, 5, 16), (5, 2, 16), (5, 2, 12)), r"q must have .* axes 0 and 1 look swapped"),
        (((5, 16, 4), (5, 2, 16), (5, 2, 12)), r"q must have .* axes 1 and 2 look swapped"),
        (((5, 4, 16), (6, 2, 16), (5, 2, 12)), "k must have as many rows as q, 5, got 6"),
        (((5, 4, 16), (5, 2, 16), (4, 2, 12)), "v must have as many rows as q, 5, got 4"),
        (((5, 64), (5, 2, 16), (5, 2, 12)), r"q must have shape \[rows, 4, 16\], got \(5, 64\)"),
        (((1, 5, 4, 16), (1, 5, 2, 16), (1, 5, 2, 12)), r"q must have shape \[rows, 4, 16\]"),
        (((), (5, 2, 16), (5, 2, 12)), r"q must have shape .*, got \(\)"),
    ],
)
def test_wrong_shapes_are_refused(
    engine: o1core.O1Batch, shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    layer, _ = small_layer(engine)
    before = layer.state()
    with pytest.raises(ValueError, match=message):
        layer.extend(*(np.zeros(s, np.float32) for s in shapes))
    assert same_state(layer.state(), before)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((90, 4, 16), (90, 3, 16), (90, 3, 16)), "q must have a multiple of the 3 groups of k"),
        (((90, 4, 16), (90, 2, 8), (90, 2, 16)), r"k must have shape \[90, 2, 16\], got"),
        (((4, 90, 16), (2, 90, 16), (2, 90, 16)), r"k must have shape .* look swapped"),
        (((90, 4, 16), (90, 2, 16), (91, 2, 16)), r"v must have shape \[90, 2, 16\], got"),
        (((90, 4), (90, 2), (90, 2)), r"q must have shape \[rows, heads, head_dim\], got"),
        (((2, 90, 4, 16), (90, 2, 16), (90, 2, 16)), "k must have 4 axes like q"),
        (((2, 90, 4, 16), (3, 90, 2, 16), (2, 90, 2, 16)), r"k must have shape \[2, 90, 2, 16\]"),
        (((90, 0, 16), (90, 1, 16), (90, 1, 16)), "q must have no empty axis but rows"),
        (((90, 4, 0), (90, 2, 0), (90, 2, 4)), "q must have no empty axis but rows"),
        (((0, 90, 4, 16), (0, 90, 2, 16), (0, 90, 2, 4)), "q must have no empty axis but rows"),
    ],
)
def test_wrong_prompts_are_refused(
    engine: o1core.O1Batch, shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    q, k, v = (np.zeros(s, np.float32) for s in shapes)
    with pytest.raises(ValueError, match=message):
        engine.seal(q, k, v)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_non_finite_rows_are_named(engine: o1core.O1Batch, name: str, bad: float) -> None:
    layer, rows = small_layer(engine)
    before = layer.state()
    arrays: dict[str, Any] = dict(zip("qkv", (x.copy() for x in rows), strict=True))
    arrays[name][133, 1, 3] = bad
    message = rf"{name} must be finite: row 133 holds {bad} at index \(133, 1, 3\)"
    with pytest.raises(ValueError, match=message):
        layer.extend(**arrays)
    with pytest.raises(ValueError, match=message):
        engine.seal(**arrays)
    assert same_state(layer.state(), before)


def test_the_row_of_a_batch_is_named(engine: o1core.O1Batch) -> None:
    q, k, v = (np.stack((x, x)) for x in small_rows(100))
    k[1, 42, 0, 5] = np.nan
    with pytest.raises(ValueError, match=r"row 42 holds nan at index \(1, 42, 0, 5\)"):
        engine.seal(q, k, v)


@pytest.mark.parametrize(("name", "limit"), [("q", 2.0**48), ("k", 2.0**48), ("v", 2.0**96)])
def test_sizes_that_could_overflow_are_refused(
    engine: o1core.O1Batch, name: str, limit: float
) -> None:
    layer, rows = small_layer(engine)
    arrays: dict[str, Any] = dict(zip("qkv", (x.astype(np.float64) for x in rows), strict=True))
    arrays[name][7, 0, 0] = 1.01 * limit
    with pytest.raises(ValueError, match=f"{name} must be at most .* in magnitude: row 7 holds"):
        layer.extend(**arrays)
    arrays[name][7, 0, 0] = limit
    assert np.isfinite(layer.extend(**arrays)).all()
    arrays[name][7, 0, 0] = 1e300
    with pytest.raises(ValueError, match=f"{name} must be at most"):
        layer.extend(**arrays)


@pytest.mark.parametrize("size", [1e-42, 1e-20, 1e9, 2.0**48])
def test_extreme_sizes_stay_finite(engine: o1core.O1Batch, size: float) -> None:
    q, k, v = (x.astype(np.float64) for x in small_rows(280))
    q, k = q / np.abs(q).max() * size, k / np.abs(k).max() * size
    try:
        layer = engine.seal(q[:80], k[:80], v[:80], SMALL)
    except ValueError as fault:
        # Landmark logits of -1e20 have no mixing matrix in float32, and are refused.
        assert "mixing matrix" in str(fault)  # noqa: PT017
        assert size > 1e3
        return
    assert np.isfinite(layer.extend(q[80:], k[80:], v[80:])).all()


def test_check_finite_can_be_waived(engine: o1core.O1Batch) -> None:
    layer, (q, k, v) = small_layer(engine)
    v = v.copy()
    v[150] = np.nan
    out = layer.extend(q, k, v, check_finite=False)
    # What a NaN does to the rows of its sub-chunk is not defined; before that nothing is touched.
    assert np.isfinite(out[:128]).all()
    assert np.isnan(out[150:182]).all(axis=-1).any()


def test_hosts_that_make_warnings_errors(engine: o1core.O1Batch) -> None:
    """A host may have turned numpy's floating-point warnings into exceptions."""
    with np.errstate(all="raise"):
        layer, rows = small_layer(engine)
        layer.extend(*rows)
        q, k, v = small_rows(280)
        peaked = engine.seal(q[:80] * 30, k[:80], v[:80], SMALL)
        peaked.extend(q[80:] * 30, k[80:], v[80:])
        engine.load(peaked.state())
