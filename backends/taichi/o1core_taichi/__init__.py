"""The Taichi backend: the kernels in Taichi, on CUDA, Vulkan, Metal or the CPU."""

from o1core_taichi.executor import TaichiExecutor

__all__ = ["TaichiExecutor"]
