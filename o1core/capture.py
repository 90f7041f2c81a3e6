"""Captures: files with the q, k and v of one layer, for `o1core run` and `o1core demo`."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32, ROW_LIMITS, as_float32, as_host_array, require_finite

__all__ = ["Capture", "CaptureError", "load"]

Array = npt.NDArray[Any]

UNREADABLE_NPZ = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError)
SAFETENSORS_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


class CaptureError(ValueError):
    """The file is no capture; the text says what it is or lacks, in one line."""


@dataclass(frozen=True, eq=False)
class Capture:
    """Rows of one layer: q `[rows, heads, d]`, k `[rows, groups, d]`, v `[rows, groups, dv]`.

    dtype is what the file had; source is what the file says of itself, if anything.
    """

    name: str
    q: F32
    k: F32
    v: F32
    dtype: str
    source: dict[str, Any] | str | None = None

    def rows(self, first: int, last: int) -> tuple[F32, F32, F32]:
        return self.q[first:last], self.k[first:last], self.v[first:last]


def load(path: Path) -> Capture:
    """The rows of a file, checked as a whole, as float32; CaptureError for anything else."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
        if start.startswith(b"\x93NUMPY"):
            raise CaptureError(f"{path} is a single array: q, k and v are needed, in one .npz")
        read = _read_npz if start.startswith(b"PK") else _read_safetensors
        arrays, dtypes, source = read(path)
    except OSError as fault:
        raise CaptureError(f"{path}: {fault.strerror or fault}") from fault
    try:
        checked = {name: as_host_array(name, array) for name, array in arrays.items()}
        _check_shapes(checked)
        for name, array in checked.items():
            require_finite(name, array, ROW_LIMITS[name])
    except (TypeError, ValueError) as fault:
        raise CaptureError(f"{path}: {fault}") from fault
    q, k, v = (as_float32(checked[name]) for name in "qkv")
    return Capture(path.name, q, k, v, "/".join(dict.fromkeys(dtypes)), _parse_source(source))


def _read_npz(path: Path) -> tuple[dict[str, Array], list[str], Array | str | None]:
    """The arrays q, k and v, their dtypes, and the entry `source`."""
    try:
        # Opened here, since numpy leaves a file open that turns out to be no zip.
        with open(path, "rb") as binary, np.load(binary, allow_pickle=False) as file:
            _require_names(path, file.files)
            arrays = {name: file[name] for name in "qkv"}
            source = file["source"] if "source" in file.files else None
    except CaptureError:
        raise
    except UNREADABLE_NPZ as fault:
        raise CaptureError(f"{path} is not a readable npz file: {fault}") from fault
    # A member that is no array at all comes as bytes.
    dtypes = [x.dtype.name if isinstance(x, np.ndarray) else "bytes" for x in arrays.values()]
    return arrays, dtypes, source


def _read_safetensors(path: Path) -> tuple[dict[str, Array], list[str], Array | str | None]:
    """The same of a safetensors file, where `source` may also be metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())
            _require_names(path, names)
            kinds = [file.get_slice(name).get_dtype() for name in "qkv"]
            for name, kind in zip("qkv", kinds, strict=True):
                if kind not in SAFETENSORS_DTYPES:
                    raise CaptureError(
                        f"{path}: {name} must be one of {', '.join(SAFETENSORS_DTYPES)}, got {kind}"
                    )
            arrays = {
                name: _bfloat16(path, name) if kind == "BF16" else file.get_tensor(name)
                for name, kind in zip("qkv", kinds, strict=True)
            }
            source: Array | str | None = (file.metadata() or {}).get("source")
            if "source" in names and file.get_slice("source").get_dtype() == "U8":
                source = file.get_tensor("source")
    except SafetensorError as fault:
        raise CaptureError(f"{path} is neither npz nor safetensors: {fault}") from fault
    return arrays, [SAFETENSORS_DTYPES[kind] for kind in kinds], source


def _bfloat16(path: Path, name: str) -> Array:
    """A tensor that numpy has no dtype for, as the float32 of which it is the upper half."""
    from safetensors import deserialize

    tensor = dict(deserialize(path.read_bytes()))[name]  # type: ignore[no-untyped-call]
    upper = np.frombuffer(tensor["data"], "<u2").astype(np.uint32)
    return (upper << 16).view(np.float32).reshape(tensor["shape"])


def _require_names(path: Path, names: Sequence[str]) -> None:
    missing = [name for name in "qkv" if name not in names]
    if missing:
        held = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise CaptureError(
            f"{path} must hold q, k and v; {', '.join(missing)} missing, "
            f"it holds {held or 'nothing'}"
        )


def _check_shapes(arrays: dict[str, Array]) -> None:
    """ValueError unless the three are rows of one layer in the documented axis order."""
    q, k, v = (arrays[name] for name in "qkv")
    form = "q [rows, heads, d], k [rows, groups, d], v [rows, groups, dv]"
    got = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not (q.ndim == k.ndim == v.ndim == 3):
        raise ValueError(f"one layer has {form}: three axes each, {got}")
    swapped = ": rows and heads look swapped" if q.shape[1] == k.shape[1] == v.shape[1] else ""
    if not len(q) == len(k) == len(v):
        raise ValueError(f"{form} must have as many rows each, {got}{swapped}")
    if k.shape[1] != v.shape[1] or k.shape[2] != q.shape[2]:
        raise ValueError(f"{form} must agree in groups and d, {got}")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"{form} must have no empty axis, {got}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"heads must be a multiple of groups, {got}")


def _parse_source(said: Array | str | None) -> dict[str, Any] | str | None:
    """What a file says of itself: JSON if it is some, else plain text."""
    if said is None:
        return None
    if isinstance(said, str):
        text = said
    elif said.dtype == np.uint8:
        text = said.tobytes().decode("utf-8", "replace")
    elif said.ndim == 0 and said.dtype.kind in "US":
        text = str(
            said.item() if said.dtype.kind == "U" else said.item().decode("utf-8", "replace")
        )
    else:
        return f"unreadable: {said.dtype} {list(said.shape)}"
    try:
        parsed = json.loads(text)
        json.dumps(parsed, allow_nan=False)  # it must be able to go into a report
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text
