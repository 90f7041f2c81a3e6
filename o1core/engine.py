"""`O1Batch` and `Layer`: what a host application talks to."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from o1core import registry
from o1core.checks import (
    F32,
    ROW_LIMITS,
    UNCHECKED,
    as_float32,
    as_host_array,
    integer,
    not_finite,
    require_finite,
    shape_error,
)
from o1core.config import MAX_ROWS, Config, Geometry
from o1core.errors import BackendFallbackWarning, BackendUnavailable, UnknownBackend
from o1core.executor import DeviceRows, Executor
from o1core.layout import GroupMeta, Meta, state_buffers
from o1core.plan import Plan
from o1core.seal import seal
from o1core.state import LayerState, state_from_buffers

__all__ = ["Layer", "O1Batch", "Snapshot"]


class O1Batch:
    """A device opened once, on which any number of layers run.

    backend: "auto" (the best usable one), a backend's name, or an `Executor` object.
    fallback: the backend that takes over, with a `BackendFallbackWarning`, when the one asked for
        is not usable; `None` raises `BackendUnavailable` instead. A name that no installed backend
        has is always an error.
    device: which device, in the backend's own terms; `None` lets it choose.
    options: what else the backend has, as `wgsl=` of the wgpu backend; only with a backend's name.

    `engine.backend`, `engine.device` and `engine.reason` say what it runs on and why. Calls from
    several threads are safe; they take turns. Use it as a context manager, or call `close()`; an
    `Executor` object stays open, since it is the caller's.
    """

    def __init__(
        self,
        backend: str | Executor = "auto",
        *,
        fallback: str | None = "numpy",
        device: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(backend, (str, Executor)):
            raise TypeError(
                f"backend must be a name or an Executor object, got {type(backend).__name__}"
            )
        if not (fallback is None or isinstance(fallback, str)):
            raise TypeError(f"fallback must be a backend's name or None, got {fallback!r}")
        self._fallback = fallback
        self._spare: Executor | None = None
        self._lock = threading.RLock()
        self._closed = self._torn = False
        _engines.add(self)
        self._owned = not isinstance(backend, Executor)
        self._executor, self.reason = self._open(backend, device, options)

    def _open(
        self, backend: str | Executor, device: Any, options: dict[str, Any]
    ) -> tuple[Executor, str]:
        if options and (isinstance(backend, Executor) or backend == "auto"):
            raise TypeError(
                f"{', '.join(options)} must come with the name of the backend that has it, "
                f"got backend={backend!r}"
            )
        if isinstance(backend, Executor):
            if device is not None:
                raise ValueError(
                    f"device must be None when backend is an Executor object, got {device!r}"
                )
            if not getattr(backend, "name", ""):
                raise TypeError(f"backend must have a name, got {backend!r}")
            return backend, "an Executor object was given"
        try:
            if backend == "auto":
                executor, reason, faults = registry.open_auto(device)
                if faults:
                    _warn(f"auto passed over a broken backend: {'; '.join(faults)}")
                return executor, "; ".join([reason, *faults])
            executor = registry.open_backend(backend, device, options)
            return executor, "; ".join(filter(None, (f"{backend} was asked for", executor.detail)))
        except UnknownBackend:
            raise
        except BackendUnavailable as fault:
            if self._fallback is None or self._fallback == backend:
                raise
            executor = registry.open_backend(self._fallback)
            reason = f"{self._fallback} took over: {fault}"
            _warn(reason)
            return executor, reason

    @property
    def backend(self) -> str:
        """Name of the backend that runs."""
        return self._executor.name

    @property
    def device(self) -> str:
        """What it really runs on."""
        return self._executor.device

    def seal(
        self, q: Any, k: Any, v: Any, config: Config | None = None, *, check_finite: bool = True
    ) -> Layer:
        """A layer from the rows of a prompt (docs/operator.md section 2).

        q `[rows, heads, head_dim]`, k `[rows, groups, head_dim]`, v `[rows, groups, value_dim]`,
        already rotated, heads a multiple of groups; a leading batch axis on all three makes a layer
        of as many sequences. Arrays with the buffer or DLPack protocol, float16, bfloat16, float32
        or float64. A prompt of fewer than `config.seal_rows` rows gives an exact-only layer, which
        seals itself once it has seen that many (section 7).

        Raises TypeError or ValueError naming the argument, the rule and the value.
        """
        config = Config() if config is None else config
        if not isinstance(config, Config):
            raise TypeError(f"config must be a Config, got {type(config).__name__}")
        on_device = self._executor.device_rows({"q": q, "k": k, "v": v})
        arrays = _host_arrays(q, k, v) if on_device is None else on_device.to_host()
        geometry, batch = _prompt_geometry(arrays, config)
        rows = _fold(arrays, batch, check_finite)
        return self.load(seal(*rows, config, geometry, batch))

    def load(self, state: LayerState) -> Layer:
        """A layer that goes on from a state, from whatever backend or machine it came."""
        if not isinstance(state, LayerState):
            raise TypeError(f"state must be a LayerState, got {type(state).__name__}")
        with self._lock:
            executor = self._executor_for(state)
            return Layer(self, executor, state.config, state.batch, _place(executor, state))

    def _executor_for(self, state: LayerState) -> Executor:
        """The engine's executor, or the fallback where it cannot run this layer.

        An exact-only layer must run both as it is and once it has sealed itself.
        """
        self._require_open()
        executor = self._executor
        geometries = {state.geometry}
        if state.exact_only:
            geometries.add(_sealed_geometry(state.config, state.geometry, state.batch))
        reasons = sorted({r for g in geometries for r in executor.unsupported(executor.plan(g, 1))})
        if not reasons:
            return executor
        unavailable = BackendUnavailable(executor.name, reasons)
        if self._fallback is None or self._fallback == executor.name:
            raise unavailable
        if self._spare is None:
            self._spare = registry.open_backend(self._fallback)
        _warn(f"this layer runs on {self._fallback}: {unavailable}")
        return self._spare

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this engine is closed: open another O1Batch")
        if self._torn:
            raise RuntimeError(
                "this process was forked while another thread was in a call of this engine, which "
                "is half done here: open another O1Batch and load states that were taken before"
            )

    def close(self) -> None:
        """Release the device; the layers of this engine cannot be used any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._owned:
                self._executor.close()
            if self._spare is not None:
                self._spare.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"O1Batch(backend={self.backend!r}, device={self.device!r})"


