"""What `o1core bench` measures the taichi backend by: arrays of the language, torch as ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from o1core.checks import F32
from o1core.engine import Layer
from o1core.meter import Ceiling, Meter, Resident
from o1core_taichi.language import ti
from o1core_taichi.runtime import Runtime

__all__ = ["TaichiMeter"]

SQUARE = 4096
COPIED_BYTES = 2**28


class TaichiMeter(Meter):
    """Rows and output in arrays of the language. It has no clock of the device, nor ceilings.

    On CUDA those are torch's, where that is installed.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def resident(self, layer: Layer, q: F32, k: F32, v: F32) -> Resident:
        return _OnDevice(self._runtime, layer, (q, k, v))

    def ceilings(self) -> Sequence[Ceiling]:
        if self._runtime.arch != "cuda" or find_spec("torch") is None:
            return ()
        torch = import_module("torch")
        if not torch.cuda.is_available():
            return ()
        # Products of float32 as they are, not in TF32.
        torch.set_float32_matmul_precision("highest")
        a = torch.ones(SQUARE, SQUARE, device="cuda")
        source = torch.ones(COPIED_BYTES // 4, device="cuda")
        wait = torch.cuda.synchronize
        return (
            Ceiling(
                f"torch's product, {SQUARE} x {SQUARE} float32 without TF32",
                "FLOP/s",
                2.0 * SQUARE**3,
                partial(torch.matmul, a, a, out=torch.empty_like(a)),
                wait,
            ),
            Ceiling(
                f"torch's copy of {COPIED_BYTES >> 20} MiB, read and written",
                "B/s",
                2.0 * COPIED_BYTES,
                partial(torch.empty_like(source).copy_, source),
                wait,
            ),
        )


class _OnDevice(Resident):
    def __init__(self, runtime: Runtime, layer: Layer, rows: tuple[F32, F32, F32]) -> None:
        self._runtime, self._layer = runtime, layer
        self._out: Any = None
        with runtime.using():
            self._rows = [runtime.array(ti.f32, x.shape) for x in rows]
            for array, x in zip(self._rows, rows, strict=True):
                array.from_numpy(np.array(x))

    def start(self) -> None:
        q, k, v = self._rows
        self._out = self._layer.extend(q, k, v, check_finite=False)

    def wait(self) -> None:
        with self._runtime.using():
            ti.sync()

    def out(self) -> F32:
        with self._runtime.using():
            out: F32 = self._out.to_numpy()
        return out
