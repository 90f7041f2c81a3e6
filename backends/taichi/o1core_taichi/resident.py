"""Rows that hosts keep on the device: torch's CUDA tensors and arrays of the language."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from o1core.checks import F32, as_host_array, bad_row, not_finite
from o1core.executor import DeviceRows
from o1core.layout import Meta, as_meta
from o1core.plan import Plan
from o1core_taichi.kernels import NO_FAULT, check_rows, convert, fold, report, unfold
from o1core_taichi.language import NAME, ti
from o1core_taichi.runtime import IMPORTED_AS, MAX_ELEMENTS, Array, Runtime

if TYPE_CHECKING:
    from o1core_taichi.executor import TaichiExecutor, TaichiState

__all__ = ["resident"]

Ndarray = ti.lang._ndarray.Ndarray
ScalarNdarray = ti.lang._ndarray.ScalarNdarray


def resident(
    executor: TaichiExecutor, runtime: Runtime, values: Mapping[str, Any]
) -> Resident | None:
    """The rows if they are on the device, None if they are the host's.

    TypeError or ValueError when only some are, or when they cannot be taken as they are.
    """
    kinds = [_kind(value, runtime) for value in values.values()]
    kind = next(filter(None, kinds), None)
    if kind is None:
        return None
    for name, other in zip(values, kinds, strict=True):
        if other is not kind:
            raise TypeError(
                f"{name} must be {kind.what}, as others of q, k and v are, "
                f"got {type(values[name]).__name__}"
            )
    return kind(executor, runtime, values)


def _kind(value: Any, runtime: Runtime) -> type[Resident] | None:
    if isinstance(value, Ndarray):
        return LanguageRows
    torch = sys.modules.get("torch")
    # A tensor on another kind of device goes through the host, as for every backend.
    if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
        return TorchRows if runtime.arch == "cuda" else None
    return None


class Resident(DeviceRows):
    """What both kinds share: the launches, and what is told of them.

    Subclasses bring the rows into the shape that kernels take, `[rows, heads, width]` float32, and
    the output out of it.
    """

    what: str

    def __init__(
        self, executor: TaichiExecutor, runtime: Runtime, values: Mapping[str, Any]
    ) -> None:
        self._executor, self._runtime = executor, runtime
        self._values = dict(values)
        self.shapes = {name: tuple(value.shape) for name, value in values.items()}

    @abstractmethod
    def _folded(self, name: str, batch: int | None) -> Any:
        """The caller's array as kernels take it; itself where it is that already."""

    @abstractmethod
    def _new(self, shape: tuple[int, ...]) -> Any:
        """A float32 array for the output."""

    @abstractmethod
    def _unfolded(self, out: Any, batch: int | None) -> Any:
        """The output as the caller gets it, batch axis in front."""

    @abstractmethod
    def _element(self, name: str, where: tuple[int, ...]) -> float:
        """One number of the caller's array."""

    def _begin(self) -> None:
        """Wait for what the host has under way where the kernels would not."""

    def _end(self) -> None:
        """Likewise afterwards, for the host's sake."""

    def run(
        self,
        plan: Plan,
        handle: TaichiState,
        batch: int | None,
        limits: Mapping[str, float] | None,
    ) -> tuple[Meta | None, Any]:
        g = plan.geometry
        for name, size in _elements(self.shapes, plan).items():
            if size > MAX_ELEMENTS:
                raise ValueError(
                    f"{name} must have at most {MAX_ELEMENTS:,} elements ({NAME}), got {size:,}: "
                    "extend by less rows at a time"
                )
        told = np.zeros((g.groups + 1, 4), np.int32)
        with self._runtime.using():
            out = self._new((plan.rows, g.heads, g.value_dim))
            if plan.rows == 0:
                return None, self._unfolded(out, batch)
            self._begin()
            rows = {name: self._folded(name, batch) for name in self._values}
            qkv = rows["q"], rows["k"], rows["v"]
            notes = self._executor.notes_for(g.groups)
            if limits is not None:
                bits = [int(np.float32(limits[name]).view(np.int32)) for name in rows]
                check_rows(*qkv, *bits, notes["found"])
            self._executor.launch(handle, plan.slabs, qkv, out, notes["held"])
            if limits is not None:
                report(out, notes["held"], notes["found"], told)
                ti.sync()
            self._end()
            result = self._unfolded(out, batch)
            if limits is None:
                return None, result
            for name, at in zip(rows, told[-1].tolist(), strict=False):
                if at != NO_FAULT:
                    row, head, t = (int(i) for i in np.unravel_index(at, rows[name].shape))
                    where: tuple[int, ...] = (row, head, t)
                    if batch is not None:
                        heads = self.shapes[name][2]
                        where = (head // heads, row, head % heads, t)
                    found = self._element(name, where)
                    axis = 0 if batch is None else 1
                    raise bad_row(name, where, found, limits[name], row_axis=axis)
            if told[-1, 3] != NO_FAULT:
                raise not_finite(self._executor.name)
        return as_meta(told[:-1].view(np.uint32)), result


def _elements(shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> dict[str, int]:
    """How many numbers the arrays of a call have."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return {**sizes, "the output": plan.rows * plan.geometry.heads * plan.geometry.value_dim}


class LanguageRows(Resident):
    """Arrays of the language, `ti.ndarray`."""

    what = f"{IMPORTED_AS}.ndarray"

    def __init__(
        self, executor: TaichiExecutor, runtime: Runtime, values: Mapping[str, Any]
    ) -> None:
        super().__init__(executor, runtime, values)
        for name, array in values.items():
            if not isinstance(array, ScalarNdarray) or array.dtype not in (ti.f16, ti.f32, ti.f64):
                raise TypeError(
                    f"{name} must be an array of numbers, of type f16, f32 or f64, "
                    f"got elements {array.element_type}"
                )
            if isinstance(array, Array) and array.is_gone:
                raise ValueError(
                    f"{name} must be an array of the runtime that is: the host called "
                    f"{IMPORTED_AS}.init() or {IMPORTED_AS}.reset() since"
                )

    def _folded(self, name: str, batch: int | None) -> Any:
        array, shape = self._values[name], self.shapes[name]
        if batch is None and array.dtype == ti.f32:
            return array
        if batch is None:
            folded = self._runtime.array(ti.f32, shape)
            convert(array, folded)
        else:
            folded = self._runtime.array(ti.f32, (shape[1], shape[0] * shape[2], shape[3]))
            fold(array, folded)
        return folded

    def _new(self, shape: tuple[int, ...]) -> Any:
        return self._runtime.array(ti.f32, shape)

    def _unfolded(self, out: Any, batch: int | None) -> Any:
        if batch is None:
            return out
        rows, heads, width = out.shape
        apart = self._new((batch, rows, heads // batch, width))
        unfold(out, apart)
        return apart

    def _element(self, name: str, where: tuple[int, ...]) -> float:
        return float(self._values[name][where])

    def to_host(self) -> dict[str, npt.NDArray[Any]]:
        with self._runtime.using():
            return {name: array.to_numpy() for name, array in self._values.items()}

    def from_host(self, out: F32) -> Any:
        with self._runtime.using():
            array = self._new(out.shape)
            array.from_numpy(out)
        return array


class TorchRows(Resident):
    """Tensors of torch in CUDA memory, which the language takes by their address."""

    what = "a CUDA tensor"

    def __init__(
        self, executor: TaichiExecutor, runtime: Runtime, values: Mapping[str, Any]
    ) -> None:
        super().__init__(executor, runtime, values)
        self._torch = sys.modules["torch"]
        floats = [getattr(self._torch, x) for x in ("float16", "bfloat16", "float32", "float64")]
        for name, tensor in values.items():
            if tensor.dtype not in floats:
                raise TypeError(
                    f"{name} must have dtype float16, bfloat16, float32 or float64, "
                    f"got {tensor.dtype}"
                )
            if tensor.device.index:
                raise ValueError(
                    f"{name} must be on cuda:0, where {NAME} runs, got {tensor.device}: copy it "
                    "there, or to the CPU"
                )
            self._values[name] = tensor.detach()

    def _folded(self, name: str, batch: int | None) -> Any:
        tensor = self._values[name]
        if batch is not None:
            shape = self.shapes[name]
            tensor = tensor.transpose(0, 1).reshape(shape[1], -1, shape[3])
        return tensor.float().contiguous().resolve_neg()

    def _new(self, shape: tuple[int, ...]) -> Any:
        return self._torch.empty(shape, dtype=self._torch.float32, device=self._values["q"].device)

    def _unfolded(self, out: Any, batch: int | None) -> Any:
        if batch is None:
            return out
        rows, heads, width = out.shape
        return out.reshape(rows, batch, heads // batch, width).transpose(0, 1).contiguous()

    def _element(self, name: str, where: tuple[int, ...]) -> float:
        return float(self._values[name][where])

    def _begin(self) -> None:
        # The language works on the default stream, which waits for no other one of torch's.
        stream = self._torch.cuda.current_stream()
        self._waits = stream != self._torch.cuda.default_stream()
        if self._waits:
            stream.synchronize()

    def _end(self) -> None:
        if self._waits:
            ti.sync()

    def to_host(self) -> dict[str, npt.NDArray[Any]]:
        return {name: as_host_array(name, tensor) for name, tensor in self._values.items()}

    def from_host(self, out: F32) -> Any:
        return self._torch.from_numpy(out).to(self._values["q"].device)
