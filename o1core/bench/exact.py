"""Exact attention of the last rows of a context: what the operator is measured against.

With torch on its CUDA device, or on the CPU; without torch, by `o1core.exact`. Of the kernels that
torch has for a case the fastest is taken, which its name says. Each is checked before it is timed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from o1core.bench.turns import Work, clocked
from o1core.checks import F32
from o1core.config import Geometry
from o1core.exact import causal_attention
from o1core.testing.oracle import Rows

__all__ = ["Exact", "NumpyExact", "TorchExact", "open_exact"]

PEAK = 3.0
"""Factor on the queries, so that few keys count: of a mean over thousands an error would be lost
in its tolerance."""
SAMPLE = (0, 1, -1)
"""Rows that are checked; a mask that is off by one shows in each."""
MATERIALISED = 2**32
"""Bytes of logits up to which a kernel that keeps all of them is tried."""

Call = Callable[[], Any]


class Exact:
    """Exact attention of one geometry, up to so many last rows of so long a context.

    device: where it runs.
    """

    device: str

    def works(self, rows: int, context: int) -> Iterator[tuple[str, Work | Exception]]:
        """Names and work of the candidates for a case, checked; or what went wrong."""
        raise NotImplementedError


def open_exact(g: Geometry, rows: int, context: int) -> Exact:
    """By torch if it is installed."""
    rng = np.random.default_rng(3)
    k = rng.standard_normal((context, g.groups, g.head_dim), np.float32)
    v = rng.standard_normal((context, g.groups, g.value_dim), np.float32)
    q = np.float32(PEAK) * rng.standard_normal((rows, g.heads, g.head_dim), np.float32)
    return (NumpyExact if find_spec("torch") is None else TorchExact)(g, (q, k, v))


def _bound(weights: Any, values: Any, logits: Any, half: bool) -> Any:
    """What may be lost.

    In float32 that is the bound of docs/operator.md section 9 for a row without far field; in
    bfloat16, whose numbers have 8 bits, twice the rounding of weights and output.
    """
    if half:
        return 2.0**-7 * (weights @ abs(values))
    return abs(values).max() * (2e-6 + 8 * 2.0**-24 * (1 + abs(logits).max()))


class NumpyExact(Exact):
    """`o1core.exact.causal_attention`."""

    device = f"CPU (numpy {np.__version__})"

    def __init__(self, g: Geometry, rows: Rows) -> None:
        self._g = g
        last, self._k, self._v = rows
        # Only the last rows ask. The others are there to be counted; nobody reads them.
        self._q = np.zeros((len(self._k), *last.shape[1:]), np.float32)
        self._q[len(self._k) - len(last) :] = last

    def works(self, rows: int, context: int) -> Iterator[tuple[str, Work | Exception]]:
        q, k, v = (x[-context:] for x in (self._q, self._k, self._v))
        call = partial(causal_attention, q, k, v, scale=self._g.scale, first_row=context - rows)
        name = "exact, numpy float32"
        try:
            self._check(call(), rows, q, k, v)
        except Exception as fault:
            yield name, fault
        else:
            yield name, clocked(call)

    def _check(self, out: Any, rows: int, q: F32, k: F32, v: F32) -> None:
        g = self._g
        for row in {i % rows for i in SAMPLE}:
            seen = len(k) - rows + row + 1
            for n in range(g.heads):
                keys = k[:seen, n // g.heads_per_group].astype(float)
                values = v[:seen, n // g.heads_per_group].astype(float)
                logits = g.scale * keys @ q[len(q) - rows + row, n]
                weights = np.exp(logits - logits.max())
                weights /= weights.sum()
                _require_close(
                    out[row, n], weights @ values, _bound(weights, values, logits, False)
                )


def _require_close(got: Any, want: Any, bound: Any) -> None:
    if not bool((abs(got - want) <= bound).all()):
        worst = float((abs(got - want) / bound).max())
        raise AssertionError(f"it is off by {worst:.3g} times its bound")


class TorchExact(Exact):
    """torch's `scaled_dot_product_attention`, and a product, a softmax and a product."""

    def __init__(self, g: Geometry, rows: Rows) -> None:
        torch = self._torch = import_module("torch")
        # Products of float32 as they are, not in TF32.
        torch.set_float32_matmul_precision("highest")
        self._g = g
        self._cuda = bool(torch.cuda.is_available())
        self._where = "cuda" if self._cuda else "cpu"
        name = torch.cuda.get_device_name() if self._cuda else "CPU"
        self.device = f"{name} (torch {torch.__version__})"
        self._q, self._k, self._v = (
            torch.from_numpy(np.ascontiguousarray(x.swapaxes(0, 1)))[None].to(self._where)
            for x in rows
        )

    def works(self, rows: int, context: int) -> Iterator[tuple[str, Work | Exception]]:
        torch = self._torch
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        for name, dtype in dtypes.items():
            if dtype == torch.bfloat16 and not self._cuda:
                continue  # which CPUs have to emulate
            try:
                yield self._fastest(f"exact, torch {name}", rows, context, dtype)
            except Exception as fault:
                yield f"exact, torch {name}", fault

    def _fastest(self, name: str, rows: int, context: int, dtype: Any) -> tuple[str, Work]:
        q, k, v = self._tensors(rows, context, dtype)
        want = self._wanted(q, k, v)
        found: dict[str, tuple[float, Work]] = {}
        refused: dict[str, str] = {}
        kernels = self._kernels(q, k, v)
        if not kernels:
            raise RuntimeError(f"its logits would take more than {MATERIALISED:,} bytes")
        for kernel, (around, call) in kernels.items():
            work = partial(self._timed, around, call)
            try:
                with warnings.catch_warnings(), around(), torch_inference(self._torch):
                    warnings.simplefilter("ignore")
                    out = call()
                self._check(out, want, dtype)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found[kernel] = work(), work
            except AssertionError as fault:
                raise AssertionError(f"kernel {kernel}: {fault}") from fault
            except (RuntimeError, TypeError, ValueError) as fault:
                # torch has no such kernel for this, or no memory.
                refused[kernel] = str(fault).partition("\n")[0]
        if not found:
            raise RuntimeError(f"torch has no kernel for it: {refused}")
        best = min(found, key=lambda kernel: found[kernel][0])
        return f"{name} ({best})", found[best][1]

    def _tensors(self, rows: int, context: int, dtype: Any) -> tuple[Any, Any, Any]:
        """q `[1, heads, rows, d]`, k and v `[1, groups, context, d]`, each head by itself."""
        cut = self._q[:, :, -rows:], self._k[:, :, -context:], self._v[:, :, -context:]
        q, k, v = (x.to(dtype).contiguous() for x in cut)
        return q, k, v

    def _kernels(
        self, q: Any, k: Any, v: Any
    ) -> Mapping[str, tuple[Callable[[], AbstractContextManager[Any]], Call]]:
        attention = import_module("torch.nn.attention")
        bias = import_module("torch.nn.attention.bias")
        rows, context, per_group = q.shape[2], k.shape[2], self._g.heads_per_group
        # One row sees every key; more see a triangle at the lower right.
        mask = None if rows == 1 else bias.causal_lower_right(rows, context)
        sdpa = partial(
            self._torch.nn.functional.scaled_dot_product_attention,
            attn_mask=mask,
            scale=self._g.scale,
        )
        found: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Call]] = {}
        logits = 4 * q.shape[1] * rows * context
        if logits <= MATERIALISED and q.dtype == self._torch.float32:
            found["matmul"] = nullcontext, partial(self._matmul, q, k, v)
        if not self._cuda:
            if logits <= MATERIALISED:
                found["SDPA"] = nullcontext, partial(sdpa, q, k, v, enable_gqa=True)
            return found
        only, kinds = attention.sdpa_kernel, attention.SDPBackend
        # The keys of a group once for each of its heads, for kernels that know no groups.
        wide = [x.repeat_interleave(per_group, dim=1) for x in (k, v)]
        flash, efficient = kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION
        if q.dtype != self._torch.float32:
            found["flash"] = partial(only, flash), partial(sdpa, q, k, v, enable_gqa=True)
            found["flash, keys a head"] = partial(only, flash), partial(sdpa, q, *wide)
        found["efficient, keys a head"] = partial(only, efficient), partial(sdpa, q, *wide)
        return found

    def _matmul(self, q: Any, k: Any, v: Any) -> Any:
        torch, g = self._torch, self._g
        rows, context = q.shape[2], k.shape[2]
        mine = q.reshape(g.groups, g.heads_per_group * rows, g.head_dim)
        logits = (mine * g.scale) @ k[0].transpose(1, 2)
        each = logits.view(g.groups, g.heads_per_group, rows, context)
        if rows > 1:
            later = torch.full((rows, rows), -torch.inf, device=q.device).triu(1)
            each[..., context - rows :] += later
        weights = torch.softmax(each, dim=-1).view(logits.shape)
        return (weights @ v[0]).view(1, g.heads, rows, g.value_dim)

    def _wanted(self, q: Any, k: Any, v: Any) -> list[tuple[int, int, Any, Any]]:
        """Row, group, what its heads must give in float64, and what may be lost."""
        torch, g, found = self._torch, self._g, []
        rows, context = q.shape[2], k.shape[2]
        half = q.dtype != torch.float32
        for i in range(g.groups):
            keys, values = k[0, i].double(), v[0, i].double()
            heads = slice(i * g.heads_per_group, (i + 1) * g.heads_per_group)
            for row in {x % rows for x in SAMPLE}:
                seen = context - rows + row + 1
                logits = g.scale * q[0, heads, row].double() @ keys[:seen].T
                weights = torch.softmax(logits, dim=-1)
                want = weights @ values[:seen]
                found.append((row, i, want, _bound(weights, values[:seen], logits, half)))
        return found

    def _check(self, out: Any, want: list[tuple[int, int, Any, Any]], dtype: Any) -> None:
        g = self._g
        if out.dtype != dtype:
            raise AssertionError(f"it must give {dtype}, got {out.dtype}")
        for row, i, expected, bound in want:
            heads = slice(i * g.heads_per_group, (i + 1) * g.heads_per_group)
            _require_close(out[0, heads, row].double(), expected, bound)

    def _timed(self, around: Callable[[], AbstractContextManager[Any]], call: Call) -> float:
        # Choosing a kernel is none of the call's work.
        with around(), torch_inference(self._torch):
            self._wait()
            begun = time.perf_counter()
            call()
            self._wait()
            return time.perf_counter() - begun

    def _wait(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()


def torch_inference(torch: Any) -> AbstractContextManager[Any]:
    """Without gradients; not inference mode, which tensors with a mask of their own do not know."""
    found: AbstractContextManager[Any] = torch.no_grad()
    return found
