"""The numpy backend of o1core: the kernels on BLAS, on any CPU."""

from o1core_numpy.executor import NumpyExecutor

__all__ = ["NumpyExecutor"]
