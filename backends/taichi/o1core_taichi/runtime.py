"""The language's one runtime: the host's if it has one, else opened once and shared."""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from math import prod
from typing import Any

import numpy.typing as npt

from o1core.errors import BackendUnavailable
from o1core.process import changed_environment, exit_without_drivers, headless
from o1core_taichi import devices
from o1core_taichi.language import NAME, VERSION, homeless, ti

__all__ = [
    "ARCHES",
    "MAX_ELEMENTS",
    "Array",
    "Runtime",
    "RuntimeGoneError",
    "describe",
    "open_runtime",
    "why_not_auto",
    "would_be",
]

ARCHES = ("cuda", "vulkan", "metal", "cpu")
PREFIX = {"taichi": "TI_", "quadrants": "QD_"}[NAME]
"""Of the environment variables that the language reads."""
IMPORTED_AS = {"taichi": "ti", "quadrants": "qd"}[NAME]

FORKED = (
    f"this process was forked from one that had used {NAME}, whose threads are not here, so it "
    "would hang: start workers with multiprocessing's 'spawn' or 'forkserver', or open the engine "
    "only after the fork"
)
GONE = (
    f"the host called {IMPORTED_AS}.init() or {IMPORTED_AS}.reset() since, which destroyed all "
    f"that {NAME} had stored, and with it the state of this layer. Go on from a state kept on the "
    "host: restore a snapshot taken with layer.snapshot(durable=True), or engine.load() a state "
    f"that layer.state() gave. To keep it from happening, call {IMPORTED_AS}.init() before the "
    "engine is opened, and only once"
)

MAX_ELEMENTS = 2**31 - 1
"""Of one array: the language counts them in 32 bits."""
UNMADE = (
    f"the host has declared fields of {NAME} that are not made yet, and a call in another thread "
    f"than that of {IMPORTED_AS}.init() would destroy them: call {IMPORTED_AS}.sync() there first"
)
SPARE_BYTES, SPARE_GPU_BYTES = 2**26, 2**28
"""Of arrays that nobody has any more, kept for others of their sizes: to make the output of a long
call anew each time would take a third of the call on a large GPU."""

lock = threading.RLock()
"""Held by whoever uses the language: it does not expect more than one thread."""
_depth = 0
"""How many blocks of `using` the thread that has the lock is in."""


class RuntimeGoneError(RuntimeError):
    """The host has initialised the language anew, and what was stored is gone."""


