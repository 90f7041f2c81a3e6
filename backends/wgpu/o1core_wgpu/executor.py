"""The wgpu executor: plans as command buffers, states as buffers on the device."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import wgpu

from o1core.checks import F32, integer
from o1core.config import Geometry
from o1core.errors import BackendUnavailable
from o1core.executor import Buffers, Executor
from o1core.layout import Buffer, Meta, Strategy, as_meta, buffers, state_buffers
from o1core.meter import Meter
from o1core.plan import MAX_SCRATCH, MAX_SUB_CHUNK, Plan, scratch_bytes
from o1core_wgpu.device import Gpu, open_gpu, software_adapter
from o1core_wgpu.kernel_set import GivenKernels, KernelSet, own_kernels
from o1core_wgpu.meter import WgpuMeter
from o1core_wgpu.native import Launched, record
from o1core_wgpu.source import ENVIRONMENT, load
from o1core_wgpu.workspace import (
    STAGING,
    STORAGE,
    Bound,
    Checkpoint,
    Piece,
    Step,
    Stored,
    WgpuState,
    Workspace,
)

__all__ = ["WgpuExecutor", "WgpuState"]

log = logging.getLogger(__name__)

SCRATCH, PARAMETERS = 13, 15

SUBMITTED_ROWS = 2**16
"""In one submission; a longer call is several, so that no watchdog sees one run on."""
ARRAY_BUDGET = 2**28
"""Bytes of an array in one submission, for the same reason and to spare memory."""
BOUND_SETS = 8
"""How many sets of input buffers a layer keeps bind groups for."""

Rows = tuple[F32, F32, F32, F32]
"""q, k, v and out."""


class WgpuExecutor(Executor):
    """Runs plans on a GPU through WebGPU; on a software adapter when there is no other.

    The kernels are o1core's own unless `wgsl` names others (see `open`).
    """

    name = "wgpu"
    auto_rank: ClassVar[int] = 20

    def __init__(self, gpu: Gpu, kernels: KernelSet, device: Any = None) -> None:
        self.software = gpu.software
        self.device = gpu.name
        self.detail = f"kernels: {kernels.label}"
        self._kernels = kernels
        self._asked = device
        self._lock = threading.RLock()
        self._reasons: dict[tuple[Geometry, Strategy], list[str]] = {}
        self.strategies = kernels.strategies
        self.use_strategy(None)
        self._use(gpu)

    def _use(self, gpu: Gpu) -> None:
        self.max_scratch, self.largest_scratch = MAX_SCRATCH, gpu.largest_binding
        pipelines, work = gpu.pipelines(self._kernels), Workspace(gpu)
        self._gpu, self._pipelines, self._work = gpu, pipelines, work

    @classmethod
    def open(
        cls,
        device: Any = None,
        *,
        wgsl: str | os.PathLike[str] | None = None,
        strategy: str | None = None,
    ) -> Self:
        """An executor on an adapter (see `o1core_wgpu.device.open_gpu`), or on the host's device.

        wgsl: a `.wgsl` file, or a Rust source that holds the text, with kernels of the interface of
        docs/operator.md section 6; "original" stands for the upstream engine's, where O1CORE_WGSL
        names them or in cargo's folders, "own" for o1core's own. Without it, the environment
        variable O1CORE_WGSL names them, and otherwise they are o1core's own. strategy:
        "whole-call", which o1core's own take by themselves, or "sub-chunk", the only one of others.

        BackendUnavailable when this machine has no adapter or one with limits too small, or the
        variable names no such kernels; FileNotFoundError, TypeError or ValueError for arguments
        that are wrong.
        """
        named: str | os.PathLike[str] | None = os.environ.get(ENVIRONMENT) or None
        if wgsl is not None:
            named = None if wgsl == "own" else wgsl
        try:
            kernels = own_kernels() if named is None else GivenKernels(load(named))
        except (OSError, ValueError) as fault:
            if wgsl is not None:
                raise
            raise BackendUnavailable(cls.name, [f"{ENVIRONMENT} is set, and {fault}"]) from fault
        gpu = open_gpu(device)
        if missing := gpu.missing(kernels):
            raise BackendUnavailable(cls.name, missing)
        try:
            executor = cls(gpu, kernels, device)
            executor.use_strategy(strategy)
            return executor
        except wgpu.GPUError as fault:
            if named is None or gpu.lost_by_now():
                raise
            refusal = (
                f"wgsl must be kernels that compile on {gpu.name}, got {kernels.label}: {fault}"
            )
            if wgsl is not None:
                raise ValueError(refusal) from fault
            raise BackendUnavailable(cls.name, [f"{ENVIRONMENT} is set, and {refusal}"]) from fault

    @classmethod
    def variants(cls) -> Mapping[str, Mapping[str, Any]]:
        return {
            cls.name: {"wgsl": "own"},
            f"{cls.name}-sub-chunk": {"wgsl": "own", "strategy": "sub-chunk"},
            f"{cls.name}-original": {"wgsl": "original"},
        }

    @classmethod
    def why_not_auto(cls, device: Any = None) -> str:
        name = software_adapter(device)
        return f"{cls.name} has only a software adapter ({name})" if name else ""

    def unsupported(self, plan: Plan) -> list[str]:
        key = plan.geometry, plan.strategy
        reasons = self._reasons.get(key)
        if reasons is None:
            if len(self._reasons) > 256:
                self._reasons.clear()
            reasons = self._reasons[key] = self._why_not(*key)
        return list(reasons)

    def _why_not(self, g: Geometry, strategy: Strategy) -> list[str]:
        label = self._kernels.label
        if strategy not in self.strategies:
            known = " or ".join(map(repr, self.strategies))
            return [f"strategy must be {known} ({label}), got {strategy!r}"]
        reasons = [f"{x} ({label})" for x in self._kernels.limits(g)]
        # Calls are split where they must be, so one sub-chunk decides.
        plan = self._plan(g, min(MAX_SUB_CHUNK, *g.windows), strategy)
        largest = self._gpu.largest_binding
        sizes = {b.name: b.nbytes for b in plan.buffers if b.shape is not None}
        sizes["out"] += sizes["meta"]  # they are read back in one buffer
        sizes["scratch"] = self._kernels.scratch_bytes(plan)
        reasons += [
            f"{name} must have at most {largest:,} bytes (the largest binding of {self.device}), "
            f"got {nbytes:,}"
            for name, nbytes in sizes.items()
            if nbytes > largest
        ]
        if reasons:
            return reasons
        most = self._gpu.limits["max-compute-workgroups-per-dimension"]
        for launch in self._kernels.launches(plan, plan.slabs):
            if max(launch.workgroups) > most:
                reasons.append(
                    f"{launch.entry_point} must have at most {most} workgroups a dimension "
                    f"({self.device}), got {launch.workgroups} for {g.groups} groups of "
                    f"{g.heads_per_group} heads, {g.landmarks} landmarks"
                )
        return reasons

    def plan(self, geometry: Geometry, rows: int) -> Plan:
        return self._plan(geometry, rows, self.strategy)

    def _plan(self, geometry: Geometry, rows: int, strategy: Strategy) -> Plan:
        # A slab has to lie within what one submission binds, and its launches within the grid.
        widest, sub_chunk = (
            max(row_bytes(geometry).values()),
            scratch_bytes(geometry, MAX_SUB_CHUNK),
        )
        fits = min(self._largest(geometry), ARRAY_BUDGET) // widest
        return Plan.build(
            geometry,
            rows,
            strategy=strategy,
            scratch=min(max(self.max_scratch, sub_chunk), self.largest_scratch),
            slab=max(1, min(self.max_slab, fits, self._kernels.most_rows(geometry))),
        )

    def _largest(self, g: Geometry) -> int:
        """Bytes that an array of rows may have: as a binding, and read back behind meta."""
        return min(self._gpu.largest_binding, self._gpu.largest_buffer - 16 * g.groups)

    def meter(self) -> Meter:
        return WgpuMeter(self._gpu)

    # State ----------------------------------------------------------------------------------------

    def allocate(self, geometry: Geometry) -> WgpuState:
        self._gpu.require_process()
        with self._lock:
            if self._gpu.lost_by_now():
                self._reopen()
            with self._guarded(self._gpu) as gpu:
                table = state_buffers(geometry)
                return WgpuState(
                    gpu, geometry, {b.name: gpu.buffer(b.nbytes, STORAGE) for b in table}
                )

    def _reopen(self) -> None:
        """A new device in place of the lost one; what was on that one stays lost."""
        if self._gpu.adopted:
            self._gpu.require_live()
        log.warning("%s was lost and is opened again", self.device)
        self._use(open_gpu(self._asked))

    def write(self, handle: WgpuState, buffers: Buffers) -> None:
        with self._using(handle) as gpu:
            for name, array in buffers.items():
                if array.nbytes:
                    gpu.device.queue.write_buffer(handle.buffers[name], 0, array)
            # Until they are submitted, writes hold copies of the arrays, and the buffers.
            gpu.submit(gpu.device.create_command_encoder())
            if "meta" in buffers:
                handle.meta = as_meta(buffers["meta"])

    def read(self, handle: WgpuState) -> dict[str, npt.NDArray[Any]]:
        with self._using(handle):
            return _read(handle, state_buffers(handle.geometry))

    def meta(self, handle: WgpuState) -> Meta:
        with self._using(handle):
            return _read_meta(handle)

    def copy(self, handle: WgpuState, geometry: Geometry) -> WgpuState:
        with self._using(handle) as gpu:
            stored = {n: gpu.buffer(b.size, STORAGE) for n, b in handle.buffers.items()}
            _copy(gpu, geometry, handle.buffers, stored)
            return WgpuState(gpu, geometry, stored, handle.meta)

    def checkpoint(self, handle: WgpuState, plans: Sequence[Plan]) -> Checkpoint:
        del plans  # whatever they are, the same buffers are written
        with self._using(handle):
            handle.checkpoint = self._work.checkpoint(handle.geometry, handle.meta)
            return handle.checkpoint

    def rollback(self, handle: WgpuState, checkpoint: Checkpoint) -> None:
        # Noted first: should this be interrupted too, the next use of the handle does it.
        handle.checkpoint, handle.undo = None, checkpoint
        if not handle.gpu.lost_by_now():
            with self._using(handle):
                pass

    def close(self) -> None:
        """Release what calls share; the device stays open for other engines."""
        self._work.clear()

    # Running --------------------------------------------------------------------------------------

    def run(self, plan: Plan, handle: WgpuState, q: F32, k: F32, v: F32, out: F32) -> Meta:
        with self._using(handle):
            meta = handle.meta
            for piece in self._pieces(plan):
                call = self._call(self._work, plan, handle, piece, (q, k, v, out))
                staging = self._work.buffer("staging", call.told_bytes, STAGING)
                self._submit(call, call.program, staging)
                try:
                    meta = call.read_back(staging)
                except BaseException:
                    self._work.forget("staging")
                    raise
            handle.meta = meta
        return meta

    def steps(
        self, plan: Plan, handle: WgpuState, q: F32, k: F32, v: F32, out: F32
    ) -> Iterator[tuple[str, ...]] | None:
        if len(plan.slabs) != 1:
            return None  # every slab runs all kernels
        return self._steps(plan, handle, (q, k, v, out))

    def _steps(self, plan: Plan, handle: WgpuState, rows: Rows) -> Iterator[tuple[str, ...]]:
        asked = {dispatch.kernel for dispatch in plan.dispatches}
        (piece,) = self._pieces(plan)
        with self._using(handle) as gpu:
            # A workspace of its own: what is in scratch must outlast calls between the steps.
            call = self._call(Workspace(gpu), plan, handle, piece, rows)
        for step in call.program:
            done = self._kernels.completes.get(step.entry_point, ())
            with self._using(handle) as gpu:
                if "attend" in done:
                    staging = gpu.buffer(call.told_bytes, STAGING)
                    self._submit(call, (step,), staging)
                    call.read_back(staging)
                else:
                    self._submit(call, (step,))
                if "meta" in done:
                    handle.meta = _read_meta(handle)
            if finished := tuple(kernel for kernel in done if kernel in asked):
                yield finished

    def _call(
        self, work: Workspace, plan: Plan, handle: WgpuState, piece: Piece, rows: Rows
    ) -> Call:
        """A piece of a call, with its rows and scratch in buffers of the workspace."""
        part = slice(piece.first_row, piece.first_row + piece.rows)
        q, k, v, out = (array[part] for array in rows)
        arrays = {"q": q, "k": k, "v": v, "out": out}
        bound = {
            name: Bound(buffer, 0, buffer.size)
            for name, array in arrays.items()
            for buffer in (work.buffer(name, array.nbytes, STORAGE),)
        }
        program = self._program(work, plan, piece)
        return Call(handle, arrays, bound, program, self._bind_groups(work, handle, plan, bound))

    def _submit(
        self, call: Call, program: Sequence[Step], staging: wgpu.GPUBuffer | None = None
    ) -> None:
        """Submit launches of a call, after an open checkpoint and before what goes to staging."""
        handle = call.handle
        gpu, checkpoint = handle.gpu, handle.checkpoint
        encoder = gpu.device.create_command_encoder()
        if checkpoint is not None:
            _record_copy(encoder, handle.geometry, handle.buffers, checkpoint.buffers)
        compute = encoder.begin_compute_pass()
        self._record(compute, program, call.groups)
        compute.end()
        if staging is not None:
            call.record_copies(encoder, staging)
        for name in ("q", "k", "v"):
            gpu.device.queue.write_buffer(call.bound[name].buffer, 0, call.arrays[name])
        if checkpoint is not None:
            checkpoint.filled = None
        gpu.submit(encoder)
        if checkpoint is not None:
            checkpoint.filled, handle.checkpoint = True, None

    def check_encode(
        self, geometry: Geometry, rows: int, encoder: Any, q: Any, k: Any, v: Any, out: Any
    ) -> None:
        self._gpu.require_live()
        if not isinstance(encoder, (wgpu.GPUCommandEncoder, wgpu.GPUComputePassEncoder)):
            raise TypeError(
                "encoder must be a wgpu.GPUCommandEncoder or a wgpu.GPUComputePassEncoder, "
                f"got {type(encoder).__name__}"
            )
        if encoder._device is not self._gpu.device:
            raise ValueError(
                "encoder must be of the engine's device: open the engine with that device"
            )
        given = {"q": q, "k": k, "v": v, "out": out}
        for name, nbytes in row_bytes(geometry).items():
            self._check_range(name, given[name], rows * nbytes)
        for name in ("q", "k", "v"):
            if _split(given[name])[0] is _split(out)[0]:
                raise ValueError(f"out must be a buffer of its own, got that of {name}")

    def _check_range(self, name: str, given: Any, nbytes: int) -> None:
        """TypeError or ValueError unless the caller gave a buffer with room for so many bytes."""
        gpu = self._gpu
        buffer, offset = _split(given)
        if not isinstance(buffer, wgpu.GPUBuffer):
            raise TypeError(
                f"{name} must be a wgpu.GPUBuffer, or a tuple of one and an offset in bytes, "
                f"got {type(buffer).__name__}"
            )
        offset = integer(f"offset of {name}", offset, 0)
        step = gpu.limits["min-storage-buffer-offset-alignment"]
        if offset % step:
            raise ValueError(f"offset of {name} must be a multiple of {step}, got {offset}")
        if buffer._device is not gpu.device:
            raise ValueError(f"{name} must be a buffer of the engine's device")
        if not buffer.usage & wgpu.BufferUsage.STORAGE:
            raise ValueError(f"{name} must have the usage STORAGE, got {buffer.usage:#x}")
        if buffer.map_state != "unmapped":
            raise ValueError(f"{name} must be unmapped, got {buffer.map_state}")
        if offset + nbytes > buffer.size:
            raise ValueError(
                f"{name} must have {nbytes:,} bytes from offset {offset:,} on, "
                f"got a buffer of {buffer.size:,}"
            )

    def encode(
        self, plan: Plan, handle: WgpuState, encoder: Any, q: Any, k: Any, v: Any, out: Any
    ) -> None:
        with self._using(handle):
            given = {"q": q, "k": k, "v": v, "out": out}
            bound = {
                name: Bound(*_split(given[name]), plan.rows * nbytes)
                for name, nbytes in row_bytes(plan.geometry).items()
            }
            own_pass = isinstance(encoder, wgpu.GPUCommandEncoder)
            pieces = list(self._pieces(plan, aligned=True))
            parts = [
                {n: _part(b, b.nbytes // plan.rows, piece) for n, b in bound.items()}
                for piece in pieces
            ]
            # Everything that can fail has to happen before the first command is recorded.
            work = self._work
            try:
                recorded = [
                    (self._program(work, plan, piece), self._bind_groups(work, handle, plan, part))
                    for piece, part in zip(pieces, parts, strict=True)
                ]
            except wgpu.GPUError as fault:
                raise ValueError(f"q, k, v and out must be buffers in being: {fault}") from fault
            if not recorded:
                return
            try:
                compute = encoder.begin_compute_pass() if own_pass else encoder
                self._record(compute, *recorded[0])
            except wgpu.GPUError as fault:
                raise ValueError(f"encoder must be open for commands: {fault}") from fault
            for program, groups in recorded[1:]:
                self._record(compute, program, groups)
            if own_pass:
                compute.end()
            handle.meta = list(plan.meta_after(handle.meta))

    def _pieces(self, plan: Plan, *, aligned: bool = False) -> Iterator[Piece]:
        """The plan in submissions: so many slabs that every array fits in one binding.

        aligned: each begins at an offset that a binding may have, within the caller's buffers.
        """
        g, slabs = plan.geometry, plan.slabs
        if not slabs:
            return
        each, widths = slabs[0].rows, row_bytes(g).values()
        most = self._largest(g) if aligned else min(self._largest(g), ARRAY_BUDGET)
        fit = max(1, min(SUBMITTED_ROWS, most // max(widths)) // each)
        if aligned and fit < len(slabs):
            step = self._gpu.limits["min-storage-buffer-offset-alignment"]
            while fit > 1 and any(fit * each * width % step for width in widths):
                fit -= 1
            if any(fit * each * width % step for width in widths):
                raise ValueError(
                    f"rows must be at most {fit * each} a call for buffers of this width, "
                    f"got {plan.rows}"
                )
        for at in range(0, len(slabs), fit):
            part = slabs[at : at + fit]
            yield Piece(part[0].first_row, sum(slab.rows for slab in part), part)

    def _program(self, work: Workspace, plan: Plan, piece: Piece) -> tuple[Step, ...]:
        # Pieces that differ only in where they begin are the same work on other rows.
        key = plan.geometry, tuple(slab.rows for slab in piece.slabs)
        found = work.programs.get(key)
        if found is None:
            found = work.program(key, self._kernels.launches(plan, piece.slabs))
        return found

    def _record(
        self,
        compute: wgpu.GPUComputePassEncoder,
        program: Sequence[Step],
        groups: Mapping[str, wgpu.GPUBindGroup],
    ) -> None:
        record(
            compute,
            [
                Launched(self._pipelines[name].compute, groups[name], offset, workgroups)
                for name, workgroups, offset in program
            ],
        )

    def _bind_groups(
        self, work: Workspace, handle: WgpuState, plan: Plan, bound: Mapping[str, Bound]
    ) -> dict[str, wgpu.GPUBindGroup]:
        g = handle.geometry
        scratch = work.buffer("scratch", self._kernels.scratch_bytes(plan), STORAGE)
        uniforms = work.uniforms
        key = (*(b.key for b in bound.values()), id(scratch), id(uniforms))
        found = handle.bind_groups.get(key)
        if found is not None:
            handle.bind_groups.move_to_end(key)
            return found.groups
        resources = {
            b.binding: Bound(handle.buffers[b.name], 0, handle.buffers[b.name].size)
            for b in state_buffers(g)
        }
        resources.update({b.binding: bound[b.name] for b in buffers(g, 1) if b.name in bound})
        resources[SCRATCH] = Bound(scratch, 0, scratch.size)
        resources[PARAMETERS] = Bound(uniforms, 0, self._kernels.uniform_bytes)
        groups = {}
        for name, pipeline in self._pipelines.items():
            entries = []
            for number in pipeline.bindings:
                # Without a far field or sinks, kernels still bind a buffer that they never read.
                to = resources.get(number) or work.absent(number)
                entries.append(
                    {
                        "binding": number,
                        "resource": {"buffer": to.buffer, "offset": to.offset, "size": to.nbytes},
                    }
                )
            groups[name] = handle.gpu.device.create_bind_group(
                layout=pipeline.layout, entries=entries
            )
        while len(handle.bind_groups) >= BOUND_SETS:
            handle.bind_groups.popitem(last=False)
        handle.keep(key, groups, {*(b.buffer for b in bound.values()), scratch, uniforms})
        return groups

    @contextmanager
    def _guarded(self, gpu: Gpu) -> Iterator[Gpu]:
        """One thread at a time, on a device that is there; what a loss breaks says so."""
        gpu.require_live()
        with self._lock:
            try:
                yield gpu
            except Exception as fault:
                if gpu.lost_by_now():
                    gpu.require_live(fault)
                if isinstance(fault, wgpu.GPUError):
                    raise RuntimeError(f"{gpu.name} refused the work: {fault}") from fault
                raise

    @contextmanager
    def _using(self, handle: WgpuState) -> Iterator[Gpu]:
        """Guarded, and a call that failed undone."""
        with self._guarded(handle.gpu) as gpu:
            if handle.undo is not None:
                _undo(handle, handle.undo)
            yield gpu


class Call(NamedTuple):
    """A piece of a call: q, k, v and out of the host, where they are bound, what is launched."""

    handle: WgpuState
    arrays: Mapping[str, F32]
    bound: Mapping[str, Bound]
    program: Sequence[Step]
    groups: Mapping[str, wgpu.GPUBindGroup]

    @property
    def meta_bytes(self) -> int:
        return 16 * self.handle.geometry.groups

    @property
    def told_bytes(self) -> int:
        """Of what is read back: meta, and behind it the output."""
        return self.meta_bytes + self.arrays["out"].nbytes

    def record_copies(self, encoder: wgpu.GPUCommandEncoder, staging: wgpu.GPUBuffer) -> None:
        """Record the copies of what is read back."""
        head, size = self.meta_bytes, self.arrays["out"].nbytes
        encoder.copy_buffer_to_buffer(self.handle.buffers["meta"], 0, staging, 0, head)
        encoder.copy_buffer_to_buffer(self.bound["out"].buffer, 0, staging, head, size)

    def read_back(self, staging: wgpu.GPUBuffer) -> Meta:
        """The meta, with the output put into the host's array, once they are there."""
        head, out = self.meta_bytes, self.arrays["out"]
        with self.handle.gpu.mapped(staging, self.told_bytes) as data:
            meta = as_meta(np.frombuffer(data, np.uint32, head // 4).reshape(-1, 4))
            out[...] = np.frombuffer(data, np.float32, -1, head).reshape(out.shape)
        return meta


@lru_cache(maxsize=64)
def row_bytes(g: Geometry) -> dict[str, int]:
    """Bytes of one row of q, k, v and out."""
    return {b.name: b.nbytes for b in buffers(g, 1) if b.name in ("q", "k", "v", "out")}


def _split(given: Any) -> tuple[Any, int]:
    """What a caller names as a buffer: the buffer itself, or it and an offset in bytes."""
    return given if isinstance(given, tuple) and len(given) == 2 else (given, 0)


def _undo(handle: WgpuState, checkpoint: Checkpoint) -> None:
    """Go back to a checkpoint; can be done again when it was interrupted."""
    if checkpoint.filled is None:
        # Every row moves meta, so this tells on which side of the submission the interrupt came.
        checkpoint.filled = _read_meta(handle) != checkpoint.meta
    if checkpoint.filled:
        _copy(handle.gpu, handle.geometry, checkpoint.buffers, handle.buffers)
    handle.meta, handle.undo = checkpoint.meta, None


def _read_meta(handle: WgpuState) -> Meta:
    return as_meta(_read(handle, state_buffers(handle.geometry)[:1])["meta"])


def _read(handle: WgpuState, table: Sequence[Buffer]) -> dict[str, npt.NDArray[Any]]:
    """Some buffers of a handle, as many at a time as one buffer has room for."""
    gpu, room = handle.gpu, 0
    parts: list[list[Buffer]] = []
    for b in table:
        if b.nbytes > room:
            parts.append([])
            room = gpu.largest_buffer
        parts[-1].append(b)
        room -= b.nbytes
    arrays: dict[str, npt.NDArray[Any]] = {}
    for part in parts:
        staging = gpu.buffer(sum(b.nbytes for b in part), STAGING)
        encoder = gpu.device.create_command_encoder()
        at = 0
        for b in part:
            if b.nbytes:
                encoder.copy_buffer_to_buffer(handle.buffers[b.name], 0, staging, at, b.nbytes)
            at += b.nbytes
        gpu.submit(encoder)
        with gpu.mapped(staging, at) as data:
            at = 0
            for b in part:
                array = np.empty(b.shape or (), b.dtype)
                array.reshape(-1)[:] = np.frombuffer(data, b.dtype, array.size, at)
                arrays[b.name] = array
                at += b.nbytes
    return arrays


def _copy(gpu: Gpu, geometry: Geometry, source: Stored, target: Stored) -> None:
    """Copy the buffers that both have; a checkpoint lacks what no kernel writes."""
    encoder = gpu.device.create_command_encoder()
    _record_copy(encoder, geometry, source, target)
    gpu.submit(encoder)


def _record_copy(
    encoder: wgpu.GPUCommandEncoder, geometry: Geometry, source: Stored, target: Stored
) -> None:
    for b in state_buffers(geometry):
        if b.nbytes and b.name in source and b.name in target:
            encoder.copy_buffer_to_buffer(source[b.name], 0, target[b.name], 0, b.nbytes)


def _part(bound: Bound, row_bytes: int, piece: Piece) -> Bound:
    """The rows of a piece, within the range that holds them all."""
    return Bound(bound.buffer, bound.offset + piece.first_row * row_bytes, piece.rows * row_bytes)
