"""The wgpu backend on its device: choice, limits, encoders, counts, loss, forks, threads, memory.

What it computes is the subject of the matrix. Here stands what only a GPU has. A test that could
end the process, or hang it, runs a function of this module in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import ROOT, require_backend
from support import SMALL, same_state, small_layer, small_rows

import o1core
from o1core.testing import Oracle, Rows, check_output, check_state, random_rows
from o1core_numpy import NumpyExecutor

try:
    import wgpu
    from wgpu.backends import wgpu_native as native

    from o1core_wgpu import WgpuExecutor, device, executor, workspace
    from o1core_wgpu import native as commands
    from o1core_wgpu.source import ENVIRONMENT
except ImportError:
    pass  # every test then skips, or fails, with the reason

LIMIT = "max-storage-buffers-per-shader-stage"
BINDING, BUFFER = "max-storage-buffer-binding-size", "max-buffer-size"


@pytest.fixture(scope="module", autouse=True)
def usable() -> None:
    """Skips this module where the backend does not run, or fails if it is required."""
    require_backend("wgpu")


@pytest.fixture(scope="module")
def engine() -> Iterator[o1core.O1Batch]:
    with o1core.O1Batch("wgpu", fallback=None) as opened:
        yield opened


@pytest.fixture(scope="module")
def numpy_engine() -> o1core.O1Batch:
    return o1core.O1Batch("numpy")


@pytest.fixture(scope="module")
def host(usable: None) -> Host:
    return Host()


class Host:
    """A host application: a device of its own, an engine on it, buffers."""

    def __init__(self, **limits: int) -> None:
        self.device = request_device(**limits)
        self.engine = o1core.O1Batch("wgpu", device=self.device, fallback=None)

    def buffer(self, array: npt.NDArray[np.float32], usage: str = "STORAGE|COPY_SRC") -> Any:
        return self.device.create_buffer_with_data(data=array, usage=usage)

    def empty(self, nbytes: int, usage: str = "STORAGE|COPY_SRC") -> Any:
        return self.device.create_buffer(size=nbytes, usage=usage)

    def buffers(self, layer: o1core.Layer, rows: Rows) -> tuple[Any, Any, Any, Any]:
        """q, k, v and out for rows."""
        g = layer.geometry
        q, k, v = map(self.buffer, rows)
        return q, k, v, self.empty(4 * len(rows[0]) * g.heads * g.value_dim)

    def submit(self, encoder: Any) -> None:
        self.device.queue.submit([encoder.finish()])

    def floats(self, buffer: Any) -> bytes:
        return bytes(self.device.queue.read_buffer(buffer))

    def destroy(self) -> None:
        self.device.destroy()
        self.device._poll()  # only this frees what was mapped


def request_device(**limits: int) -> Any:
    adapters = device._adapters()
    wanted = {name.replace("_", "-"): value for name, value in limits.items()}
    adapter = adapters[device._choose(adapters, None)]
    return adapter.request_device_sync(required_limits=wanted)


def first(rows: Rows, count: int, start: int = 0) -> Rows:
    q, k, v = rows
    part = slice(start, start + count)
    return q[part], k[part], v[part]


def check_right(layer: o1core.Layer, whole: Rows, out: npt.NDArray[Any]) -> None:
    """The last rows of a sequence, and the state after them, against the oracle."""
    prompt = len(whole[0]) - len(out)
    oracle = Oracle(layer.config, first(whole, prompt))
    oracle.append(first(whole, len(out), prompt))
    check_output(out, oracle.expected(range(prompt, prompt + len(out))))
    check_state(layer.state(), oracle.state())


def count_calls(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts, from here on, the calls that submit, map or create something."""
    calls: Counter[str] = Counter()

    def counted(self: Any, make: Any, name: str, *arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return make(self, *arguments, **options)

    for kind, name in (
        (native.GPUQueue, "submit"),
        (native.GPUBuffer, "map_async"),
        (native.GPUDevice, "create_buffer"),
        (native.GPUDevice, "create_bind_group"),
        (native.GPUDevice, "create_shader_module"),
        (native.GPUDevice, "create_compute_pipeline"),
    ):
        patch.setattr(kind, name, partialmethod(counted, getattr(kind, name), name))
    return calls


def in_process(*scripts: Callable[[], None], timeout: float = 100) -> None:
    """Runs functions of this module in a process, which has to end well and in time."""
    code = "; ".join(["import test_wgpu", *(f"test_wgpu.{s.__name__}()" for s in scripts)])
    path = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"


# Device and adapter -------------------------------------------------------------------------------


def test_engines_share_a_device_and_its_kernels(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch)
    with o1core.O1Batch("wgpu", fallback=None) as second:
        assert gpu_of(second) is gpu_of(engine)
        assert calls["create_shader_module"] == calls["create_compute_pipeline"] == 0
        assert second.device == engine.device
        assert "o1core's own WGSL" in second.reason


def gpu_of(engine: o1core.O1Batch) -> Any:
    return engine._executor._gpu  # type: ignore[attr-defined]


def test_asks_for_no_more_than_kernels_need(engine: o1core.O1Batch) -> None:
    gpu = gpu_of(engine)
    assert gpu.limits[LIMIT] == min(13, gpu.device.adapter.limits[LIMIT])
    assert gpu.limits[BINDING] == gpu.device.adapter.limits[BINDING]


def test_a_device_by_index_and_name(engine: o1core.O1Batch) -> None:
    adapters = device._adapters()
    best = device._choose(adapters, None)
    summary = adapters[best].summary
    for named in (best, np.int64(best), summary, summary.upper(), summary[:4].lower()):
        with o1core.O1Batch("wgpu", device=named, fallback=None) as other:
            assert gpu_of(other) is gpu_of(engine), named


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        ("no such adapter", ValueError),
        ("", ValueError),
        (-1, ValueError),
        (99, ValueError),
        (True, TypeError),
        (0.0, TypeError),
        (["llvmpipe"], TypeError),
    ],
)
def test_a_device_that_is_not_there(named: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"device must be None, an adapter's index or a part") as caught:
        o1core.O1Batch("wgpu", device=named)
    for adapter in device._adapters():
        assert adapter.summary in str(caught.value)
    assert repr(named) in str(caught.value)


def test_the_best_adapter() -> None:
    def adapter(kind: str, interface: str = "Vulkan") -> Any:
        info = {"adapter_type": kind, "backend_type": interface}
        return SimpleNamespace(info=info, summary=f"{kind} via {interface}")

    there = [
        adapter("CPU"),
        adapter("DiscreteGPU", "OpenGL"),
        adapter("IntegratedGPU"),
        adapter("DiscreteGPU"),
        adapter("something new"),
    ]
    assert [device._choose(there[:n], None) for n in range(1, 6)] == [0, 1, 1, 3, 3]
    assert device._choose([there[4], there[2]], None) == 1
    assert device._choose([there[0], there[4]], None) == 1
    assert device._choose(there, "discrete") == 3
    assert device._choose(there, "opengl") == 1


