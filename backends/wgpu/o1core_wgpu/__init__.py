"""The wgpu backend of o1core: the kernels as WGSL, on every GPU that WebGPU reaches."""

from o1core_wgpu.executor import WgpuExecutor

__all__ = ["WgpuExecutor"]
