"""Which GPUs are there, asked of the drivers' libraries; creates no context, writes nothing."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from o1core.process import changed_environment, headless

__all__ = [
    "VulkanDevice",
    "cuda_driver",
    "cuda_name",
    "cuda_name_of_driver",
    "vulkan_device",
]


def _library(linux: str, windows: str) -> Any:
    """The library, or None where there is none."""
    try:
        if sys.platform == "win32":
            return ctypes.WinDLL(windows)
        return ctypes.CDLL(linux)
    except OSError:
        return None


# CUDA ---------------------------------------------------------------------------------------------


def cuda_driver() -> Any:
    """The library of the CUDA driver, None where there is none."""
    return _library("libcuda.so.1", "nvcuda.dll")


def cuda_name() -> str:
    """The name of the first CUDA device that this process may see, "" if there is none.

    NVML is asked, and the CUDA driver only where that is missing: once `cuInit` was called, CUDA
    does not work in the processes that are forked from this one.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "0" in (os.environ.get("TI_ENABLE_CUDA"), os.environ.get("QD_ENABLE_CUDA")):
        return ""
    if cuda_driver() is None:
        return ""
    nvml = _library("libnvidia-ml.so.1", "nvml.dll")
    if nvml is None or nvml.nvmlInit_v2() != 0:
        return cuda_name_of_driver()
    try:
        return _first_visible(nvml, visible)
    finally:
        nvml.nvmlShutdown()


def _first_visible(nvml: Any, visible: str | None) -> str:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0 or count.value == 0:
        return ""
    first = "0" if visible is None else visible.split(",")[0].strip()
    handle = ctypes.c_void_p()
    if first.isdigit():
        if int(first) >= count.value:
            return ""
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(handle))
    elif first.startswith(("GPU-", "MIG-")):
        failed = nvml.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
    else:
        return ""  # nothing is visible, as CUDA has it
    name = ctypes.create_string_buffer(96)
    if failed or nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name))) != 0:
        return "NVIDIA GPU"  # such as a shortened UUID
    return name.value.decode(errors="replace")


def cuda_name_of_driver() -> str:
    """The same from the CUDA driver, which it initialises; "" if there is no device."""
    cuda = cuda_driver()
    count, device = ctypes.c_int(), ctypes.c_int()
    if cuda is None or cuda.cuInit(0) != 0:
        return ""
    if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return ""
    name = ctypes.create_string_buffer(256)
    if cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return ""
    if cuda.cuDeviceGetName(name, len(name), device) != 0:
        return "NVIDIA GPU"
    return name.value.decode(errors="replace")


# Vulkan -------------------------------------------------------------------------------------------

INTEGRATED, DISCRETE, CPU = 1, 2, 4


@dataclass(frozen=True)
class VulkanDevice:
    """A physical device."""

    name: str
    kind: int
    version: int

    @property
    def software(self) -> bool:
        """Whether it is a CPU, whatever its driver says of its type."""
        return self.kind == CPU or "llvmpipe" in self.name

    @property
    def score(self) -> int:
        """How much the language prefers it."""
        kinds = {INTEGRATED: 500, DISCRETE: 1000}
        return kinds.get(self.kind, 0) + (self.version >> 12 & 0x3FF) * 100


def vulkan_device(visible: str) -> VulkanDevice | None:
    """The device that the language opens, where `visible` is what its variable of that name has."""
    devices = _vulkan_devices()
    if visible.strip().isdigit() and int(visible) < len(devices):
        return devices[int(visible)]
    return max(devices, key=lambda device: device.score, default=None)


class _InstanceInfo(ctypes.Structure):
    """VkInstanceCreateInfo."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


class _Properties(ctypes.Structure):
    """VkPhysicalDeviceProperties; the rest is room for its limits."""

    _fields_ = (
        ("api_version", ctypes.c_uint32),
        ("driver_version", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint64 * 256),
    )


@cache
def _vulkan_devices() -> tuple[VulkanDevice, ...]:
    """Every device, in the driver's order; asked once, since that loads the drivers."""
    if sys.platform == "darwin":
        return ()  # there is Metal
    vulkan = _library("libvulkan.so.1", "vulkan-1.dll")
    if vulkan is None:
        return ()
    with changed_environment(headless()):
        instance = ctypes.c_void_p()
        info = _InstanceInfo(kind=1)
        if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
            return ()
        try:
            return tuple(_each(vulkan, instance))
        finally:
            vulkan.vkDestroyInstance(instance, None)


def _each(vulkan: Any, instance: ctypes.c_void_p) -> list[VulkanDevice]:
    enumerate_devices: Callable[..., int] = vulkan.vkEnumeratePhysicalDevices
    count = ctypes.c_uint32()
    if enumerate_devices(instance, ctypes.byref(count), None) != 0 or count.value == 0:
        return []
    handles = (ctypes.c_void_p * count.value)()
    if enumerate_devices(instance, ctypes.byref(count), handles) != 0:
        return []
    found = []
    for handle in handles[: count.value]:
        p = _Properties()
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), ctypes.byref(p))
        found.append(VulkanDevice(p.name.decode(errors="replace"), p.kind, p.api_version))
    return found
