"""What `o1core bench` measures the numpy backend by: the products and copies of this numpy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from o1core.meter import Ceiling, Meter

__all__ = ["NumpyMeter"]

SQUARE = 1024
COPIED_BYTES = 2**26


class NumpyMeter(Meter):
    """Rows are of the host as it is, so there is nothing but the ceilings."""

    def ceilings(self) -> Sequence[Ceiling]:
        a = np.ones((SQUARE, SQUARE), np.float32)
        product = np.empty_like(a)
        source = np.ones(COPIED_BYTES // 4, np.float32)
        target = np.empty_like(source)
        return (
            Ceiling(
                f"BLAS, {SQUARE} x {SQUARE} float32",
                "FLOP/s",
                2.0 * SQUARE**3,
                partial(np.matmul, a, a, out=product),
                _nothing,
            ),
            Ceiling(
                f"numpy copy of {COPIED_BYTES >> 20} MiB, read and written",
                "B/s",
                2.0 * COPIED_BYTES,
                partial(np.copyto, target, source),
                _nothing,
            ),
        )


def _nothing() -> None:
    return
