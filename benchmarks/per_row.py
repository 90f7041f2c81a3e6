"""The speed baseline: a compiled per-row loop of the operator (``per_row.c``), via ctypes.

:func:`build` compiles it with the C compiler of the machine; where there is none, it says so and
there is no such baseline. ::

    loop, why = build()
    if loop is not None:
        out = loop.extend(state, q, k, v)
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SOURCE = Path(__file__).with_name("per_row.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared")


@dataclass
class State:
    """The state of one layer, as the operator defines it; :meth:`PerRow.extend` advances it.

    Shapes, for G groups of H heads: ``meta [G, 3]`` (len, head, far), ``ring_k [G, W, d]``,
    ``ring_v [G, W, dv]``, ``sink_k [G, S, d]``, ``sink_v [G, S, dv]``, ``k_landmarks [G, m, d]``,
    ``q_landmarks [G, H, m, d]``, ``mix [G, H, m, m]``, ``far_max`` and ``far_mass [G, H, m]``,
    ``far_num [G, H, m, dv]``. Everything is float32 and C-contiguous, ``meta`` int64.
    ``windows`` gives each group its own window, at most W; the default is W for all.
    """

    meta: NDArray[np.int64]
    ring_k: Floats
    ring_v: Floats
    sink_k: Floats
    sink_v: Floats
    k_landmarks: Floats
    q_landmarks: Floats
    mix: Floats
    far_max: Floats
    far_mass: Floats
    far_num: Floats
    scale: float
    windows: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse arrays whose memory the compiled loop would misread."""
        for name, value in vars(self).items():
            if not isinstance(value, np.ndarray):
                continue
            kind = np.int64 if name == "meta" else np.float32
            if value.dtype != kind or not value.flags.c_contiguous or not value.flags.writeable:
                raise ValueError(f"{name} must be writable, C-contiguous {kind.__name__}")


class PerRow:
    """The compiled loop. One core, one row at a time, one group after the other."""

    def __init__(self, library: ctypes.CDLL, command: str) -> None:
        """Wrap a loaded library; ``command`` is what compiled it."""
        self.command = command
        """How the loop was compiled."""
        self._rows = library.o1_rows
        self._rows.restype = ctypes.c_int
        self._rows.argtypes = [ctypes.c_int64] * 7 + [ctypes.c_float] + [ctypes.c_void_p] * 15

    def extend(self, state: State, q: Floats, k: Floats, v: Floats) -> Floats:
        """Feed rows and return what the heads read; ``state`` advances in place.

        ``q [rows, G*H, d]``, ``k [rows, G, d]``, ``v [rows, G, dv]`` give ``[rows, G*H, dv]``.
        """
        groups, heads, m, d = state.q_landmarks.shape
        sinks, ring, dv = state.sink_k.shape[1], state.ring_k.shape[1], state.ring_v.shape[2]
        rows = q.shape[0]
        expected = ((rows, groups * heads, d), (rows, groups, d), (rows, groups, dv))
        if (q.shape, k.shape, v.shape) != expected:
            raise ValueError(f"q, k, v must have shapes {expected}")
        windows = state.windows or (ring,) * groups
        out = np.empty((rows, groups, heads, dv), np.float32)
        for g, window in enumerate(windows):
            own_q = _packed(q[:, g * heads : (g + 1) * heads])
            own_k, own_v = _packed(k[:, g]), _packed(v[:, g])
            own_out = np.empty((rows, heads, dv), np.float32)
            arrays: tuple[NDArray[Any], ...] = (
                own_q,
                own_k,
                own_v,
                state.ring_k[g],
                state.ring_v[g],
                state.sink_k[g],
                state.sink_v[g],
                state.k_landmarks[g],
                state.q_landmarks[g],
                state.mix[g],
                state.far_max[g],
                state.far_mass[g],
                state.far_num[g],
                state.meta[g],
                own_out,
            )
            sizes = (rows, heads, d, dv, sinks, window, m)
            if self._rows(*sizes, state.scale, *(array.ctypes.data for array in arrays)):
                raise MemoryError("no memory for the scratch of the per-row loop")
            out[:, g] = own_out
        return out.reshape(rows, groups * heads, dv)


def _packed(array: Floats) -> Floats:
    """Contiguous float32, copied only when it is not that already."""
    return np.ascontiguousarray(array, dtype=np.float32)


def build(folder: Path | None = None) -> tuple[PerRow | None, str]:
    """Compile and load the loop: ``(loop, command)``, or ``(None, reason)`` where that fails.

    The compiler is ``$CC``, else the first of cc, gcc, clang on PATH. The library is built in a
    temporary folder that is gone once it is loaded. A given ``folder`` keeps it: the name holds a
    digest of source and command, so a second build only loads. It must be the user's own.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
            return build(Path(temporary))
    compiler = shlex.split(os.environ.get("CC", ""))
    if not compiler:
        found = (shutil.which(name) for name in ("cc", "gcc", "clang"))
        compiler = [path for path in found if path][:1]
    if not compiler:
        return None, "no C compiler (cc, gcc or clang) on PATH"
    command = [*compiler, *FLAGS]
    shown = shlex.join([Path(compiler[0]).name, *command[1:]])
    digest = hashlib.sha256(SOURCE.read_bytes() + shlex.join(command).encode()).hexdigest()[:16]
    library = folder / f"per_row-{digest}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            partial = library.with_suffix(f".{os.getpid()}.tmp")
            subprocess.run(
                [*command, str(SOURCE), "-o", str(partial)],
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            )
            partial.replace(library)
        return PerRow(ctypes.CDLL(str(library)), shown), shown
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return None, f"{shown} failed: {lines[0] if lines else f'exit {error.returncode}'}"
    except (OSError, AttributeError, subprocess.TimeoutExpired) as error:
        return None, f"the compiled loop cannot be built or loaded: {error}"