_engines: weakref.WeakSet[O1Batch] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked process: free the locks of threads that are not here."""
    for engine in list(_engines):
        if engine._lock.acquire(blocking=False):
            engine._lock.release()
        else:
            engine._lock, engine._torn = threading.RLock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, eq=False)
class _Standing:
    """Where a layer stands; replaced as a whole, so a call has either happened or not.

    prompt_q holds the queries of an exact-only layer, with which it will be sealed; a sealed layer
    has none. encoded: rows were recorded into the host's encoder, and it is not known yet that they
    were submitted.
    """

    geometry: Geometry
    handle: Any
    meta: tuple[GroupMeta, ...]
    prompt_q: F32 | None
    encoded: bool = False

    @property
    def rows_seen(self) -> int:
        return self.geometry.sinks + self.meta[0].length + self.meta[0].far


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A layer's state at one moment; `Layer.restore` goes back to it, as often as wanted.

    It lies on the layer's device, and `state` is None; a durable one is a copy on the host instead,
    which outlives the device.
    """

    _layer: Layer
    _standing: _Standing
    state: LayerState | None = None

    @property
    def rows_seen(self) -> int:
        """Rows of the sequence at the time of the snapshot."""
        return self._standing.rows_seen


class Layer:
    """One attention layer with constant memory. Made by `O1Batch.seal` and `O1Batch.load`."""

    def __init__(
        self,
        engine: O1Batch,
        executor: Executor,
        config: Config,
        batch: int | None,
        standing: _Standing,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._config = config
        self._batch = batch
        self._at = standing

    @property
    def config(self) -> Config:
        """The settings it was sealed with."""
        return self._config

    @property
    def geometry(self) -> Geometry:
        """The sizes it runs with now; an exact-only layer changes them when it seals."""
        return self._at.geometry

    @property
    def batch(self) -> int | None:
        """Sequences that advance together, `None` for a layer without batch axis."""
        return self._batch

    @property
    def exact_only(self) -> bool:
        """True while too few rows were seen to seal; every key is then exact (section 7)."""
        return self._at.prompt_q is not None

    @property
    def rows_seen(self) -> int:
        """Rows of the sequence so far, prompt included."""
        return self._at.rows_seen

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's state (see `LayerState`); constant once it is sealed."""
        kept = 0 if self._at.prompt_q is None else self._at.prompt_q.nbytes
        return kept + sum(b.nbytes for b in state_buffers(self._at.geometry))

    @property
    def backend(self) -> str:
        """Name of the backend this layer runs on: the engine's, or its fallback."""
        return self._executor.name

    @property
    def device(self) -> str:
        """What this layer really runs on."""
        return self._executor.device

    @overload
    def extend(
        self,
        q: npt.NDArray[Any],
        k: npt.NDArray[Any],
        v: npt.NDArray[Any],
        *,
        check_finite: bool = ...,
    ) -> F32: ...

    @overload
    def extend(self, q: Any, k: Any, v: Any, *, check_finite: bool = ...) -> Any: ...

    def extend(self, q: Any, k: Any, v: Any, *, check_finite: bool = True) -> Any:
        """Attention of the next rows; the state moves past them (docs/operator.md sections 3-5).

        q `[rows, heads, head_dim]`, k `[rows, groups, head_dim]`, v `[rows, groups, value_dim]`
        with any number of rows, also none; with a leading batch axis if the layer has one. Inputs
        as for `O1Batch.seal`. Returns `[rows, heads, value_dim]` float32, batch axis in front: a
        numpy array, or one of the kind of q if the backend takes that where it lies, on its device
        (backend taichi: torch's CUDA tensors, arrays of the language).

        Raises TypeError or ValueError naming argument, rule and value; RuntimeError when the
        backend fails. After any exception the state is bit for bit what it was before the call.
        """
        on_device = self._executor.device_rows({"q": q, "k": k, "v": v})
        if on_device is not None:
            return self._extend_on_device(on_device, check_finite)
        arrays = _host_arrays(q, k, v)
        self._check_shapes({name: array.shape for name, array in arrays.items()})
        rows = _fold(arrays, self._batch, check_finite)
        with self._engine._lock:
            self._engine._require_open()
            self._settle()
            return self._advance(*rows, check_finite)

    def _extend_on_device(self, rows: DeviceRows, check_finite: bool) -> Any:
        """`extend` on arrays of the device; an exact-only layer keeps its rows on the host."""
        self._check_shapes(rows.shapes)
        with self._engine._lock:
            self._engine._require_open()
            self._settle()
            before = self._at
            if before.prompt_q is not None:
                folded = _fold(rows.to_host(), self._batch, check_finite)
                return rows.from_host(self._advance(*folded, check_finite))
            count = rows.shapes["q"][0 if self._batch is None else 1]
            plan = self._executor.plan(before.geometry, count)
            self._require_supported(plan)
            want = plan.meta_after(before.meta)
            checkpoint = self._executor.checkpoint(before.handle, [plan])
            try:
                limits = ROW_LIMITS if check_finite else None
                got, out = rows.run(plan, before.handle, self._batch, limits)
                if got is not None:
                    self._require_meta(plan, want, got)
                self._at = replace(before, meta=want)
            except BaseException:
                self._at = before
                self._executor.rollback(before.handle, checkpoint)
                raise
            return out

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        g, sequences = self._at.geometry, self._batch or 1
        groups = g.groups // sequences
        want: dict[str, tuple[int, int]] = {
            "q": (groups * g.heads_per_group, g.head_dim),
            "k": (groups, g.head_dim),
            "v": (groups, g.value_dim),
        }
        for name, shape in shapes.items():
            lead: tuple[int | str, ...] = ("rows",) if self._batch is None else (sequences, "rows")
            rows_axis = len(lead) - 1
            full = (*lead, *want[name])
            fits = len(shape) == len(full) and all(
                isinstance(size, str) or size == got for size, got in zip(full, shape, strict=True)
            )
            if not fits:
                raise shape_error(name, shape, full)
            if shape[rows_axis] != shapes["q"][rows_axis]:
                raise ValueError(
                    f"{name} must have as many rows as q, {shapes['q'][rows_axis]}, "
                    f"got {shape[rows_axis]}"
                )

    def _advance(self, q: F32, k: F32, v: F32, check_finite: bool) -> F32:
        before, rows = self._at, len(q)
        # An exact-only layer seals in the middle of a call, as soon as it has seen enough rows, so
        # that it does not matter how a stream is cut into calls.
        first = rows
        if before.prompt_q is not None:
            first = min(rows, self._config.seal_rows - before.rows_seen)
        plans = [self._executor.plan(before.geometry, first)]
        if first < rows:
            sealed = _sealed_geometry(self._config, before.geometry, self._batch)
            plans.append(self._executor.plan(sealed, rows - first))
        for plan in plans:
            self._require_supported(plan)
        out = np.empty((rows, before.geometry.heads, before.geometry.value_dim), np.float32)
        checkpoint = self._executor.checkpoint(before.handle, plans)
        try:
            at = self._run(plans[0], before, q[:first], k[:first], v[:first], out[:first])
            if at.prompt_q is not None and at.rows_seen == self._config.seal_rows:
                at = self._seal(at)
                if first < rows:
                    at = self._run(plans[1], at, q[first:], k[first:], v[first:], out[first:])
            if check_finite and not _all_finite(out):
                raise not_finite(self.backend)
            result = _unfold(out, self._batch)
            self._at = at
        except BaseException:
            self._at = before
            self._executor.rollback(before.handle, checkpoint)
            raise
        return result

    def _require_supported(self, plan: Plan) -> None:
        if reasons := self._executor.unsupported(plan):
            raise BackendUnavailable(self._executor.name, reasons)

    def _run(self, plan: Plan, at: _Standing, q: F32, k: F32, v: F32, out: F32) -> _Standing:
        """One plan from one standing to the next, checked against the meta it predicts."""
        if plan.rows == 0:
            return at
        want = plan.meta_after(at.meta)
        self._require_meta(plan, want, self._executor.run(plan, at.handle, q, k, v, out))
        prompt_q = None if at.prompt_q is None else np.concatenate((at.prompt_q, q))
        return _Standing(at.geometry, at.handle, want, prompt_q)

    def _require_meta(self, plan: Plan, want: tuple[GroupMeta, ...], meta: Meta) -> None:
        got = tuple(GroupMeta(*group) for group in meta)
        if got != want:
            raise RuntimeError(
                f"backend {self.backend} holds meta {got} after {plan.rows} rows where the plan "
                f"predicts {want}; the layer is as it was before the call"
            )

    def _seal(self, at: _Standing) -> _Standing:
        """The standing of an exact-only layer that has seen enough rows."""
        assert at.prompt_q is not None
        buffers = self._executor.read(at.handle)
        # Nothing was evicted yet, so slot p holds row p.
        k, v = (buffers[name][:, : at.rows_seen].swapaxes(0, 1) for name in ("ring_k", "ring_v"))
        geometry = _sealed_geometry(self._config, at.geometry, self._batch)
        state = seal(at.prompt_q, k, v, self._config, geometry, self._batch)
        return _place(self._executor, state)

    def encode(self, encoder: Any, q: Any, k: Any, v: Any, out: Any, rows: int) -> None:
        """Record the next rows into the host's command encoder; nothing is read back.

        For hosts that keep everything on the GPU, on an engine opened with their device (backend
        wgpu: `encoder` is a `wgpu.GPUCommandEncoder` or an open compute pass; the buffers are
        `wgpu.GPUBuffer` of usage STORAGE, or tuples of one and an offset in bytes). They hold
        float32: q `[rows, heads, head_dim]`, k `[rows, groups, head_dim]`, v
        `[rows, groups, value_dim]`; out `[rows, heads, value_dim]` is written. The sequences of a
        batch lie side by side, `[rows, batch * heads, head_dim]`.

        The rows count as seen from this call on, so submit the encoder before the layer is used
        otherwise; recording more rows, of this or of other layers, is fine. Encoders must be
        submitted in the order in which rows of a layer were recorded into them. Values are not
        checked: they must be finite, within section 8.

        Raises TypeError or ValueError naming the argument, before anything is recorded;
        NotImplementedError for backends without encoders; RuntimeError for an exact-only layer,
        which needs its rows on the host until it is sealed.
        """
        rows = integer("rows", rows, 0, MAX_ROWS)
        with self._engine._lock:
            self._engine._require_open()
            at = self._at
            if at.prompt_q is not None:
                raise RuntimeError(
                    f"this layer is exact-only until it has seen {self._config.seal_rows} rows "
                    f"(it has seen {at.rows_seen}): extend it with arrays until then"
                )
            self._executor.check_encode(at.geometry, rows, encoder, q, k, v, out)
            plan = self._executor.plan(at.geometry, rows)
            self._require_supported(plan)
            meta = plan.meta_after(at.meta)
            self._executor.encode(plan, at.handle, encoder, q, k, v, out)
            if rows:
                self._at = replace(at, meta=meta, encoded=True)

    def _settle(self) -> None:
        """RuntimeError unless the rows that were encoded have arrived on the device."""
        at = self._at
        if at.encoded:
            held = tuple(GroupMeta(*group) for group in self._executor.meta(at.handle))
            if held != at.meta:
                raise RuntimeError(
                    f"rows were encoded for this layer but not submitted (the device holds meta "
                    f"{held}, with them it would be {at.meta}): submit the encoder first, or "
                    "go back to a snapshot"
                )
            self._at = replace(at, encoded=False)

    def state(self) -> LayerState:
        """The whole state as numpy copies; save it, or load it into any engine."""
        with self._engine._lock:
            self._engine._require_open()
            self._settle()
            at = self._at
            return state_from_buffers(
                self._config, at.geometry, self._executor.read(at.handle), self._batch, at.prompt_q
            )

    def snapshot(self, *, durable: bool = False) -> Snapshot:
        """The state as it is, to go back to with `restore`.

        It is kept on the device, which costs next to nothing, and is lost with it; durable keeps a
        copy on the host instead.
        """
        with self._engine._lock:
            self._engine._require_open()
            if durable:
                state = self.state()
                return Snapshot(self, replace(self._at, handle=None), state)
            return Snapshot(self, self._copy())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this layer or of a fork of it; the snapshot stays usable.

        ValueError for a snapshot of another engine or of a layer with other settings.
        """
        if not isinstance(snapshot, Snapshot):
            raise TypeError(f"snapshot must be a Snapshot, got {type(snapshot).__name__}")
        source = snapshot._layer
        if source._executor is not self._executor:
            raise ValueError(
                "snapshot must come from a layer of this engine, got one of another: "
                "move states between engines with layer.state() and engine.load()"
            )
        if source._kind() != self._kind():
            raise ValueError(
                f"snapshot must come from a layer of the same settings and sizes, {self._kind()}, "
                f"got {source._kind()}"
            )
        with self._engine._lock:
            self._engine._require_open()
            if snapshot.state is not None:
                # The device may be another one by now.
                self._require_supported(self._executor.plan(snapshot.state.geometry, 1))
                self._at = _place(self._executor, snapshot.state)
            else:
                at = snapshot._standing
                handle = self._executor.copy(at.handle, at.geometry)
                self._at = replace(at, handle=handle)

    def fork(self) -> Layer:
        """An independent layer that goes on from the same state, on the same engine."""
        with self._engine._lock:
            self._engine._require_open()
            return Layer(self._engine, self._executor, self._config, self._batch, self._copy())

    def __copy__(self) -> Layer:
        return self.fork()  # two layers must never share a handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Layer:
        return self.fork()

    def _copy(self) -> _Standing:
        self._settle()
        at = self._at
        return replace(at, handle=self._executor.copy(at.handle, at.geometry))

    def _kind(self) -> tuple[Any, ...]:
        g = self._at.geometry
        return self._config, self._batch, (g.groups, g.heads_per_group, g.head_dim, g.value_dim)

    def __repr__(self) -> str:
        g = self._at.geometry
        kind = "exact-only" if self.exact_only else f"{g.far.name} far field"
        batch = "" if self._batch is None else f", batch {self._batch}"
        return (
            f"<Layer on {self.backend}: {g.groups} groups x {g.heads_per_group} heads{batch}, "
            f"{kind}, {self.rows_seen} rows seen, {self.nbytes:,} bytes>"
        )


def _place(executor: Executor, state: LayerState) -> _Standing:
    """A state put on the executor's device."""
    handle = executor.allocate(state.geometry)
    executor.write(handle, state.buffers())
    prompt_q = state.arrays["prompt_q"] if state.exact_only else None
    return _Standing(state.geometry, handle, state.groups_meta, prompt_q)


def _sealed_geometry(config: Config, geometry: Geometry, batch: int | None) -> Geometry:
    """The geometry that an exact-only layer gets when it seals."""
    return config.geometry_like(geometry, rows=config.seal_rows, batch=batch)


def _prompt_geometry(
    arrays: dict[str, npt.NDArray[Any]], config: Config
) -> tuple[Geometry, int | None]:
    """Geometry and batch of a prompt, or the error that says what does not fit."""
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    axes = {
        "q": ("rows", "heads", "head_dim"),
        "k": ("rows", "groups", "head_dim"),
        "v": ("rows", "groups", "value_dim"),
    }
    for name, array in arrays.items():
        if array.ndim not in (3, 4):
            raise shape_error(name, array.shape, axes[name])
        if array.ndim != q.ndim:
            raise ValueError(f"{name} must have {q.ndim} axes like q, got shape {array.shape}")
        if 0 in (*array.shape[: q.ndim - 3], *array.shape[-2:]):
            raise ValueError(f"{name} must have no empty axis but rows, got shape {array.shape}")
    batch = q.shape[0] if q.ndim == 4 else None
    rows, heads, head_dim = q.shape[-3:]
    groups, value_dim = v.shape[-2:]
    for name, array, want in (
        ("k", k, (*q.shape[:-2], groups, head_dim)),
        ("v", v, (*q.shape[:-2], groups, value_dim)),
    ):
        if array.shape != want:
            fault = shape_error(name, array.shape, want)
            if array.shape[-3] != rows and array.shape[-2] == heads:
                fault = ValueError(f"{fault}: rows and heads look swapped in all arrays")
            raise fault
    if heads % groups:
        raise ValueError(
            f"q must have a multiple of the {groups} groups of k as heads, got {heads}"
        )
    geometry = config.geometry(
        groups=groups,
        heads_per_group=heads // groups,
        head_dim=head_dim,
        value_dim=value_dim,
        rows=rows,
        batch=batch or 1,
    )
    return geometry, batch


def _host_arrays(q: Any, k: Any, v: Any) -> dict[str, npt.NDArray[Any]]:
    return {name: as_host_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}


def _fold(
    arrays: dict[str, npt.NDArray[Any]], batch: int | None, check_finite: bool
) -> tuple[F32, F32, F32]:
    """Checked float32 rows `[rows, heads, dim]`, the sequences of a batch as further groups."""
    folded: list[F32] = []
    with np.errstate(all="ignore"):  # unchecked values may overflow in the rounding
        for name, array in arrays.items():
            if check_finite:
                require_finite(
                    name,
                    array,
                    ROW_LIMITS[name],
                    row_axis=0 if batch is None else 1,
                    way_out=UNCHECKED,
                )
            if batch is None:
                folded.append(as_float32(array))
            else:
                apart = as_float32(array.swapaxes(0, 1))
                folded.append(apart.reshape(len(apart), -1, apart.shape[-1]))
    return folded[0], folded[1], folded[2]


def _unfold(out: F32, batch: int | None) -> F32:
    """`[rows, heads, value_dim]` with the batch axis back in front."""
    if batch is None:
        return out
    rows, heads, dim = out.shape
    apart = out.reshape(rows, batch, heads // batch, dim).swapaxes(0, 1)
    return np.ascontiguousarray(apart)


def _all_finite(out: F32) -> bool:
    # NaN survives max and min; this makes no temporary.
    return out.size == 0 or bool(np.isfinite(out.max()) and np.isfinite(out.min()))


def _warn(text: str) -> None:
    """Warn at the line of the caller outside this module, however deep the call is here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals["__name__"] == __name__:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, BackendFallbackWarning, stacklevel=level)