class Runtime:
    """The language's runtime and what the engines on it share."""

    def __init__(self, *, adopted: bool) -> None:
        self.arch = _arch_of_program()
        self.adopted = adopted
        self.name, self.software = _describe(self.arch)
        on_cpu = self.arch == "cpu" or self.software
        self._spare_bytes = SPARE_BYTES if on_cpu else SPARE_GPU_BYTES
        # Fields are made by the next launch, which on these arches must be in the thread that has
        # called ti.init(). Which one that was of the host's is not known: the main one, probably.
        self._makes_fields_in = 0
        if self.arch in ("cpu", "cuda"):
            main = threading.main_thread().ident or 0
            self._makes_fields_in = main if adopted else threading.get_ident()
        if not _has_made_any() and not _has_fields_to_make() and self._may_make_fields():
            ti.sync()
        # Not the program itself, which would outlive the host's next ti.init() and keep memory.
        self._program = weakref.ref(_program())
        self._pid = os.getpid()
        # Arrays that nobody has any more: whoever dropped them may be in the middle of anything.
        self._returned: deque[dict[str, Any]] = deque()
        self._spare: OrderedDict[tuple[Any, tuple[int, ...]], list[dict[str, Any]]] = OrderedDict()
        self.launches: dict[Any, Any] = {}
        """What is known of kernels that were launched; see `o1core_taichi.launch`."""
        self._context: Any = _CudaContext() if self.arch == "cuda" else nullcontext()

    def __repr__(self) -> str:
        return f"<Runtime {self.name}>"

    @property
    def gone(self) -> bool:
        """Whether the host has initialised or reset the language since."""
        program = self._program()
        return program is None or program is not _program()

    @property
    def is_ours_to_use(self) -> bool:
        """Whether `require_live` passes."""
        return os.getpid() == self._pid and not self.gone

    def require_process(self) -> None:
        """RuntimeError in a process that was forked from that of the runtime.

        To be asked before any lock is taken: nobody may be left there to release it.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(FORKED)

    def require_live(self) -> None:
        """RuntimeError in a forked process, RuntimeGoneError once the host has begun anew."""
        self.require_process()
        if self.gone:
            raise RuntimeGoneError(GONE)

    def _may_make_fields(self) -> bool:
        return self._makes_fields_in in (0, threading.get_ident())

    @contextmanager
    def using(self) -> Iterator[None]:
        """The language, to this thread alone, and for kernels that are compiled to be exact.

        What a kernel is compiled with is decided by its first launch, so all launches belong here.
        """
        global _depth
        self.require_process()
        with lock:
            self.require_live()
            if not self._may_make_fields() and (_has_fields_to_make() or not _has_made_any()):
                raise RuntimeError(UNMADE)
            config, runtime = ti.lang.impl.current_cfg(), ti.lang.impl.get_runtime()
            # The host's recording of kernels, to differentiate them, is none of these launches'.
            recording = runtime.target_tape, runtime.fwd_mode_manager
            fast_math = config.fast_math
            if fast_math:
                config.fast_math = False
            runtime.target_tape = runtime.fwd_mode_manager = None
            _depth += 1
            try:
                with self._context:
                    yield
            finally:
                _depth -= 1
                runtime.target_tape, runtime.fwd_mode_manager = recording
                # Which the host may have initialised anew in a callback.
                if fast_math and not self.gone:
                    config.fast_math = True

    def array(self, dtype: Any, shape: int | Sequence[int]) -> Any:
        """An array of the language, contents undefined; it may be one that nobody has any more.

        MemoryError if there is no room for it.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        extents = " x ".join(map(str, sizes))
        # A larger one would silently be smaller; an empty one ends the process on Vulkan.
        if not 0 < prod(sizes) <= MAX_ELEMENTS:
            raise MemoryError(f"arrays of {NAME} have 1 to 2**31 - 1 numbers, got {extents}")
        with self.using():
            self._collect()
            spare = self._spare.get((dtype, sizes))
            if spare:
                array = Array.__new__(Array)
                array.__dict__.update(spare.pop())
                return array
            self._delete(self._spare_bytes)
            try:
                return Array(self, dtype, sizes)
            except RuntimeError as fault:
                self._delete(0)
                with suppress(RuntimeError):
                    return Array(self, dtype, sizes)
                raise MemoryError(
                    f"{self.name} has no room for {extents} numbers: {fault}"
                ) from fault

    @property
    def copies(self) -> bool:
        """Whether `upload` and `download` can be called, which copy an array once and one way."""
        return self.arch == "cuda"

    def upload(self, array: npt.NDArray[Any], dtype: Any) -> Any:
        """An array of the language with what is in the host's, which is C-contiguous."""
        made = self.array(dtype, array.shape)
        self._context.upload(_program().get_ndarray_data_ptr_as_int(made.arr), array)
        return made

    def download(self, made: Any, array: npt.NDArray[Any]) -> None:
        """Copy an array of the language to the host's, once all launches are done."""
        _program().synchronize()
        self._context.download(_program().get_ndarray_data_ptr_as_int(made.arr), array)

    def _discard(self, array: dict[str, Any]) -> None:
        """Keep what an array was for another one of its size; waits for no other thread."""
        if not self.is_ours_to_use:
            return
        self._returned.append(array)
        if lock.acquire(blocking=False):
            try:
                if not _depth:
                    self._collect()
                    with self._context, suppress(RuntimeError):  # which the next use meets too
                        self._delete(self._spare_bytes)
            finally:
                lock.release()

    def _collect(self) -> None:
        while self._returned:
            array = self._returned.popleft()
            key = array["_o1core_key"]
            self._spare.setdefault(key, []).append(array)
            self._spare.move_to_end(key)

    def _delete(self, keep: int) -> None:
        """Delete spare arrays down to so many bytes, the sizes that were longest unused first."""
        total = sum(4 * prod(shape) * len(arrays) for (_, shape), arrays in self._spare.items())
        if total <= keep:
            return
        program = _program()
        # The language keeps for good what a kernel that is not known to be done has used.
        program.synchronize()
        for (_, shape), arrays in self._spare.items():
            while arrays and total > keep:
                program.delete_ndarray(arrays.pop()["arr"])
                total -= 4 * prod(shape)
        self._spare = OrderedDict((key, arrays) for key, arrays in self._spare.items() if arrays)


