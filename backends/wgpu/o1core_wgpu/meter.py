"""What `o1core bench` measures the wgpu backend by: buffers, timestamps, kernels as ceilings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.resources import files

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import lib

from o1core.checks import F32
from o1core.engine import Layer
from o1core.meter import Ceiling, Meter, Resident
from o1core_wgpu.device import TIMESTAMPS, Gpu
from o1core_wgpu.workspace import STAGING, STORAGE

__all__ = ["Copy", "Product", "WgpuMeter"]

PROBE = 64
"""Bytes that are read to wait for what was submitted."""
TIMES = 16
"""Bytes of two timestamps."""
TILE = 128
"""Rows and columns of a workgroup of `product`."""
COPY_GROUP = 256 * 16
"""Bytes of a workgroup of `copy`."""


class WgpuMeter(Meter):
    """Rows and output in buffers of the engine's device, recorded with `Layer.encode`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def resident(self, layer: Layer, q: F32, k: F32, v: F32) -> Resident:
        return _Encoded(self._gpu, layer, (q, k, v))

    def ceilings(self) -> Sequence[Ceiling]:
        # A driver on the CPU takes a second for what a GPU does in a millisecond.
        size, copied = (256, 2**22) if self._gpu.software else (4096, 2**27)
        ones = np.ones((size, size), np.float32)
        product = Product(self._gpu, ones, ones)
        product.expect(size)
        copy = Copy(self._gpu, np.ones(copied // 4, np.float32))
        copy.expect(1)
        return (
            Ceiling(
                f"tiled WGSL product, {size} x {size} float32",
                "FLOP/s",
                2.0 * size**3,
                product.start,
                product.wait,
            ),
            Ceiling(
                f"WGSL copy of {copied >> 20} MiB, read and written",
                "B/s",
                2.0 * copied,
                copy.start,
                copy.wait,
            ),
        )


class _Submitted:
    """Work that ends with a copy into a staging buffer, by whose mapping it is waited for."""

    def __init__(self, gpu: Gpu, out_bytes: int) -> None:
        self._gpu = gpu
        self._out = gpu.buffer(out_bytes, STORAGE)
        self._staging = gpu.buffer(PROBE, STAGING)

    def _submit(self, record: Callable[[wgpu.GPUCommandEncoder], None]) -> None:
        encoder = self._gpu.device.create_command_encoder()
        record(encoder)
        size = min(PROBE, self._out.size)
        encoder.copy_buffer_to_buffer(self._out, 0, self._staging, 0, size)
        self._gpu.submit(encoder)

    def wait(self) -> None:
        with self._gpu.mapped(self._staging, PROBE):
            pass


class _Encoded(_Submitted, Resident):
    def __init__(self, gpu: Gpu, layer: Layer, rows: tuple[F32, F32, F32]) -> None:
        g, self._rows = layer.geometry, len(rows[0])
        self._shape = (self._rows, g.heads, g.value_dim)
        super().__init__(gpu, 4 * self._rows * g.heads * g.value_dim)
        self._layer = layer
        self._inputs = [_uploaded(gpu, x) for x in rows]
        self.has_clock = TIMESTAMPS in gpu.device.features
        self._clock = _Clock(gpu) if self.has_clock else None

    def _encode(self, encoder: wgpu.GPUCommandEncoder | wgpu.GPUComputePassEncoder) -> None:
        q, k, v = self._inputs
        self._layer.encode(encoder, q, k, v, self._out, self._rows)

    def start(self) -> None:
        self._submit(self._encode)

    def out(self) -> F32:
        data = self._gpu.device.queue.read_buffer(self._out)
        out: F32 = np.frombuffer(data, np.float32, int(np.prod(self._shape))).reshape(self._shape)
        return out

    def device_seconds(self) -> float:
        return super().device_seconds() if self._clock is None else self._clock.time(self._encode)


class _Clock:
    """How long a compute pass takes, by timestamps of the device."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._queries = gpu.device.create_query_set(type="timestamp", count=2)
        self._times = gpu.buffer(TIMES, wgpu.BufferUsage.QUERY_RESOLVE | STORAGE)
        self._staging = gpu.buffer(TIMES, STAGING)
        # Not the nanoseconds of WebGPU: wgpu hands on the ticks of the device.
        self._tick = 1e-9 * lib.wgpuQueueGetTimestampPeriod(gpu.device.queue._internal)

    def time(self, record: Callable[[wgpu.GPUComputePassEncoder], None]) -> float:
        encoder = self._gpu.device.create_command_encoder()
        compute = encoder.begin_compute_pass(
            timestamp_writes={
                "query_set": self._queries,
                "beginning_of_pass_write_index": 0,
                "end_of_pass_write_index": 1,
            }
        )
        record(compute)
        compute.end()
        encoder.resolve_query_set(self._queries, 0, 2, self._times, 0)
        encoder.copy_buffer_to_buffer(self._times, 0, self._staging, 0, TIMES)
        self._gpu.submit(encoder)
        with self._gpu.mapped(self._staging, TIMES) as data:
            begun, ended = np.frombuffer(data, np.uint64, 2).tolist()
        return float((ended - begun) * self._tick)


class _Launch(_Submitted):
    """An entry point of ceilings.wgsl on its inputs, by binding; the output has the size of one."""

    entry_point: str

    def __init__(
        self, gpu: Gpu, inputs: dict[int, F32], workgroups: tuple[int, int], **constants: int
    ) -> None:
        nbytes = inputs[0].nbytes
        super().__init__(gpu, nbytes)
        text = files("o1core_wgpu").joinpath("ceilings.wgsl").read_text("utf-8")
        module = gpu.device.create_shader_module(code=text, label="ceilings")
        self._pipeline = gpu.device.create_compute_pipeline(
            layout="auto",
            compute={"module": module, "entry_point": self.entry_point, "constants": constants},
        )
        bound = {number: _uploaded(gpu, array) for number, array in inputs.items()}
        bound[2] = self._out
        self._group = gpu.device.create_bind_group(
            layout=self._pipeline.get_bind_group_layout(0),
            entries=[
                {"binding": number, "resource": {"buffer": buffer, "offset": 0, "size": nbytes}}
                for number, buffer in bound.items()
            ],
        )
        self._workgroups = workgroups

    def start(self) -> None:
        self._submit(self._record)

    def _record(self, encoder: wgpu.GPUCommandEncoder) -> None:
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(self._pipeline)
        compute.set_bind_group(0, self._group)
        compute.dispatch_workgroups(*self._workgroups, 1)
        compute.end()

    def out(self) -> F32:
        """All numbers of the output, flat."""
        out: F32 = np.frombuffer(self._gpu.device.queue.read_buffer(self._out), np.float32)
        return out

    def expect(self, value: float) -> None:
        """RuntimeError unless every number of the output is this one."""
        self.start()
        got = self.out()
        if not (got == value).all():
            wrong = got[got != value][0]
            raise RuntimeError(f"{self._gpu.name} gives {wrong} where a ceiling is {value}")


class Product(_Launch):
    """`a.T @ b`, square matrices of a multiple of 128 rows."""

    entry_point = "product"

    def __init__(self, gpu: Gpu, a: F32, b: F32) -> None:
        tiles = len(a) // TILE
        super().__init__(gpu, {0: a, 1: b}, (tiles, tiles), SIZE=len(a))


class Copy(_Launch):
    """A copy of a multiple of `COPY_GROUP` bytes."""

    entry_point = "copy"

    def __init__(self, gpu: Gpu, a: F32) -> None:
        super().__init__(gpu, {0: a}, (a.nbytes // COPY_GROUP, 1))


def _uploaded(gpu: Gpu, array: F32) -> wgpu.GPUBuffer:
    data = np.ascontiguousarray(array)
    return gpu.device.create_buffer_with_data(data=data, usage=STORAGE)
