"""`LayerState`: everything a layer needs to go on, on any backend or machine, and its file."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from o1core.checks import MAX_KEY, MAX_VALUE, integer, require_finite
from o1core.config import MAX_ROWS, Config, Geometry
from o1core.layout import GroupMeta, state_buffers

__all__ = ["LayerState"]

Array = npt.NDArray[Any]

FORMAT, VERSION = "o1core-layer-state", "1"


@dataclass(frozen=True, eq=False, repr=False)
class LayerState:
    """The state of one layer as read-only numpy arrays (docs/operator.md section 1).

    arrays, with G groups (sequences of a batch folded in), H heads a group, W the ring stride:
    `meta [G,3]` uint32 (length, head, far), `ring_k [G,W,d]`, `ring_v [G,W,dv]`,
    `sink_k [G,S,d]`, `sink_v [G,S,dv]`, then the far field's own; for landmarks
    `k_landmarks [G,m,d]`, `q_landmarks [G,H,m,d]`, `mix [G,H,m,m]`, `far_max [G,H,m]`,
    `far_mass [G,H,m]`, `far_num [G,H,m,dv]`. An exact-only layer (section 7) keeps the queries it
    will be sealed with, `prompt_q [rows, G*H, d]`. Every array is also an attribute.

    batch is the number of sequences folded into the groups, `None` for a layer without batch axis.

    Constructing one checks shapes, dtypes, values and meta, copies the arrays and clears ring slots
    that hold no key; it raises ValueError or TypeError naming array, rule and value.
    """

    config: Config
    geometry: Geometry
    arrays: Mapping[str, Array]
    batch: int | None = None
    exact_only: bool = False

    def __post_init__(self) -> None:
        _check_frame(self.config, self.geometry, self.batch, self.exact_only)
        object.__setattr__(self, "arrays", MappingProxyType(_check_arrays(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        frame = (self.config, self.geometry, dict(self.arrays), self.batch, self.exact_only)
        return LayerState, frame

    def __getattr__(self, name: str) -> Array:
        arrays = self.__dict__.get("arrays", {})
        if name in arrays:
            found: Array = arrays[name]
            return found
        raise AttributeError(f"LayerState has no array {name!r}; it has {', '.join(arrays)}")

    @property
    def groups_meta(self) -> tuple[GroupMeta, ...]:
        """`meta` as one named tuple a group."""
        return tuple(GroupMeta(*map(int, row)) for row in self.arrays["meta"])

    @property
    def rows_seen(self) -> int:
        """Rows of the sequence so far, prompt included."""
        first = self.groups_meta[0]
        return self.geometry.sinks + first.length + first.far

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays.values())

    def replace(self, **arrays: Array) -> LayerState:
        """A state with some arrays exchanged, checked like a new one."""
        unknown = set(arrays) - set(self.arrays)
        if unknown:
            raise ValueError(
                f"replace() knows {', '.join(self.arrays)}; got {', '.join(sorted(unknown))}"
            )
        return LayerState(
            self.config, self.geometry, {**self.arrays, **arrays}, self.batch, self.exact_only
        )

    def buffers(self) -> dict[str, Array]:
        """The state as the plan's buffer table has it: name -> C-contiguous array."""
        packed = {n: self.arrays[n] for n in ("ring_k", "ring_v", "sink_k", "sink_v")}
        windows = np.array(self.geometry.windows, np.uint32)[:, None]
        packed["meta"] = np.concatenate((self.arrays["meta"], windows), axis=1)
        packed.update(self.geometry.far.pack(self.arrays))
        return {b.name: np.ascontiguousarray(packed[b.name]) for b in state_buffers(self.geometry)}

    def __repr__(self) -> str:
        kind = "exact-only" if self.exact_only else f"{self.geometry.landmarks} landmarks"
        return (
            f"LayerState({self.geometry.groups} groups x {self.geometry.heads_per_group} heads, "
            f"{kind}, {self.rows_seen} rows seen, {self.nbytes:,} bytes)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file; `LayerState.load` reads it on any machine."""
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        frame = {
            "config": self.config.to_dict(),
            "geometry": self.geometry.to_dict(),
            "batch": self.batch,
            "exact_only": self.exact_only,
        }
        layer = json.dumps(frame)
        arrays = {n: np.ascontiguousarray(a) for n, a in self.arrays.items()}
        metadata = {
            "format": FORMAT,
            "version": VERSION,
            "layer": layer,
            "crc32": _checksum(layer, arrays),
        }
        # A reader must never meet half a file: write beside it, then move.
        partial = f"{os.fspath(path)}.partial"
        try:
            save_file(arrays, partial, metadata)
            os.replace(partial, path)
        except BaseException as fault:
            if os.path.exists(partial):
                os.remove(partial)
            if isinstance(fault, SafetensorError):
                raise OSError(f"path {os.fspath(path)!r} cannot be written: {fault}") from fault
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LayerState:
        """Read a file written by `save`.

        FileNotFoundError when there is none; ValueError when it is no state file, is truncated,
        has another version, or holds a state that cannot be.
        """
        from safetensors import SafetensorError, safe_open

        name = os.fspath(path)
        if not os.path.isfile(name):
            raise FileNotFoundError(
                f"path must be a state file, got {name!r}: there is no such file"
            )
        try:
            with safe_open(name, framework="np") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(
                        f"{name} must be an {FORMAT} file, got format {metadata.get('format')!r}"
                    )
                if metadata.get("version") != VERSION:
                    raise ValueError(
                        f"{name}: state version must be {VERSION}, got {metadata.get('version')!r}"
                    )
                arrays = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
                if metadata["crc32"] != _checksum(metadata["layer"], arrays):
                    raise ValueError(f"{name} is damaged: its contents do not have its checksum")
                frame = json.loads(metadata["layer"])
            return cls(
                Config(**frame["config"]),
                Geometry(**frame["geometry"]),
                arrays,
                frame["batch"],
                frame["exact_only"],
            )
        except (
            SafetensorError,
            json.JSONDecodeError,
            RecursionError,
            KeyError,
            TypeError,
        ) as fault:
            raise ValueError(f"{name} is not a readable state file: {fault}") from fault


def _checksum(layer: str, arrays: Mapping[str, Array]) -> str:
    """Of the text that describes the layer, and of names and contents in the order of the names."""
    crc = zlib.crc32(layer.encode())
    for name in sorted(arrays):
        crc = zlib.crc32(
            np.ascontiguousarray(arrays[name]).tobytes(), zlib.crc32(name.encode(), crc)
        )
    return f"{crc:08x}"


def _check_frame(config: Config, geometry: Geometry, batch: int | None, exact_only: bool) -> None:
    """The geometry must be one that the configuration can give."""
    if not isinstance(config, Config):
        raise TypeError(f"config must be a Config, got {type(config).__name__}")
    if not isinstance(geometry, Geometry):
        raise TypeError(f"geometry must be a Geometry, got {type(geometry).__name__}")
    if not isinstance(exact_only, bool):
        raise TypeError(f"exact_only must be a bool, got {exact_only!r}")
    sequences = 1 if batch is None else integer("batch", batch, 1)
    if geometry.groups % sequences:
        raise ValueError(
            f"batch must divide the {geometry.groups} groups of the geometry, got {batch}"
        )
    rows = config.seal_rows - 1 if exact_only else MAX_ROWS
    want = config.geometry_like(geometry, rows=rows, batch=batch)
    for field in ("windows", "sinks", "scale", "rectifier"):
        if getattr(geometry, field) != getattr(want, field):
            raise ValueError(
                f"geometry.{field} must be {getattr(want, field)!r} as the config says, "
                f"got {getattr(geometry, field)!r}"
            )
    # A short prompt uses fewer landmarks than the budget, never more, and never none.
    if geometry.landmarks > want.landmarks or (geometry.landmarks == 0) != (want.landmarks == 0):
        raise ValueError(
            f"geometry.landmarks must be {'4 to ' if want.landmarks else ''}{want.landmarks} "
            f"as the config says, got {geometry.landmarks}"
        )


def _check_arrays(state: LayerState) -> dict[str, Array]:
    """Checked, read-only copies of the arrays."""
    config, g = state.config, state.geometry
    shapes: dict[str, tuple[int, ...]] = {"meta": (g.groups, 3)}
    for buffer in state_buffers(g)[1:5]:
        assert buffer.shape is not None
        shapes[buffer.name] = buffer.shape
    shapes.update(g.far.arrays(g))
    if not isinstance(state.arrays, Mapping):
        raise TypeError(f"arrays must be a mapping, got {type(state.arrays).__name__}")
    given = dict(state.arrays)
    if state.exact_only:
        rows = np.shape(given.get("prompt_q", ()))[:1]
        shapes["prompt_q"] = ((*rows, 0)[0], g.heads, g.head_dim)
    if set(given) != set(shapes):
        raise ValueError(f"arrays must be {', '.join(shapes)}; got {', '.join(given)}")
    checked: dict[str, Array] = {}
    for name, shape in shapes.items():
        array = given[name]
        dtype = np.dtype(np.uint32 if name == "meta" else np.float32)
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            raise TypeError(
                f"state array {name} must be a {dtype} numpy array, "
                f"got {getattr(array, 'dtype', type(array).__name__)}"
            )
        if array.shape != shape:
            raise ValueError(f"state array {name} must have shape {shape}, got {array.shape}")
        checked[name] = array.copy(order="C")
    meta = tuple(GroupMeta(*map(int, row)) for row in checked["meta"])
    pushed = meta[0].length + meta[0].far
    for i, (group, window) in enumerate(zip(meta, g.windows, strict=True)):
        if group.length > window or group.head >= window or (group.far and group.length < window):
            raise ValueError(
                f"meta of group {i} must have length <= window, head < window, and a full ring "
                f"once keys went far; got {tuple(group)} with window {window}"
            )
        if group.length + group.far != pushed:
            raise ValueError(
                f"meta must have length + far equal in all groups, got {group.length + group.far} "
                f"in group {i} and {pushed} in group 0"
            )
        empty = (group.head + np.arange(group.length, window)) % window
        for ring in (checked["ring_k"], checked["ring_v"]):
            ring[i, empty] = 0
            ring[i, window:] = 0
    if state.exact_only:
        if pushed >= config.seal_rows or any(group.head for group in meta):
            raise ValueError(
                f"an exact-only state must hold fewer than {config.seal_rows} rows, "
                f"the oldest in slot 0; got {pushed}"
            )
        if len(checked["prompt_q"]) != pushed:
            raise ValueError(
                f"prompt_q must have one row for each of the {pushed} rows seen, "
                f"got {len(checked['prompt_q'])}"
            )
    for name, limit in (
        *((n, MAX_KEY) for n in ("ring_k", "sink_k", "prompt_q") if n in checked),
        *((n, MAX_VALUE) for n in ("ring_v", "sink_v")),
    ):
        require_finite(f"state array {name}", checked[name], limit)
    g.far.check(checked, g, meta)
    for array in checked.values():
        array.flags.writeable = False
    return checked


def state_from_buffers(
    config: Config,
    geometry: Geometry,
    buffers: Mapping[str, Array],
    batch: int | None,
    prompt_q: Array | None,
) -> LayerState:
    """The inverse of `LayerState.buffers`; prompt_q is what an exact-only layer keeps beside."""
    arrays = {n: buffers[n] for n in ("ring_k", "ring_v", "sink_k", "sink_v")}
    arrays["meta"] = buffers["meta"][:, :3]
    arrays.update(geometry.far.unpack(buffers))
    if prompt_q is not None:
        arrays["prompt_q"] = prompt_q
    return LayerState(config, geometry, arrays, batch, prompt_q is not None)