class Array(ti.lang._ndarray.ScalarNdarray):  # type: ignore[misc]
    """An array that is deleted from its own program or not at all.

    The language's own deletes itself from the program that is current then, which after a
    `ti.init()` is another one, and in a forked process may hang.
    """

    def __init__(self, runtime: Runtime, dtype: Any, shape: tuple[int, ...]) -> None:
        self._o1core_runtime, self._o1core_key = runtime, (dtype, shape)
        super().__init__(dtype, shape)

    @property
    def is_gone(self) -> bool:
        """Whether its program is, and with it what it held."""
        return self._o1core_runtime.gone

    def __copy__(self) -> Any:
        """Another array: two that share their memory would both be given back."""
        with self._o1core_runtime.using():
            twin = self._o1core_runtime.array(*self._o1core_key)
            twin.copy_from(self)
        return twin

    def __deepcopy__(self, memo: Any = None) -> Any:
        return self.__copy__()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Not there if it could not be created.
        if getattr(self, "arr", None) is not None and not finalizing():
            self._o1core_runtime._discard({**self.__dict__, "host_accessor": None})


class _CudaContext:
    """The language's CUDA context, in whatever thread, and whatever context the host has there.

    The language allocates in the context that is current, which only in the thread of its
    initialisation is its own.
    """

    def __init__(self) -> None:
        self._cuda = devices.cuda_driver()
        self._context = ctypes.c_void_p()
        self._cuda.cuCtxGetCurrent(ctypes.byref(self._context))
        if not self._context:
            # Initialised by the host, in another thread. The context is the device's primary one.
            self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0)
        self._pushed: list[bool] = []

    def __enter__(self) -> None:
        current = ctypes.c_void_p()
        self._cuda.cuCtxGetCurrent(ctypes.byref(current))
        push = current.value != self._context.value
        if push:
            self._cuda.cuCtxPushCurrent_v2(self._context)
        self._pushed.append(push)

    def __exit__(self, *fault: object) -> None:
        if self._pushed.pop():
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        to, source = ctypes.c_uint64(address), ctypes.c_void_p(array.ctypes.data)
        self._require(self._cuda.cuMemcpyHtoD_v2(to, source, ctypes.c_size_t(array.nbytes)))

    def download(self, address: int, array: npt.NDArray[Any]) -> None:
        to, source = ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(address)
        self._require(self._cuda.cuMemcpyDtoH_v2(to, source, ctypes.c_size_t(array.nbytes)))

    def _require(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"the CUDA driver could not copy an array: error {failed}")


# The language -------------------------------------------------------------------------------------

_ATTRIBUTE = "prog" if NAME == "taichi" else "_prog"


def _program() -> Any:
    """The program, which is what ti.init() makes; None before, and after ti.reset()."""
    return getattr(ti.lang.impl.get_runtime(), _ATTRIBUTE)


def _has_made_any() -> bool:
    """Whether the language has made fields, be it none, as it does before the first launch."""
    made: bool = ti.lang.impl.get_runtime().materialized
    return made


def _has_fields_to_make() -> bool:
    """Whether the host has declared fields that the next launch makes."""
    builder = ti.lang.impl._root_fb
    return not (builder.finalized or builder.empty)


def _arch_of_program() -> str:
    """The arch of the program, by our name for it if we know it."""
    name: str = ti._lib.core.arch_name(ti.lang.impl.current_cfg().arch)
    return "cpu" if name in ("x64", "arm64") else name


def _describe(arch: str, *, open_already: bool = True) -> tuple[str, bool]:
    """What a program runs on, for people, and whether that is a CPU."""
    language = f"{NAME} {VERSION}"
    if arch == "cuda":
        # Its driver knows best what comes first, once it is initialised.
        found = devices.cuda_name_of_driver() if open_already else devices.cuda_name()
        return f"{found or 'NVIDIA GPU'} (CUDA, {language})", False
    if arch == "vulkan":
        device = _vulkan_device()
        if device is None:
            return f"Vulkan device ({language})", False
        kind = "software, Vulkan" if device.software else "Vulkan"
        return f"{device.name} ({kind}, {language})", device.software
    if arch == "metal":
        return f"Metal device ({language})", False
    return f"CPU ({language})", True


