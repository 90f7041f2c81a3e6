"""Launches without the language's own Python, which takes longer than the work of a small call.

For each launch the language finds out anew what every argument is and which compiled kernel is
meant: 0.1 ms for fourteen arguments. Here that is asked once. It uses what is no public interface,
of the one release of Taichi that it was tried with; with others, launches are ordinary calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from o1core_taichi.language import NAME, VERSION, ti
from o1core_taichi.runtime import Runtime

__all__ = ["launch"]

DIRECT = NAME == "taichi" and VERSION == "1.7.4"


def launch(runtime: Runtime, kernel: Any, numbers: Sequence[int], arrays: Sequence[Any]) -> None:
    """Call a kernel with integers, then arrays: of the language or of the host, or torch tensors.

    Within `runtime.using()`.
    """
    kinds = tuple(map(_kind, arrays))
    if not DIRECT or None in kinds:
        kernel(*numbers, *arrays)
        return
    key = kernel, kinds
    found = runtime.launches.get(key)
    if found is None:
        # The first launch decides what the kernel is compiled with, and for which arguments.
        kernel(*numbers, *arrays)
        program, primal = ti.lang.impl.get_runtime().prog, kernel._primal
        compiled = primal.compiled_kernels[primal.ensure_compiled(*numbers, *arrays)]
        data = program.compile_kernel(program.config(), program.get_device_caps(), compiled)
        runtime.launches[key] = compiled, data
        return
    compiled, data = found
    # Never kept: a launch changes what its context holds.
    context = compiled.make_launch_context()
    for i, number in enumerate(numbers):
        context.set_arg_int((i,), number)
    for i, (array, kind) in enumerate(zip(arrays, kinds, strict=True), len(numbers)):
        if kind == "language":
            context.set_arg_ndarray((i,), array.arr)
        else:
            nbytes = array.element_size() * array.nelement()
            context.set_arg_external_array_with_shape(
                (i,), array.data_ptr(), nbytes, tuple(array.shape), 0
            )
    ti.lang.impl.get_runtime().prog.launch_kernel(data, context)


def _kind(array: Any) -> str | None:
    """Of arrays that need no copies around a launch; None for others."""
    if isinstance(array, ti.lang._ndarray.Ndarray):
        return "language"
    return "torch" if getattr(array, "is_cuda", False) else None