def test_the_variable_of_wgpu(engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = device._adapters()
    best = device._choose(adapters, None)
    monkeypatch.setenv(device.ADAPTER_NAME, adapters[best].summary)
    with o1core.O1Batch("wgpu", fallback=None) as named:
        assert gpu_of(named) is gpu_of(engine)
    monkeypatch.setenv(device.ADAPTER_NAME, "no such adapter")
    with pytest.raises(o1core.BackendUnavailable, match=f"{device.ADAPTER_NAME} must be a part"):
        o1core.O1Batch("wgpu", fallback=None)
    assert o1core.O1Batch("wgpu", device=best, fallback=None).backend == "wgpu"


def test_auto_takes_no_software_adapter(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_of(engine)
    assert gpu.software == ("software" in engine.device)
    monkeypatch.setattr(device, "_is_software", lambda adapter: True)
    opened: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(executor, "open_gpu", opened.append)
        with o1core.O1Batch() as auto:
            assert auto.backend == "numpy"
            assert "wgpu has only a software adapter (" in auto.reason
    assert not opened  # which would take a second
    monkeypatch.setattr(device, "_is_software", lambda adapter: False)
    monkeypatch.setattr(gpu, "software", False)
    with o1core.O1Batch() as auto:
        assert (auto.backend, auto.device) == ("wgpu", gpu.name)


def test_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgpu.gpu, "enumerate_adapters_sync", list)
    monkeypatch.setattr(device, "_adapters", device._adapters.__wrapped__)
    with pytest.warns(o1core.BackendFallbackWarning, match="install the driver of the GPU"):
        fallen = o1core.O1Batch("wgpu")
    assert fallen.backend == "numpy"
    assert "no WebGPU adapter was found" in fallen.reason
    with pytest.raises(o1core.BackendUnavailable, match="mesa-vulkan-drivers"):
        o1core.O1Batch("wgpu", fallback=None)
    with o1core.O1Batch() as auto:
        assert auto.backend == "numpy"
        assert "no WebGPU adapter was found" in auto.reason
    with pytest.raises(TypeError, match="device must be None"):
        o1core.O1Batch("wgpu", device=1.5)


def test_a_driver_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("armed")

    monkeypatch.setattr(wgpu.gpu, "enumerate_adapters_sync", fails)
    monkeypatch.setattr(device, "_adapters", device._adapters.__wrapped__)
    with pytest.warns(o1core.BackendFallbackWarning, match="it failed with RuntimeError: armed"):
        assert o1core.O1Batch("wgpu").backend == "numpy"
    with pytest.warns(o1core.BackendFallbackWarning, match="auto passed over a broken backend: "):
        assert o1core.O1Batch().backend == "numpy"


def test_auto_says_why_a_device_is_none_for_it() -> None:
    with pytest.raises(ValueError, match=r"wgpu: device must be None.*; numpy: device must be"):
        o1core.O1Batch(device="no such adapter")
    with pytest.raises(TypeError, match=r"wgpu: device must be None.*; numpy: device must be"):
        o1core.O1Batch(device=1.5)


def test_a_host_device_is_adopted(host: Host) -> None:
    gpu = gpu_of(host.engine)
    assert gpu.device is host.device
    assert gpu.limits[LIMIT] == host.device.limits[LIMIT]
    with o1core.O1Batch("wgpu", device=host.device, fallback=None) as second:
        assert gpu_of(second) is gpu
    layer, rows = small_layer(host.engine)
    check_right(layer, small_rows(280), layer.extend(*rows))


def test_an_adopted_device_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    given = request_device()
    engine = o1core.O1Batch("wgpu", device=given, fallback=None)
    layer, rows = small_layer(engine)
    layer.extend(*rows)
    last = weakref.ref(gpu_of(engine))
    del engine, layer
    gc.collect()
    assert last() is None
    given.create_command_encoder().finish()


def test_a_device_with_few_workgroups_is_refused() -> None:
    given = request_device(max_compute_workgroups_per_dimension=100)
    rule = "max-compute-workgroups-per-dimension must be at least 65535 .* got 100; request"
    with pytest.raises(o1core.BackendUnavailable, match=rule):
        o1core.O1Batch("wgpu", device=given, fallback=None)


def test_webgpu_guarantees_enough() -> None:
    """Eight storage buffers, which the standard promises, are enough for o1core's own kernels."""
    engine = o1core.O1Batch(
        "wgpu", device=request_device(max_storage_buffers_per_shader_stage=8), fallback=None
    )
    layer, rows = small_layer(engine)
    check_right(layer, small_rows(280), layer.extend(*rows))


@pytest.mark.parametrize(
    ("limit", "have"),
    [
        (LIMIT, 4),
        ("max-compute-invocations-per-workgroup", 16),
        ("max-compute-workgroup-size-x", 16),
        ("max-bindings-per-bind-group", 15),
        ("max-dynamic-uniform-buffers-per-pipeline-layout", 0),
        ("max-uniform-buffer-binding-size", 16),
    ],
)
def test_limits_too_small(limit: str, have: int) -> None:
    given = request_device(**{limit: have})
    assert given.limits[limit] == have
    rule = rf"{limit} must be at least \d+ \(o1core's own WGSL\), got {have}; request the device"
    with pytest.raises(o1core.BackendUnavailable, match=rule):
        o1core.O1Batch("wgpu", device=given, fallback=None)
    with pytest.warns(o1core.BackendFallbackWarning, match=rule):
        assert o1core.O1Batch("wgpu", device=given).backend == "numpy"


# Options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("wgpu", {"nonsense": 1}, r"backend wgpu has no option 'nonsense' \(it has wgsl, strat"),
        ("wgpu", {"wgsl": 7}, "wgsl must be 'own', 'original' or a path, got int"),
        ("wgpu", {"wgsl": False}, "wgsl must be 'own', 'original' or a path, got bool"),
        ("auto", {"wgsl": "x"}, "wgsl must come with the name of the backend that has it"),
        ("numpy", {"wgsl": "x"}, r"backend numpy has no option 'wgsl' \(it has strategy\)"),
    ],
)
def test_wrong_options(backend: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        o1core.O1Batch(backend, **options)


@pytest.mark.parametrize("wgsl", ["", "no such file"])
def test_a_file_that_is_not_there(wgsl: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="wgsl must be 'own', 'original' or the path"):
        o1core.O1Batch("wgpu", wgsl=wgsl and str(tmp_path / wgsl))


def test_the_compiler_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text with the right interface that is wrong inside."""
    from test_wgsl_source import TEXT

    good, bad = tmp_path / "good.wgsl", tmp_path / "bad.wgsl"
    good.write_text(TEXT)
    bad.write_text(TEXT.replace("_ = b_meta[0];", "let x: f32 = b_meta[0];"))
    with o1core.O1Batch("wgpu", wgsl=good, fallback=None) as engine:
        assert f"kernels: WGSL of {good}, not the known original" in engine.reason
    with pytest.raises(ValueError, match=r"(?s)wgsl must be kernels that compile .*bad.*f32") as e:
        o1core.O1Batch("wgpu", wgsl=bad)
    assert "let x: f32" in str(e.value)

    monkeypatch.setenv(ENVIRONMENT, str(good))
    with o1core.O1Batch("wgpu", fallback=None) as engine:
        assert f"kernels: WGSL of {good}" in engine.reason
    for name, what in ((str(bad), "compile"), (str(tmp_path / "none"), "neither")):
        monkeypatch.setenv(ENVIRONMENT, name)
        rule = rf"(?s){ENVIRONMENT} is set, and wgsl must .*{what}"
        with pytest.warns(o1core.BackendFallbackWarning, match=rule):
            assert o1core.O1Batch("wgpu").backend == "numpy"
        with monkeypatch.context() as patch:
            patch.setattr(device, "_is_software", lambda adapter: False)
            with o1core.O1Batch() as auto:
                assert auto.backend == "numpy"
                assert ENVIRONMENT in auto.reason
        with o1core.O1Batch("wgpu", wgsl=good, fallback=None) as engine:
            assert f"kernels: WGSL of {good}" in engine.reason
        with o1core.O1Batch("wgpu", wgsl="own", fallback=None) as engine:
            assert "o1core's own WGSL" in engine.reason
    monkeypatch.setenv(ENVIRONMENT, "")
    with o1core.O1Batch("wgpu", fallback=None) as engine:
        assert "o1core's own WGSL" in engine.reason


def test_the_original_of_the_environment(
    original_wgsl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if it is that, byte for byte; another text is not taken for it."""
    monkeypatch.setenv("CARGO_HOME", str(tmp_path))
    monkeypatch.setenv(ENVIRONMENT, original_wgsl)
    with o1core.O1Batch("wgpu", wgsl="original", fallback=None) as engine:
        assert "original WGSL, byte for byte" in engine.reason
    changed = tmp_path / "changed.txt"
    changed.write_text(Path(original_wgsl).read_text().replace("o1b_meta(", "o1b_meta (", 1))
    for name in (str(changed), str(tmp_path / "none"), "original"):
        monkeypatch.setenv(ENVIRONMENT, name)
        with pytest.raises(FileNotFoundError, match="wgsl, or O1CORE_WGSL, may also be the path"):
            o1core.O1Batch("wgpu", wgsl="original", fallback=None)


# Limits of sizes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow(usable: None) -> Host:
    """A host whose device binds no more than 128 KiB: 512 rows of q of a small layer."""
    return Host(**{BINDING: 2**17})


def test_a_layer_too_large_is_refused_before_anything_moves(
    narrow: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = o1core.Config(landmarks=8, window=1100, sinks=2)
    prompt = small_rows(1200)
    calls = count_calls(monkeypatch)
    rule = r"ring_k must have at most 131,072 bytes \(the largest binding of .*\), got 140,800"
    with pytest.raises(o1core.BackendUnavailable, match=rule):
        narrow.engine.seal(*prompt, config)
    assert not calls
    lenient = o1core.O1Batch("wgpu", device=narrow.device)
    with pytest.warns(o1core.BackendFallbackWarning, match=rule):
        assert lenient.seal(*prompt, config).backend == "numpy"


def test_long_calls_are_cut(narrow: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = small_layer(narrow.engine, rows=2000)
    fork = layer.fork()
    calls = count_calls(monkeypatch)
    out = layer.extend(*rows)
    assert calls["submit"] == calls["map_async"] == 4
    check_right(layer, small_rows(2080), out)

    buffers = narrow.buffers(fork, rows)
    encoder = narrow.device.create_command_encoder()
    fork.encode(encoder, *buffers, 2000)
    narrow.submit(encoder)
    assert narrow.floats(buffers[3]) == out.tobytes()
    assert same_state(fork.state(), layer.state())


def test_a_failure_in_a_later_piece_changes_nothing(
    narrow: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rows = small_layer(narrow.engine, rows=2000)
    before, want = layer.state(), layer.fork().extend(*rows)
    submit, left = native.GPUQueue.submit, [3]

    def third(*arguments: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        submit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(native.GPUQueue, "submit", third)
        with pytest.raises(KeyboardInterrupt):
            layer.extend(*rows)
    assert same_state(layer.state(), before)
    assert layer.extend(*rows).tobytes() == want.tobytes()


@pytest.mark.parametrize("size", [652_608, 652_607])
def test_buffers_as_large_as_the_device_has(size: int) -> None:
    """Where a buffer is no larger than a binding, meta and output share one, and states need two.

    A size need not be a multiple of what buffers are rounded to: 2^31 - 1 is that of some drivers.
    """
    limited = Host(**{BINDING: size, BUFFER: size})
    config = o1core.Config(landmarks=64, window=8, sinks=2)
    q, k, v = random_rows(5, 700, heads_per_group=4, head_dim=256)
    layer = limited.engine.seal(q[:550], k[:550], v[:550], config)
    assert layer.nbytes > size
    check_right(layer, (q, k, v), layer.extend(q[550:], k[550:], v[550:]))

    filling = o1core.Config(landmarks=65, window=8, sinks=2)
    prompt = random_rows(5, 550, heads_per_group=10, head_dim=251, value_dim=1)
    if size % 16 == 0:
        limited.engine.seal(*prompt, filling).state()
    else:
        with pytest.raises(
            o1core.BackendUnavailable, match=r"q_landmarks must have at most 652,592 .* 652,600"
        ):
            limited.engine.seal(*prompt, filling)


# The host's encoder -------------------------------------------------------------------------------


@pytest.mark.parametrize("own_pass", [True, False])
def test_encode_is_extend(host: Host, own_pass: bool) -> None:
    layer, rows = small_layer(host.engine)
    twin = layer.fork()
    for start, count in ((0, 1), (1, 70), (71, 1), (72, 128)):
        part = first(rows, count, start)
        buffers = host.buffers(layer, part)
        encoder = host.device.create_command_encoder()
        if own_pass:
            layer.encode(encoder, *buffers, count)
        else:
            compute = encoder.begin_compute_pass()
            layer.encode(compute, *buffers, count)
            compute.end()
        host.submit(encoder)
        assert host.floats(buffers[3]) == twin.extend(*part).tobytes()
        assert layer.rows_seen == twin.rows_seen
    assert same_state(layer.state(), twin.state())


def test_encode_reads_nothing_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = small_layer(host.engine)
    buffers = host.buffers(layer, first(rows, 5))
    calls = count_calls(monkeypatch)
    for _ in range(3):
        calls.clear()
        encoder = host.device.create_command_encoder()
        layer.encode(encoder, *buffers, 5)
        assert not calls.keys() & {"submit", "map_async"}
        host.submit(encoder)
    assert calls == {"submit": 1}  # mine: nothing is made for what has come before


def test_many_encodes_of_two_layers_in_one_encoder(host: Host) -> None:
    layers = [small_layer(host.engine)[0], small_layer(host.engine, prompt=130)[0]]
    _, rows = small_layer(host.engine)
    twins = [layer.fork() for layer in layers]
    snapshots = [layer.snapshot() for layer in layers]
    encoder = host.device.create_command_encoder()
    compute = encoder.begin_compute_pass()
    recorded = []
    for start, count in ((0, 3), (3, 66), (69, 1), (70, 30)):
        for layer in layers:
            part = first(rows, count, start)
            buffers = host.buffers(layer, part)
            layer.encode(compute, *buffers, count)
            recorded.append((layer, part, buffers[3]))
    compute.end()
    host.submit(encoder)
    outputs = {}
    for layer, part, out in recorded:
        twin = twins[layers.index(layer)]
        outputs[id(out)] = twin.extend(*part).tobytes()
        assert host.floats(out) == outputs[id(out)]
    for layer, twin, snapshot in zip(layers, twins, snapshots, strict=True):
        assert same_state(layer.state(), twin.state())
        branch = layer.fork()
        want = twin.extend(*rows).tobytes()
        assert branch.extend(*rows).tobytes() == layer.extend(*rows).tobytes() == want
        layer.restore(snapshot)
        assert layer.rows_seen == snapshot.rows_seen


def test_encode_with_offsets(host: Host) -> None:
    layer, rows = small_layer(host.engine)
    twin = layer.fork()
    part = first(rows, 9)
    step = host.device.limits["min-storage-buffer-offset-alignment"]
    padded = [np.concatenate((np.full(step, np.nan, np.float32), x.ravel())) for x in part]
    q, k, v = ((host.buffer(x), 4 * step) for x in padded)
    out = host.empty(4 * step + 4 * 9 * 4 * 12 + 64)
    host.device.queue.write_buffer(
        marked := host.empty(out.size, "STORAGE|COPY_SRC|COPY_DST"), 0, b"\x07" * out.size
    )
    encoder = host.device.create_command_encoder()
    layer.encode(encoder, q, k, v, (marked, np.int64(4 * step)), 9)
    host.submit(encoder)
    found = host.floats(marked)
    want = twin.extend(*part).tobytes()
    assert found[4 * step :][: len(want)] == want
    assert set(found[: 4 * step]) == set(found[4 * step + len(want) :]) == {7}


def test_encode_of_no_rows(host: Host) -> None:
    layer, _ = small_layer(host.engine)
    before = layer.state()
    small = host.empty(16)
    encoder = host.device.create_command_encoder()
    layer.encode(encoder, small, small, small, host.empty(16), 0)
    assert same_state(layer.state(), before)
    host.submit(encoder)


def test_rows_that_were_not_submitted(host: Host) -> None:
    layer, rows = small_layer(host.engine)
    snapshot, before = layer.snapshot(), layer.state()
    want = layer.fork().extend(*rows).tobytes()
    buffers = host.buffers(layer, rows)
    encoder = host.device.create_command_encoder()
    layer.encode(encoder, *buffers, 200)
    assert layer.rows_seen == 280
    for use in (lambda: layer.extend(*rows), layer.state, layer.snapshot, layer.fork):
        with pytest.raises(RuntimeError, match=r"were encoded .* but not submitted .* submit"):
            use()
    layer.restore(snapshot)
    assert same_state(layer.state(), before)
    # The encoder holds the old state; submitting it now does not touch the layer.
    host.submit(encoder)
    assert same_state(layer.state(), before)
    assert host.floats(buffers[3]) == layer.extend(*rows).tobytes() == want

    layer.restore(snapshot)
    encoder = host.device.create_command_encoder()
    layer.encode(encoder, *buffers, 200)
    host.submit(encoder)
    assert layer.state().rows_seen == 280


def test_an_encoder_outlives_the_layer(host: Host) -> None:
    layer, rows = small_layer(host.engine)
    want = layer.fork().extend(*rows).tobytes()
    buffers = host.buffers(layer, rows)
    encoder = host.device.create_command_encoder()
    layer.encode(encoder, *buffers, 200)
    del layer
    gc.collect()
    out = buffers[3]
    del buffers
    host.submit(encoder)
    assert host.floats(out) == want


def test_the_buffers_of_the_host_are_let_go(host: Host) -> None:
    layer, rows = small_layer(host.engine)
    buffers = host.buffers(layer, rows)
    encoder = host.device.create_command_encoder()
    layer.encode(encoder, *buffers, 200)
    host.submit(encoder)
    kept = [weakref.ref(b) for b in buffers]
    del buffers
    assert not any(ref() for ref in kept)
    assert not layer._at.handle.bind_groups


WRONG = {
    "q is an array": (TypeError, "q must be a wgpu.GPUBuffer, or a tuple"),
    "k is None": (TypeError, "k must be a wgpu.GPUBuffer, or a tuple"),
    "v is three": (TypeError, "v must be a wgpu.GPUBuffer, or a tuple"),
    "v too small": (ValueError, r"v must have 480 bytes from offset 0 on, got a buffer of 464"),
    "out too small": (ValueError, r"out must have 960 bytes from offset 256 on, got .* 1,024"),
    "q without storage": (ValueError, "q must have the usage STORAGE"),
    "k mapped": (ValueError, "k must be unmapped, got mapped"),
    "v destroyed": (ValueError, "q, k, v and out must be buffers in being: .*destroyed"),
    "out of another device": (ValueError, "out must be a buffer of the engine's device"),
    "offset misaligned": (ValueError, r"offset of q must be a multiple of \d+, got 4"),
    "offset negative": (ValueError, "offset of q must be >= 0, got -256"),
    "offset a float": (TypeError, "offset of q must be an integer, got 256.0"),
    "out is q": (ValueError, "out must be a buffer of its own, got that of q"),
    "out is v elsewhere": (ValueError, "out must be a buffer of its own, got that of v"),
    "rows beyond all memory": (ValueError, r"q must have 512,000,000,000 bytes"),
    "rows negative": (ValueError, "rows must be between 0"),
    "rows a float": (TypeError, "rows must be an integer, got 5.0"),
    "rows a bool": (TypeError, "rows must be an integer, got True"),
    "encoder is None": (TypeError, "encoder must be a wgpu.GPUCommandEncoder or a"),
    "encoder is the device": (TypeError, "encoder must be .*, got GPUDevice"),
    "encoder of another device": (ValueError, "encoder must be of the engine's device"),
    "encoder finished": (ValueError, "encoder must be open for commands: "),
    "pass ended": (ValueError, "encoder must be open for commands: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_of_encode(host: Host, engine: o1core.O1Batch, case: str) -> None:
    kind, message = WRONG[case]
    layer, rows = small_layer(host.engine)
    before = layer.state()
    encoder = host.device.create_command_encoder()
    other = gpu_of(engine).device
    ended = host.device.create_command_encoder()
    finished = ended.begin_compute_pass()
    finished.end()
    ended.finish()
    q, k, v, out = host.buffers(layer, first(rows, 5))
    given: dict[str, Any] = {"encoder": encoder, "q": q, "k": k, "v": v, "out": out, "rows": 5}
    match case:
        case "q is an array":
            given["q"] = rows[0][:5]
        case "k is None":
            given["k"] = None
        case "v is three":
            given["v"] = (v, 0, 0)
        case "v too small":
            given["v"] = host.empty(464)
        case "out too small":
            given["out"] = (host.empty(1024), 256)
        case "q without storage":
            given["q"] = host.empty(q.size, "COPY_DST")
        case "k mapped":
            given["k"] = host.device.create_buffer(
                size=q.size, usage="STORAGE", mapped_at_creation=True
            )
        case "v destroyed":
            v.destroy()
        case "out of another device":
            given["out"] = other.create_buffer(size=out.size, usage="STORAGE")
        case "offset misaligned":
            given["q"] = (host.empty(4096), 4)
        case "offset negative":
            given["q"] = (host.empty(4096), -256)
        case "offset a float":
            given["q"] = (host.empty(4096), 256.0)
        case "out is q":
            given["out"] = q
        case "out is v elsewhere":
            both = host.empty(4096)
            given["v"], given["out"] = both, (both, 2048)
        case "rows beyond all memory":
            given["rows"] = 2 * 10**9
        case "rows negative":
            given["rows"] = -1
        case "rows a float":
            given["rows"] = 5.0
        case "rows a bool":
            given["rows"] = True
        case "encoder is None":
            given["encoder"] = None
        case "encoder is the device":
            given["encoder"] = host.device
        case "encoder of another device":
            given["encoder"] = other.create_command_encoder()
        case "encoder finished":
            given["encoder"] = ended
        case "pass ended":
            given["encoder"] = finished
    with pytest.raises(kind, match=f"(?s){message}"):
        layer.encode(**given)
    assert layer.rows_seen == before.rows_seen
    host.submit(encoder)
    assert same_state(layer.state(), before)
    assert layer.extend(*rows).tobytes() == host.engine.load(before).extend(*rows).tobytes()


def test_what_cannot_be_encoded(host: Host, numpy_engine: o1core.O1Batch) -> None:
    encoder = host.device.create_command_encoder()
    nothing = host.empty(16)
    exact, _ = small_layer(host.engine, prompt=20)
    with pytest.raises(RuntimeError, match="exact-only until it has seen 43 rows"):
        exact.encode(encoder, nothing, nothing, nothing, host.empty(16), 1)
    layer, _ = small_layer(numpy_engine)
    with pytest.raises(NotImplementedError, match=r"backend numpy .* extend the layer with arrays"):
        layer.encode(encoder, nothing, nothing, nothing, host.empty(16), 1)
    assert layer.rows_seen == 80
    host.submit(encoder)


def test_a_layer_on_a_shared_device_takes_encoders_of_it(engine: o1core.O1Batch) -> None:
    shared = Host.__new__(Host)
    shared.engine, shared.device = engine, gpu_of(engine).device
    layer, rows = small_layer(engine)
    buffers = shared.buffers(layer, rows)
    encoder = shared.device.create_command_encoder()
    layer.fork().encode(encoder, *buffers, 200)
    shared.submit(encoder)
    assert shared.floats(buffers[3]) == layer.extend(*rows).tobytes()


# What a call costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("rows_of_call", [1, 64, 200])
def test_one_submission_and_one_readback(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch, rows_of_call: int
) -> None:
    layer, rows = small_layer(engine)
    other, _ = small_layer(engine, o1core.Config(landmarks=0, window=16, sinks=0))
    part = first(rows, rows_of_call)
    for x in (layer, other, layer, other):
        x.extend(*part)
    calls = count_calls(monkeypatch)
    layer.extend(*part)
    assert calls == {"submit": 1, "map_async": 1}
    other.extend(*part)
    assert calls == {"submit": 2, "map_async": 2}


def test_in_a_coroutine(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    want = layer.fork().extend(*rows)

    async def use() -> npt.NDArray[np.float32]:
        return layer.extend(*rows)

    assert asyncio.run(use()).tobytes() == want.tobytes()


# Failures -----------------------------------------------------------------------------------------

POINTS = [
    (kind, name, call, when)
    for kind, name, calls in (
        ("GPUDevice", "create_command_encoder", 1),
        ("GPUDevice", "create_bind_group", 1),
        ("GPUDevice", "create_buffer", 1),
        ("GPUCommandEncoder", "copy_buffer_to_buffer", 1),
        ("GPUComputePassEncoder", "dispatch_workgroups", 1),
        ("GPUCommandEncoder", "finish", 1),
        ("GPUQueue", "write_buffer", 2),
        ("GPUQueue", "submit", 1),
        ("GPUBuffer", "map_async", 1),
        ("GPUPromise", "sync_wait", 1),
        ("GPUBuffer", "read_mapped", 1),
        ("GPUBuffer", "unmap", 1),
    )
    for call in range(1, calls + 1)
    for when in ("before", "after")
]


class Interrupt:
    """Raises at the nth call of a method, and then at the first of another one if there is."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, name: str, call: int, when: str):
        self.left, self.when = call, when
        self.make = getattr(getattr(native, kind), name)
        interrupt = self

        def method(*a: Any, **k: Any) -> Any:
            return interrupt.called(*a, **k)

        patch.setattr(getattr(native, kind), name, method)

    def called(self, *a: Any, **k: Any) -> Any:
        self.left -= 1
        if self.left == 0 and self.when == "before":
            raise KeyboardInterrupt
        made = self.make(*a, **k)
        if self.left == 0:
            raise KeyboardInterrupt
        return made


@pytest.fixture(scope="module")
def undisturbed(engine: o1core.O1Batch) -> tuple[o1core.LayerState, Rows, list[bytes]]:
    """A state, rows, and what calls of 37 and of 50 of them give."""
    layer, rows = small_layer(engine)
    return layer.state(), rows, [layer.fork().extend(*first(rows, n)).tobytes() for n in (37, 50)]


@pytest.mark.parametrize(("kind", "name", "call", "when"), POINTS)
def test_an_interrupted_call_changes_nothing(
    undisturbed: tuple[o1core.LayerState, Rows, list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
    call: int,
    when: str,
) -> None:
    before, rows, want = undisturbed
    # On an engine of its own, so that there are buffers, bind groups and uniforms to make.
    fresh = o1core.O1Batch("wgpu", fallback=None)
    layer = fresh.load(before)
    with monkeypatch.context() as patch:
        interrupt = Interrupt(patch, kind, name, call, when)
        with pytest.raises(KeyboardInterrupt):
            layer.extend(*first(rows, 37))
        assert interrupt.left <= 0
    assert layer.rows_seen == 80
    assert same_state(layer.state(), before)
    for rows_of_call, bits in zip((37, 50), want, strict=True):
        assert layer.fork().extend(*first(rows, rows_of_call)).tobytes() == bits
    assert layer.extend(*first(rows, 37)).tobytes() == want[0]


@pytest.mark.parametrize("came", ["load", "extend", "encode", "fork", "restore", "undone"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_in_the_submission_wherever_the_layer_came_from(
    host: Host, monkeypatch: pytest.MonkeyPatch, came: str, when: str
) -> None:
    """Which side of the submission an interrupt came on shows in meta, if what it was is known."""
    layer, rows = small_layer(host.engine)
    early, late = first(rows, 70), first(rows, 130, 70)
    snapshot = layer.snapshot()
    if came != "load":
        layer.extend(*early)
    if came == "encode":
        encoder = host.device.create_command_encoder()
        layer.encode(encoder, *host.buffers(layer, early), 70)
        host.submit(encoder)
    elif came == "fork":
        layer = layer.fork()
    elif came == "restore":
        layer.restore(snapshot)
    elif came == "undone":
        with monkeypatch.context() as patch:
            Interrupt(patch, "GPUBuffer", "map_async", 1, "after")
            with pytest.raises(KeyboardInterrupt):
                layer.extend(*late)
    before, want = layer.state(), layer.fork().extend(*late).tobytes()
    # The buffers of its checkpoint come to the next call with what they held.
    small_layer(host.engine, prompt=130)[0].extend(*early)
    with monkeypatch.context() as patch:
        Interrupt(patch, "GPUQueue", "submit", 1, when)
        with pytest.raises(KeyboardInterrupt):
            layer.extend(*late)
    assert same_state(layer.state(), before)
    assert layer.extend(*late).tobytes() == want


@pytest.mark.parametrize("point", ["map_async", "finish", "submit"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_interrupted_again_while_undoing(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch, point: str, when: str
) -> None:
    layer, rows = small_layer(engine)
    before, want = layer.state(), layer.fork().extend(*rows).tobytes()
    kinds = {"map_async": "GPUBuffer", "finish": "GPUCommandEncoder", "submit": "GPUQueue"}
    with monkeypatch.context() as patch:
        # The first comes within the submission, and undoing it has to find out on which side.
        Interrupt(patch, "GPUQueue", "submit", 1, "after")
        Interrupt(patch, kinds[point], point, 1 if point == "map_async" else 2, when)
        with pytest.raises(KeyboardInterrupt):
            layer.extend(*rows)
    assert same_state(layer.state(), before)
    assert layer.extend(*rows).tobytes() == want


def test_wrong_results_are_undone(engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = small_layer(engine)
    before, want = layer.state(), layer.fork().extend(*rows).tobytes()
    run = WgpuExecutor.run
    for spoil, message in (
        (lambda meta, out: out.fill(np.nan) or meta, "returned NaN or infinity"),
        (lambda meta, out: [m._replace(far=0) for m in meta], "where the plan predicts"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(WgpuExecutor, "run", lambda *a, _s=spoil: _s(run(*a), a[-1]))
            with pytest.raises(RuntimeError, match=message):
                layer.extend(*rows)
        assert same_state(layer.state(), before)
    assert layer.extend(*rows).tobytes() == want


def test_out_of_memory(engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = small_layer(engine)
    before, want = layer.state(), layer.fork().extend(*rows).tobytes()
    snapshot = layer.snapshot()
    fresh = o1core.O1Batch("wgpu", fallback=None)
    grown = fresh.load(before)

    def fails(*a: Any, **k: Any) -> Any:
        raise wgpu.GPUOutOfMemoryError("armed")

    with monkeypatch.context() as patch:
        patch.setattr(native.GPUDevice, "create_buffer", fails)
        for use in (
            lambda: grown.extend(*rows),
            lambda: engine.load(before),
            lambda: layer.restore(snapshot),
            layer.fork,
            layer.snapshot,
            layer.state,
        ):
            with pytest.raises(MemoryError, match=r"has no room for [\d,]+ bytes: armed"):
                use()
    for x in (layer, grown):
        assert same_state(x.state(), before)
        assert x.extend(*rows).tobytes() == want


def test_what_the_device_refuses_is_a_runtime_error(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rows = small_layer(engine)
    before = layer.state()

    def fails(*a: Any, **k: Any) -> Any:
        raise wgpu.GPUValidationError("armed")

    with monkeypatch.context() as patch:
        patch.setattr(native.GPUComputePassEncoder, "dispatch_workgroups", fails)
        with pytest.raises(RuntimeError, match="refused the work: armed"):
            layer.extend(*rows)
    assert same_state(layer.state(), before)


def test_an_executor_object_of_two_engines() -> None:
    shared = WgpuExecutor.open()
    engines = o1core.O1Batch(shared), o1core.O1Batch(shared)
    layers = [small_layer(e)[0] for e in engines for _ in range(2)]
    _, rows = small_layer(engines[0])
    want = layers[0].fork().extend(*rows).tobytes()
    assert {b.tobytes() for b in at_once(lambda x: x.extend(*rows), layers)} == {want}
    engines[0].close()
    assert layers[2].extend(*rows) is not None  # the caller's executor stays open


# Loss of the device -------------------------------------------------------------------------------


def uses(layer: o1core.Layer, rows: Rows) -> dict[str, Callable[[], Any]]:
    """Everything that needs the state on the device."""
    gpu = layer._at.handle.gpu

    def encode() -> None:
        q, k, v, out = (gpu.device.create_buffer(size=2**16, usage="STORAGE") for _ in "qkvo")
        layer.encode(gpu.device.create_command_encoder(), q, k, v, out, 1)

    nothing = first(rows, 0)
    return {
        "extend": lambda: layer.extend(*rows),
        "extend by nothing": lambda: layer.extend(*nothing),
        "state": layer.state,
        "snapshot": layer.snapshot,
        "durable snapshot": lambda: layer.snapshot(durable=True),
        "fork": layer.fork,
        "encode": encode,
    }


def refused(use: Callable[[], Any], *words: str, seconds: float = 5) -> None:
    """A RuntimeError with these words, soon."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        use()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value!r}"
    assert time.monotonic() - start < seconds


def lost_between_calls() -> None:
    engine, other = (o1core.O1Batch("wgpu", fallback=None) for _ in range(2))
    layer, rows = small_layer(engine)
    foreign, _ = small_layer(other)
    exact, _ = small_layer(engine, prompt=20)
    early, late = first(rows, 70), first(rows, 130, 70)
    state = foreign.state()
    layer.extend(*early)
    kept, lost = layer.snapshot(durable=True), layer.snapshot()
    kept_exact = exact.snapshot(durable=True)
    assert kept.state is not None
    assert lost.state is None
    want, want_exact = layer.fork().extend(*late).tobytes(), exact.fork().extend(*rows).tobytes()
    want_foreign = foreign.fork().extend(*rows).tobytes()
    gpu = gpu_of(engine)
    gpu.device.destroy()
    for name, use in uses(layer, late).items():
        words = () if name == "encode" else ("lost", "snapshot(durable=True)", "engine.load()")
        if name != "encode":
            refused(use, *words)
    assert layer.rows_seen == kept.rows_seen == 150
    refused(lambda: layer.restore(lost), "lost")
    refused(lambda: foreign.extend(*rows), "lost")
    refused(exact.state, "lost")

    # The same engine, its layers and its snapshots go on.
    layer.restore(kept)
    assert gpu_of(engine) is not gpu
    assert layer.extend(*late).tobytes() == want
    layer.restore(kept)
    assert same_state(layer.state(), kept.state)
    refused(lambda: layer.restore(lost), "lost")
    exact.restore(kept_exact)
    assert exact.extend(*rows).tobytes() == want_exact
    assert other.load(state).extend(*rows).tobytes() == want_foreign
    assert gpu_of(other) is gpu_of(engine)
    refused(lambda: foreign.extend(*rows), "lost")
    assert o1core.O1Batch("wgpu", fallback=None).load(state).extend(*rows).tobytes() == want_foreign
    assert small_layer(engine)[0].extend(*rows).tobytes() == want_foreign


def lost_with_the_host() -> None:
    host = Host()
    layer, rows = small_layer(host.engine)
    kept, state = layer.snapshot(durable=True), layer.state()
    want = layer.fork().extend(*rows).tobytes()
    buffers = host.buffers(layer, rows)
    encoder = host.device.create_command_encoder()
    host.device.destroy()
    for name, use in uses(layer, rows).items():
        if name != "encode":
            refused(use, "that this engine was given is lost", "layer.snapshot(durable=True)")
    refused(lambda: layer.encode(encoder, *buffers, 200), "lost")
    for use in (lambda: layer.restore(kept), lambda: host.engine.load(state)):
        refused(use, "lost", "O1Batch('wgpu', device=...)")
    refused(
        lambda: o1core.O1Batch("wgpu", device=host.device, fallback=None),
        "the wgpu.GPUDevice given is lost",
    )
    assert kept.state is not None
    fresh = Host()
    for there in (kept.state, state):
        assert fresh.engine.load(there).extend(*rows).tobytes() == want


def lost_in_the_middle() -> None:
    """Destroyed right before, or right after, each kind of call that an extend makes."""
    patch = pytest.MonkeyPatch()
    for kind, name, when in (
        ("GPUComputePassEncoder", "dispatch_workgroups", "after"),
        ("GPUCommandEncoder", "finish", "after"),
        ("GPUQueue", "submit", "after"),
        ("GPUBuffer", "map_async", "after"),
        ("GPUPromise", "sync_wait", "after"),
        ("GPUBuffer", "unmap", "before"),
    ):
        host = Host()
        layer, rows = small_layer(host.engine)
        before = layer.state()
        with patch.context() as inner:
            make = getattr(getattr(native, kind), name)

            def method(
                *a: Any, _make: Any = make, _when: str = when, _host: Host = host, **k: Any
            ) -> Any:
                if _when == "before":
                    _host.destroy()
                made = _make(*a, **k)
                _host.destroy()
                return made

            inner.setattr(getattr(native, kind), name, method)
            refused(partial(layer.extend, *rows), "lost")
        assert layer.rows_seen == before.rows_seen
        refused(layer.state, "lost")


def lost_while_waiting() -> None:
    for pause in (0.0, 0.1):
        host = Host()
        layer, rows = small_layer(host.engine, rows=1500)
        want = layer.fork().extend(*rows).tobytes()
        submitted = threading.Event()
        submit = native.GPUQueue.submit

        def then(*a: Any, _submit: Any = submit, _submitted: threading.Event = submitted) -> None:
            _submit(*a)
            _submitted.set()

        def destroy(
            _host: Host = host, _submitted: threading.Event = submitted, _pause: float = pause
        ) -> None:
            _submitted.wait(30)
            time.sleep(_pause)
            _host.destroy()

        native.GPUQueue.submit = then
        try:
            submitted.clear()
            thread = threading.Thread(target=destroy)
            thread.start()
            start = time.monotonic()
            try:
                # A fast device may be through before it goes.
                assert layer.extend(*rows).tobytes() == want
            except RuntimeError as fault:
                assert "lost" in str(fault)  # noqa: PT017
            assert time.monotonic() - start < 20
            thread.join()
            refused(layer.state, "lost")
        finally:
            native.GPUQueue.submit = submit


def test_loss() -> None:
    in_process(lost_between_calls, lost_with_the_host, lost_in_the_middle, lost_while_waiting)


# Forked processes ---------------------------------------------------------------------------------


def forked(child: Callable[[], None], *, seconds: int = 15) -> None:
    """Runs a function in a forked process, which has to leave it and end by itself with 7."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(7)
    for _ in range(seconds * 20):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 7, os.waitstatus_to_exitcode(status)
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child was not done after {seconds} s")


FORKED = "forked from one that had used the GPU"


def open_in_a_fork() -> None:
    """A new engine in a forked process is one on numpy, or a refusal."""
    for name in ("wgpu", "auto"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opened = o1core.O1Batch(name)
        assert opened.backend == "numpy"
        assert FORKED in opened.reason
        assert [FORKED in str(w.message) for w in caught] == ([True] if name == "wgpu" else [])
        layer, rows = small_layer(opened)
        layer.extend(*rows)
    refused(lambda: o1core.O1Batch("wgpu", fallback=None), FORKED, "spawn")
    reasons = {info.name: info.reasons for info in o1core.backends()}
    assert FORKED in reasons["wgpu"][0]


def fork_after_use() -> None:
    engine = o1core.O1Batch("wgpu", fallback=None)
    layer, rows = small_layer(engine)
    want = layer.fork().extend(*rows).tobytes()
    snapshot, state = layer.snapshot(), layer.state()
    host, idle = Host(), Host()  # a device that was used, and one that only was opened
    guest, _ = small_layer(host.engine)
    buffers = host.buffers(guest, rows)
    encoder = host.device.create_command_encoder()

    def child() -> None:
        for x in (layer, guest):
            for name, use in uses(x, rows).items():
                if name != "encode":
                    refused(use, FORKED, "spawn", seconds=1)
        refused(lambda: guest.encode(encoder, *buffers, 200), FORKED, seconds=1)
        refused(lambda: layer.restore(snapshot), FORKED, seconds=1)
        refused(lambda: engine.load(state), FORKED, seconds=1)
        refused(lambda: o1core.O1Batch("wgpu", device=host.device, fallback=None), FORKED)
        open_in_a_fork()
        engine.close()

    def dropping_child() -> None:
        nonlocal engine, layer, snapshot, host, idle, guest, buffers, encoder
        del engine, layer, snapshot, host, idle, guest, buffers, encoder
        device._shared.clear()
        device._adapters.cache_clear()
        gc.collect()

    forked(child)
    forked(dropping_child)
    forked(lambda: forked(child))
    assert layer.extend(*rows).tobytes() == want
    assert host.engine.load(state).extend(*rows).tobytes() == want

    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == 0, process.exitcode
    engine.close()


def fork_during_a_call() -> None:
    """Another thread is in a call, with all its locks; they are never released in the child."""

    class Slow(NumpyExecutor):
        def run(self, *arguments: Any) -> Any:
            entered.set()
            leave.wait(30)
            return super().run(*arguments)

    host = Host()
    layer, rows = small_layer(host.engine)
    state = layer.state()
    beside = o1core.O1Batch(host.engine._executor)  # in no call itself
    guest = beside.load(state)
    wait = device.Gpu.mapped

    def waiting(*arguments: Any) -> Any:
        entered.set()
        leave.wait(30)
        return wait(*arguments)

    patch = pytest.MonkeyPatch()
    for engine in (host.engine, o1core.O1Batch(Slow())):
        entered, leave = threading.Event(), threading.Event()
        layer, idle = engine.load(state), engine.load(state)
        patch.setattr(device.Gpu, "mapped", waiting)
        thread = threading.Thread(target=partial(layer.extend, *rows))
        thread.start()
        assert entered.wait(30)

        def child(layer: o1core.Layer = layer, idle: o1core.Layer = idle) -> None:
            why = "this process was forked"
            for x in (layer, idle):
                refused(partial(x.extend, *rows), why, seconds=1)
                refused(x.state, why, seconds=1)
            refused(partial(layer._engine.load, state), why, seconds=1)
            for use in (partial(guest.extend, *rows), guest.state, partial(beside.load, state)):
                refused(use, FORKED, seconds=1)
            layer._engine.close()
            with o1core.O1Batch("numpy") as new:
                new.load(state).extend(*rows)

        forked(child)
        leave.set()
        thread.join(30)
        patch.undo()
        assert layer.rows_seen == 280
        assert same_state(idle.state(), state)


def fork_with_the_host_only() -> None:
    """o1core has not used the GPU when the process forks, but the host has."""
    from wgpu.backends.wgpu_native import gpu

    given = gpu.request_adapter_sync().request_device_sync()

    def child() -> None:
        refused(lambda: o1core.O1Batch("wgpu", device=given, fallback=None), "before this process")
        os._exit(7)

    forked(child)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize(
    "scripts", [(fork_after_use, fork_during_a_call), (fork_with_the_host_only,)]
)
def test_fork(scripts: Sequence[Callable[[], None]]) -> None:
    in_process(*scripts)


# Threads ------------------------------------------------------------------------------------------


def at_once(do: Callable[[Any], Any], over: Sequence[Any]) -> list[Any]:
    """What `do` returns for each, all of them in threads of their own."""
    results: list[Any] = [None] * len(over)
    start = threading.Barrier(len(over))

    def work(i: int) -> None:
        start.wait()
        results[i] = do(over[i])

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(over))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_engines_in_threads(engine: o1core.O1Batch) -> None:
    first_layer, rows = small_layer(engine)
    state = first_layer.state()
    sizes = (50, 1, 64, 3, 82)
    ends = np.cumsum(sizes)
    cuts = [(int(end) - size, size) for end, size in zip(ends, sizes, strict=True)]
    want = [first_layer.extend(*first(rows, n, at)).tobytes() for at, n in cuts]

    def use(i: int) -> tuple[list[bytes], o1core.LayerState]:
        mine = o1core.O1Batch("wgpu", fallback=None) if i % 2 else engine
        layer = mine.load(state)
        snapshot = layer.snapshot()
        layer.extend(*rows)
        layer.restore(snapshot)
        return [layer.extend(*first(rows, n, at)).tobytes() for at, n in cuts], layer.state()

    for found, after in at_once(use, range(6)):
        assert found == want
        assert same_state(after, first_layer.state())


def test_one_layer_in_two_threads(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    twin = layer.fork()
    want = {twin.extend(*rows).tobytes() for _ in range(3)}
    assert {b.tobytes() for b in at_once(lambda _: layer.extend(*rows), range(3))} == want
    assert same_state(layer.state(), twin.state())


def test_opening_in_threads() -> None:
    """Also of a device that nobody has opened yet: it is opened once."""
    given = request_device()
    engines = at_once(lambda _: o1core.O1Batch("wgpu", device=given, fallback=None), range(3))
    assert len({id(gpu_of(e)) for e in engines}) == 1


# Memory -------------------------------------------------------------------------------------------


def live_buffers() -> int:
    gc.collect()
    return sum(isinstance(x, native.GPUBuffer) for x in gc.get_objects())


def native_buffers(on: o1core.O1Batch) -> int:
    """Buffers that wgpu itself still has, once it looked which are no longer needed."""
    gpu = gpu_of(on)
    gpu.submit(gpu.device.create_command_encoder())
    gpu.device._poll_wait()
    report = wgpu.diagnostics.wgpu_native_counts.get_dict()
    return sum(part["k"] for part in report["Buffer"]["hub"].values())


def test_what_is_dropped_is_freed(engine: o1core.O1Batch) -> None:
    """Without the collector: device memory must not wait for it."""
    q, k, v = small_rows(280)

    def use(prompt: int) -> None:
        layer = engine.seal(q[:prompt], k[:prompt], v[:prompt], SMALL)
        snapshot, branch = layer.snapshot(), layer.fork()
        for x in (layer, branch):
            x.extend(q[:5], k[:5], v[:5])
        layer.restore(snapshot)
        layer.state()

    use(100)
    before, kept = live_buffers(), native_buffers(engine)
    gc.disable()
    try:
        for prompt in (44, 50, 60, 100, 150, 20):
            use(prompt)
        found = sum(isinstance(x, native.GPUBuffer) for x in gc.get_objects())
    finally:
        gc.enable()
    assert found <= before
    assert native_buffers(engine) <= kept


def test_loading_leaves_nothing_to_submit(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wgpu keeps what was written, and where, until a submission; a host may only load for long."""
    state = small_layer(engine)[0].state()
    calls = count_calls(monkeypatch)
    layer = engine.load(state)
    assert calls == {"create_buffer": len(layer._at.handle.buffers), "submit": 1}


def test_a_closed_engine_frees_what_calls_share() -> None:
    given = o1core.O1Batch("wgpu", fallback=None)
    layer, rows = small_layer(given)
    layer.extend(*rows)
    del layer
    before = live_buffers()
    given.close()
    assert live_buffers() <= before - 5


def test_many_row_counts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few slots for uniforms: they run out again and again, also between encode and submission."""
    monkeypatch.setattr(workspace, "UNIFORM_SLOTS", 3)
    monkeypatch.setattr(workspace, "KEPT_STEPS", 40)
    engine = o1core.O1Batch("wgpu", device=host.device, fallback=None)
    layer, rows = small_layer(engine)
    twin, _ = small_layer(host.engine)
    work = engine._executor._work  # type: ignore[attr-defined]
    at = 0
    for count in (1, 2, 3, 4, 5, 1, 6, 7, 2, 8):
        part = first(rows, count, at)
        assert layer.extend(*part).tobytes() == twin.extend(*part).tobytes()
        assert work.uniforms.size == 3 * workspace.UNIFORM_STRIDE
        assert sum(map(len, work.programs.values())) <= 40
        at += count

    encoder = host.device.create_command_encoder()
    recorded = []
    for count in (9, 10, 11, 12, 9):
        part = first(rows, count, at)
        recorded.append((part, host.buffers(layer, part)))
        layer.encode(encoder, *recorded[-1][1], count)
        at += count
    host.submit(encoder)
    for part, buffers in recorded:
        assert host.floats(buffers[3]) == twin.extend(*part).tobytes()
    assert same_state(layer.state(), twin.state())


def test_launches_recorded_by_either_way(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = small_layer(host.engine)
    direct = layer.fork().extend(*rows)
    assert commands.COMMANDS is not None
    monkeypatch.setattr(commands, "COMMANDS", None)
    assert layer.extend(*rows).tobytes() == direct.tobytes()


def test_a_launch_that_is_wrong_shows_when_the_encoder_is_finished(host: Host) -> None:
    layer, rows = small_layer(host.engine)
    buffers = host.buffers(layer, rows)
    encoder = host.device.create_command_encoder()
    recorded = []

    def swapped(compute: Any, launches: Any) -> None:
        # The bind group of the first launch does not fit the pipeline of the second.
        first, second, *_ = launches
        recorded.append(second)
        commands.record(compute, [first, second._replace(group=first.group)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "record", swapped)
        layer.encode(encoder, *buffers, len(rows[0]))
    assert recorded
    with pytest.raises(wgpu.GPUValidationError):
        encoder.finish()


def test_a_call_of_more_uniforms_than_slots(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large layer is computed in slabs of few rows, with a uniform each."""
    monkeypatch.setattr(workspace, "UNIFORM_SLOTS", 2)
    engine = o1core.O1Batch("wgpu", device=host.device, fallback=None)
    engine._executor.largest_scratch = 1  # type: ignore[attr-defined]
    layer, rows = small_layer(engine)
    out = layer.extend(*rows)
    work = engine._executor._work  # type: ignore[attr-defined]
    assert work.uniforms.size > 2 * workspace.UNIFORM_STRIDE
    check_right(layer, small_rows(280), out)