def _vulkan_device() -> devices.VulkanDevice | None:
    return devices.vulkan_device(os.environ.get(f"{PREFIX}VISIBLE_DEVICE", ""))


# Choosing -----------------------------------------------------------------------------------------

_shared: Runtime | None = None
_used_by: set[int] = set()
_home: dict[str, str | None] = {}
"""What our program needs changed in the environment to begin and to end."""
_inherited: weakref.ref[Any] | None = None
"""The program that was there when this process was forked."""


def open_runtime(device: Any = None) -> Runtime:
    """The runtime on `device`: "cuda", "vulkan", "metal" or "cpu"; None takes the best there is.

    The host's own runtime is used if it has one. Otherwise it is initialised, once a process, and
    all engines share it.

    BackendUnavailable when the device is not there, when the process has a runtime on another one
    or with settings that kernels cannot have, or when this process was forked from one that had
    used the language; ValueError for another name; TypeError for anything else.
    """
    global _shared
    _check(device)
    _refuse_forked()
    with lock:
        if _shared is not None and not _shared.gone:
            if device not in (None, _shared.arch):
                raise BackendUnavailable("taichi", [_other_arch(device, _shared.arch)])
            return _shared
        if _started():
            _expect_suitable(device)
            _used_by.add(os.getpid())
            _shared = Runtime(adopted=True)
        else:
            arch = _choose(device)
            _used_by.add(os.getpid())
            _initialise(arch)
            _shared = Runtime(adopted=False)
        _expect_the_end()
        return _shared


@cache
def _expect_the_end() -> None:
    """At exit, have the language end without aborting the process.

    To be called after its start: what is registered last is done first, and `_tidy` ends it.
    """
    atexit.register(_prepare_the_end)


def _prepare_the_end() -> None:
    # For good: threads that go on stay out, and what follows frees memory of the context.
    if lock.acquire(timeout=5) and _shared is not None and _shared.is_ours_to_use:
        _shared._context.__enter__()


def describe(device: Any = None) -> str:
    """What `open_runtime` would open, as `Runtime.name` says it. Initialises nothing.

    Raises as that does.
    """
    with lock:
        return _describe(would_be(device), open_already=_started())[0]


def would_be(device: Any) -> str:
    """The arch that `open_runtime` would give; raises as that does."""
    _check(device)
    _refuse_forked()
    if not _started():
        return _choose(device)
    if _shared is None or _shared.gone:
        _expect_suitable(device)
    arch = _arch_of_program()
    if device not in (None, arch):
        raise BackendUnavailable("taichi", [_other_arch(device, arch)])
    return arch


def why_not_auto(device: Any = None) -> str:
    """Why "auto" should pass the language over: it would run on the CPU; "" if on a GPU.

    Initialises nothing. Raises as `open_runtime` does.
    """
    with lock:
        arch = would_be(device)
        if arch == "cpu":
            return "taichi would run on the CPU (numpy is faster there)"
        if arch == "vulkan":
            found = _vulkan_device()
            if found is not None and found.software:
                return f"taichi would run on a software device ({found.name}; numpy is faster)"
    return ""


def _check(device: Any) -> None:
    names = ", ".join(repr(name) for name in ARCHES)
    rule = f"device must be None or one of {names} for taichi, got {device!r}"
    if device is not None and not isinstance(device, str):
        raise TypeError(rule)
    if device is not None and device not in ARCHES:
        raise ValueError(rule)


def _refuse_forked() -> None:
    """BackendUnavailable in a process that was forked from one that had used the language."""
    program = _program()
    if program is None:
        stale = False
    elif _inherited is None:
        stale = not _has_threads()
    else:
        stale = program is _inherited()
    if stale or _used_by - {os.getpid()}:
        raise BackendUnavailable("taichi", [FORKED])


def _has_threads() -> bool:
    """Whether there are threads that are not Python's, as the language has; True if unknown.

    It matters where the host forked before it imported this module.
    """
    try:
        return len(os.listdir("/proc/self/task")) > threading.active_count()
    except OSError:
        return True


def _other_arch(wanted: str, arch: str) -> str:
    return (
        f"device must be {arch!r} or None, got {wanted!r}: {NAME} has one runtime a process, and "
        f"it is on {arch!r} already"
    )


def _started() -> bool:
    runtime = ti.lang.impl.get_runtime()
    # quadrants has an arch "python" that makes no program.
    return _program() is not None or getattr(runtime, "_arch", None) == getattr(
        ti._lib.core.Arch, "python", ()
    )


def _expect_suitable(device: str | None) -> None:
    """BackendUnavailable unless kernels can run on the runtime that the host has initialised."""
    advice = f"call {IMPORTED_AS}.init"
    if _program() is None:
        reason = f"the host runs {NAME} as plain Python: {advice}() with another arch"
        raise BackendUnavailable("taichi", [reason])
    arch, runtime = _arch_of_program(), ti.lang.impl.get_runtime()
    reasons = []
    if arch not in ARCHES:
        known = ", ".join(ARCHES)
        reasons.append(
            f"the host runs {NAME} on {arch!r}: {advice}(arch=...) with one of {known}, or open "
            "the engine first"
        )
    elif device not in (None, arch):
        reasons.append(f"{_other_arch(device or '', arch)}, by the host's {IMPORTED_AS}.init()")
    for setting, wanted in (("default_fp", ti.f32), ("default_ip", ti.i32)):
        got = getattr(runtime, setting)
        if got != wanted:
            reasons.append(
                f"the host's {IMPORTED_AS}.init() has {setting} {got}, and kernels need {wanted}: "
                f"leave {setting} out"
            )
    if reasons:
        raise BackendUnavailable("taichi", reasons)


def _choose(device: str | None) -> str:
    """The arch to initialise, after a look at what is there."""
    if device is None:
        return _best()
    reason = ""
    if device == "cuda" and not devices.cuda_name():
        reason = "no CUDA device was found: install NVIDIA's driver, and see CUDA_VISIBLE_DEVICES"
    elif device == "vulkan" and sys.platform != "darwin" and _vulkan_device() is None:
        reason = (
            "no Vulkan device was found: install the driver of the GPU and Vulkan's loader; "
            "without a GPU, Debian's and Ubuntu's mesa-vulkan-drivers runs it on the CPU"
        )
    elif device == "metal" and sys.platform != "darwin":
        reason = "Metal is there on macOS only: leave device out, which takes the best there is"
    if reason:
        raise BackendUnavailable("taichi", [reason])
    return device


def _best() -> str:
    variable = f"{PREFIX}ARCH"
    wanted = os.environ.get(variable, "")
    if wanted:
        # The language's own variable, by which hosts and users choose for every program.
        arch = "cpu" if wanted in ("x64", "arm64") else wanted
        if arch not in ARCHES:
            rule = f"{variable} must be one of {', '.join(ARCHES)}, got {wanted!r}"
            raise BackendUnavailable("taichi", [rule])
        return _choose(arch)
    if devices.cuda_name():
        return "cuda"
    if sys.platform == "darwin":
        return "metal" if ti._lib.core.with_metal() else "cpu"
    device = _vulkan_device()
    return "vulkan" if device is not None and not device.software else "cpu"


def _initialise(arch: str) -> None:
    """Make the program, on that arch or not at all."""
    global _home
    settings: dict[str, Any] = {
        "default_fp": ti.f32,
        "default_ip": ti.i32,
        "fast_math": False,
        "log_level": ti.ERROR,
    }
    try:
        storage, _home = _storage()
    except OSError as fault:
        reason = f"{NAME} must have a folder that it can write to: set HOME or TMPDIR ({fault})"
        raise BackendUnavailable("taichi", [reason]) from fault
    settings |= storage
    # Memory: nothing is set. On CUDA arrays are allocated as they come, from the driver's pool;
    # device_memory_GB is set aside up front only by drivers without one (before 11.2), which can
    # use no other, or once the host makes sparse fields.
    hidden = dict.fromkeys(f"{PREFIX}{key.upper()}" for key in ("arch", *settings))
    quiet = {"TI_SKIP_VERSION_CHECK": "ON"}  # which would ask a server and write into the home
    changes = hidden | quiet | _home | headless()
    with changed_environment(changes), _silence(), _denormals_kept():
        try:
            ti.init(arch=getattr(ti, arch), enable_fallback=False, **settings)
            got = _arch_of_program()
            if got != arch:
                raise RuntimeError(f"it came up on {got!r}")
        except Exception as fault:
            ti.reset()
            reason = f"{NAME} {VERSION} cannot start on {arch!r}: {fault}"
            raise BackendUnavailable("taichi", [reason]) from fault


@contextmanager
def _silence() -> Iterator[None]:
    """Keep ti.init() from printing, and nobody else: it has a `print` of its own meanwhile."""
    module = ti.lang.misc
    module.print = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.print


@contextmanager
def _denormals_kept() -> Iterator[None]:
    """Keep ti.init() from making the denormal numbers of this thread 0, numpy's among them."""
    if sys.platform == "win32":
        library, kept, now = ctypes.CDLL("ucrtbase"), ctypes.c_uint(), ctypes.c_uint()
        library._controlfp_s(ctypes.byref(kept), 0, 0)
        try:
            yield
        finally:
            denormals = 0x03000000  # _MCW_DN
            library._controlfp_s(ctypes.byref(now), kept, denormals)
        return
    library, settings = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    library.fegetenv(settings)
    try:
        yield
    finally:
        library.fesetenv(settings)


def _storage() -> tuple[dict[str, Any], dict[str, str | None]]:
    """Settings that keep compiled kernels where the language or the user says, if that works.

    With them, what to change in the environment. A program ends the process, and be it at its exit,
    if it cannot make its folders, even those of a cache that is off: it gets others then.
    """
    home: dict[str, str | None] = {}
    own = "" if homeless() else ti._lib.core.get_repo_dir()
    if not _is_writable(own):
        own, home = "", {"HOME": _private_folder()}
    name = os.path.basename(ti.lang.impl.default_cfg().offline_cache_file_path)
    wanted = os.environ.get(f"{PREFIX}OFFLINE_CACHE_FILE_PATH", "") or (own and f"{own}/{name}")
    kept = _is_writable(wanted)
    settings = {
        "offline_cache": kept and os.environ.get(f"{PREFIX}OFFLINE_CACHE") != "0",
        "offline_cache_file_path": wanted if kept else _private_folder(),
    }
    return settings, home


def _is_writable(folder: str) -> bool:
    """Whether there can be files in this folder, which this makes."""
    if not folder:
        return False
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


@cache
def _private_folder() -> str:
    """A folder for what cannot be elsewhere; it goes with the process."""
    folder = tempfile.mkdtemp(prefix="o1core-")
    atexit.register(_tidy, folder, os.getpid())
    return folder


def _tidy(folder: str, pid: int) -> None:
    """At exit: end our program, while there are the folders that this needs, and remove them."""
    if os.getpid() != pid:
        return
    # A daemon thread may have the lock for good.
    if lock.acquire(timeout=5):
        try:
            if _shared is not None and not _shared.adopted and not _shared.gone:
                with changed_environment(_home):
                    ti.reset()
        finally:
            lock.release()
    shutil.rmtree(folder, ignore_errors=True)


def _leave_alone(libc: Any) -> None:
    """In a forked process: never end the parent's program, whose threads are not here.

    Its end waits for them. So it is made immortal and taken from the language, and where the C
    library can, exit ends with Python's part, before the handlers of drivers.
    """
    global _depth, _inherited
    lock._at_fork_reinit()  # type: ignore[attr-defined]  # nobody is left to release it
    _depth = 0
    program = _program()
    if program is None:
        return
    _inherited = weakref.ref(program)
    if _shared is None or _shared.gone:
        return  # the host's own, with which this module has nothing to do
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(program))
    setattr(ti.lang.impl.get_runtime(), _ATTRIBUTE, None)
    exit_without_drivers(libc)


if hasattr(os, "register_at_fork"):
    _libc = ctypes.CDLL(None)
    os.register_at_fork(after_in_child=lambda: _leave_alone(_libc))
