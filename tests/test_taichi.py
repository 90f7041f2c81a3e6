"""The taichi backend, where the matrix does not look: arrays of the device, slabs, other arches."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import REQUIRED, ROOT, TAICHI_ARCH, require_backend
from support import GEOMETRIES, ROW_COUNTS, SMALL, SUBSET, same_state, small_layer, small_rows

import o1core
from o1core.plan import MAX_SUB_CHUNK, scratch_bytes
from o1core.testing import Rows, check_backend, random_rows, run_case

only_taichi = pytest.mark.parametrize("backend", ["taichi"], indirect=True)
NESTED = "O1CORE_NESTED" in os.environ


@pytest.fixture(scope="session")
def ti() -> Any:
    """The language that the backend runs on."""
    require_backend("taichi")
    from o1core_taichi.language import ti

    return ti


def device_array(ti: Any, array: np.ndarray, dtype: Any = None) -> Any:
    made = ti.ndarray(dtype or ti.f32, array.shape)
    made.from_numpy(np.ascontiguousarray(array))
    return made


def device_rows(ti: Any, rows: Rows) -> tuple[Any, Any, Any]:
    q, k, v = (device_array(ti, x) for x in rows)
    return q, k, v


# Kernels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_cpu", [False, True])
def test_scratch_is_no_more_than_the_plan_says(ti: Any, on_cpu: bool) -> None:
    """Calls of less than 64 rows take that of 64."""
    from o1core_taichi.executor import _scratch_shapes, _total

    for geometry in GEOMETRIES:
        for rows in ROW_COUNTS:
            own = 4 * _total(_scratch_shapes(geometry, rows, on_cpu))
            assert own <= scratch_bytes(geometry, max(rows, MAX_SUB_CHUNK)), (geometry, rows)


@only_taichi
def test_other_rows_and_sizes_compile_nothing(engine: o1core.O1Batch) -> None:
    from o1core_taichi import kernels

    call = kernels.call_on_cpu if TAICHI_ARCH == "cpu" else kernels.call_on_gpu

    def compiled() -> int:
        return len(call._primal.mapper.mapping)

    layer, (q, k, v) = small_layer(engine)
    layer.extend(q[:3], k[:3], v[:3])
    before = compiled()
    assert before >= 1
    for rows in (1, 2, 64, 130):
        layer.extend(q[:rows], k[:rows], v[:rows])
    for config in (o1core.Config(16, 40, 3, "fm"), o1core.Config(0, 40, 0)):
        q, k, v = random_rows(1, 200, groups=3, heads_per_group=1, head_dim=24, value_dim=7)
        engine.seal(q[:150], k[:150], v[:150], config).extend(q[150:], k[150:], v[150:])
    assert compiled() == before


@only_taichi
def test_slabs_and_pieces_change_nothing(
    engine: o1core.O1Batch, ti: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls too long for scratch, or to be copied at once, run in parts; all cases stay right."""
    whole, rows = small_layer(engine)
    parts, _ = small_layer(engine)
    on_device, _ = small_layer(engine)
    want = whole.extend(*rows)
    monkeypatch.setattr("o1core_taichi.executor.ARRAY_BUDGET", 1)
    monkeypatch.setattr(engine._executor, "max_slab", 64)
    out = parts.extend(*rows)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    assert on_device.extend(*device_rows(ti, rows)).to_numpy().tobytes() == out.tobytes()
    for case in SUBSET[:3]:
        run_case(engine, case)
    assert parts.state().groups_meta == whole.state().groups_meta
    np.testing.assert_allclose(parts.state().far_num, whole.state().far_num, rtol=1e-4, atol=1e-4)


@only_taichi
@pytest.mark.parametrize("parts", ["arrays", "slabs"])
def test_a_call_that_fails_in_its_second_part_leaves_the_state(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch, parts: str
) -> None:
    from o1core_taichi.launch import launch

    layer, rows = small_layer(engine)
    layer.extend(*(x[:9] for x in rows))
    before = layer.state()
    if parts == "arrays":
        monkeypatch.setattr("o1core_taichi.executor.ARRAY_BUDGET", 1)
    else:
        monkeypatch.setattr(engine._executor, "max_slab", 64)
    calls: list[Any] = []

    def fails_later(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        launch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("o1core_taichi.executor.launch", fails_later)
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                layer.extend(*rows)
            assert same_state(layer.state(), before)
    twin = engine.load(before)
    assert layer.extend(*rows).tobytes() == twin.extend(*rows).tobytes()


@only_taichi
def test_snapshots_share_what_no_call_overwrites(engine: o1core.O1Batch) -> None:
    layer, (q, k, v) = small_layer(engine)
    seen = []
    for at in range(0, 60, 10):
        seen.append((layer.snapshot(), layer.state(), layer.fork()))
        layer.extend(q[at : at + 10], k[at : at + 10], v[at : at + 10])
    for snapshot, state, fork in seen:
        layer.restore(snapshot)
        assert same_state(layer.state(), state)
        assert same_state(fork.state(), state)
        first = fork.extend(q, k, v)
        assert layer.extend(q, k, v).tobytes() == first.tobytes()
        layer.restore(snapshot)
        assert same_state(layer.state(), state)


def test_limits_are_named() -> None:
    require_backend("taichi")
    from o1core_taichi import TaichiExecutor
    from o1core_taichi.language import NAME

    runtime: Any = SimpleNamespace(
        arch="cuda", name="a GPU", software=False, adopted=False, gone=False
    )
    executor = TaichiExecutor(runtime)
    wide = o1core.Config(300, 32, 2).geometry(
        groups=1, heads_per_group=1, head_dim=8, value_dim=8, rows=4000
    )
    (reason,) = executor.unsupported(o1core.Plan.build(wide, 1))
    assert reason == f"landmarks must be at most 256 ({NAME} on cuda), got 300"
    huge = o1core.Config(8, 2**20, 2).geometry(
        groups=64, heads_per_group=1, head_dim=64, value_dim=64, rows=2**21
    )
    reasons = executor.unsupported(o1core.Plan.build(huge, 1))
    assert any(x.startswith("state must have at most 2,147,483,647 elements") for x in reasons)


@only_taichi
def test_rows_in_read_only_memory(engine: o1core.O1Batch, tmp_path: Path) -> None:
    """Which the language would write back what it read, and end the process."""
    layer, rows = small_layer(engine)
    mapped = []
    for name, x in zip("qkv", rows, strict=True):
        np.save(tmp_path / f"{name}.npy", x)
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    want = layer.fork().extend(*rows)
    assert layer.extend(mapped[0], mapped[1], mapped[2]).tobytes() == want.tobytes()


# Wrong in one place ---------------------------------------------------------------------------


def wrong_size(field: str, change: Callable[[int], int]) -> Callable[[Any], Any]:
    """The kernels are told something wrong of the geometry, or of where things are."""

    def patch(module: Any) -> Any:
        sizes = module._sizes

        def changed(*arguments: Any) -> Any:
            values = sizes(*arguments)
            at = module.FIELDS.index(field)
            values[at] = change(int(values[at]))
            return values

        return "_sizes", changed

    return patch


def wrong_call(change: Callable[..., tuple[Any, ...]]) -> Callable[[Any], Any]:
    """The kernel gets other arguments than those meant for it."""

    def patch(module: Any) -> Any:
        launch = module.launch

        def changed(runtime: Any, kernel: Any, numbers: Any, arrays: Any) -> None:
            arguments = change(*numbers, *arrays)
            launch(runtime, kernel, arguments[:2], arguments[2:])

        return "launch", changed

    return patch


def swapped(a: int, b: int) -> Callable[..., tuple[Any, ...]]:
    def change(*arguments: Any) -> tuple[Any, ...]:
        order = list(range(len(arguments)))
        order[a], order[b] = b, a
        return tuple(arguments[i] for i in order)

    return change


def without_last_row(first: int, rows: int, *rest: Any) -> tuple[Any, ...]:
    return first, max(1, rows - 1), *rest


def one_row_later(first: int, rows: int, *rest: Any) -> tuple[Any, ...]:
    return max(0, first - 1), rows, *rest


WRONG: dict[str, Callable[[Any], Any]] = {
    "no-sinks": wrong_size("sinks", lambda sinks: 0),
    "one-landmark-less": wrong_size("landmarks", lambda m: max(0, m - 1)),
    "one-head": wrong_size("heads", lambda heads: 1),
    "one-group": wrong_size("groups", lambda groups: 1),
    "narrow-keys": wrong_size("head_dim", lambda d: d - 1),
    "narrow-values": wrong_size("value_dim", lambda d: d - 1),
    "other-rectifier": wrong_size("clamps", lambda clamps: 1 - clamps),
    # The bits of a float32: some 0.1% more, and 0.
    "scale": wrong_size("scale", lambda bits: bits + 2**13),
    "scale-0": wrong_size("scale", lambda bits: 0),
    "far-sums-elsewhere": wrong_size("far_num", lambda at: max(0, at - 1)),
    "mix-elsewhere": wrong_size("mix", lambda at: max(0, at - 1)),
    "landmarks-elsewhere": wrong_size("q_landmarks", lambda at: max(0, at - 1)),
    "scratch-overlaps": wrong_size("far_peaks", lambda at: 0),
    "block-mass-overlaps": wrong_size("block_mass", lambda at: at + 1),
    "numerators-overlap": wrong_size("numerators", lambda at: 0),
    **{
        f"no-{kernel}": wrong_size("stages", lambda bits, i=i: bits & ~(1 << i))  # type: ignore[misc]
        for i, kernel in enumerate(
            ("far_e", "far_sums", "far_commit", "attend", "ring_commit", "meta")
        )
    },
    "writes-the-old-state": wrong_call(swapped(4, 7)),
    "keeps-the-old-meta": wrong_call(swapped(3, 6)),
    "keys-for-values": wrong_call(swapped(10, 11)),
    "last-row-forgotten": wrong_call(without_last_row),
}


@only_taichi
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_one_place_is_caught(
    engine: o1core.O1Batch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from o1core_taichi import TaichiExecutor
    from o1core_taichi import executor as module

    monkeypatch.setattr(module, *WRONG[name](module))
    # Without what it has kept of right calls.
    executor = TaichiExecutor(engine._executor._runtime)  # type: ignore[attr-defined]
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        check_backend(executor, SUBSET)
    print(f"{name}: {str(caught.value)[:200]}")


# Arrays of the device -------------------------------------------------------------------------


@only_taichi
def test_arrays_of_the_language_stay_on_the_device(engine: o1core.O1Batch, ti: Any) -> None:
    host, rows = small_layer(engine)
    layer = engine.load(host.state())
    for part in (slice(0, 1), slice(1, 70), slice(70, 200)):
        given = device_rows(ti, (rows[0][part], rows[1][part], rows[2][part]))
        out = layer.extend(*given, check_finite=part.start != 1)
        assert isinstance(out, ti.Ndarray)
        want = host.extend(*(x[part] for x in rows))
        assert out.to_numpy().tobytes() == want.tobytes()
        for array, x in zip(given, rows, strict=True):
            assert array.to_numpy().tobytes() == x[part].tobytes()
    assert same_state(layer.state(), host.state())


@only_taichi
def test_sealing_and_waiting_with_arrays_of_the_language(engine: o1core.O1Batch, ti: Any) -> None:
    q, k, v = small_rows(120)
    for prompt in (80, 10):
        at_home = engine.seal(q[:prompt], k[:prompt], v[:prompt], SMALL)
        Q, K, V = device_rows(ti, (q[:prompt], k[:prompt], v[:prompt]))
        layer = engine.seal(Q, K, V, SMALL)
        assert same_state(layer.state(), at_home.state())
        want = at_home.extend(q[prompt:], k[prompt:], v[prompt:])
        out = layer.extend(*device_rows(ti, (q[prompt:], k[prompt:], v[prompt:])))
        assert isinstance(out, ti.Ndarray)
        assert out.to_numpy().tobytes() == want.tobytes()
        assert same_state(layer.state(), at_home.state())


@only_taichi
def test_a_batch_on_the_device(engine: o1core.O1Batch, ti: Any) -> None:
    sequences = [random_rows(s, 150, groups=2, heads_per_group=2, value_dim=9) for s in range(3)]
    q, k, v = (np.stack(x) for x in zip(*sequences, strict=True))
    host = engine.seal(q[:, :100], k[:, :100], v[:, :100], SMALL)
    layer = engine.load(host.state())
    out = layer.extend(*device_rows(ti, (q[:, 100:], k[:, 100:], v[:, 100:])))
    want = host.extend(q[:, 100:], k[:, 100:], v[:, 100:])
    assert out.to_numpy().tobytes() == want.tobytes()
    bad = v[:, 100:].copy()
    bad[2, 5, 1, 3] = np.nan
    with pytest.raises(ValueError, match=r"v must be finite: row 5 holds nan at index \(2, 5, 1"):
        layer.extend(*device_rows(ti, (q[:, 100:], k[:, 100:], bad)))
    assert same_state(layer.state(), host.state())


@only_taichi
@pytest.mark.parametrize("name", ["f16", "f64"])
def test_other_floats_on_the_device(engine: o1core.O1Batch, ti: Any, name: str) -> None:
    if TAICHI_ARCH == "vulkan":
        pytest.skip("drivers need not have 16-bit or 64-bit floats")
    host, rows = small_layer(engine)
    layer = engine.load(host.state())
    dtype = {"f16": np.float16, "f64": np.float64}[name]
    cast = [x.astype(dtype) for x in rows]
    out = layer.extend(*(device_array(ti, x, getattr(ti, name)) for x in cast))
    assert out.to_numpy().tobytes() == host.extend(*cast).tobytes()


@only_taichi
@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("q", np.nan, r"q must be finite: row 7 holds nan at index \(7, 2, 4\) \(check_finite"),
        ("k", -np.inf, r"k must be finite: row 7 holds -inf at index \(7, 1, 4\)"),
        ("k", 2.0**50, r"k must be at most 2.81e\+14 in magnitude: row 7 holds 1125899906842624"),
        ("v", -(2.0**97), r"v must be at most 7.92e\+28 in magnitude: row 7 holds -1.58"),
    ],
)
def test_bad_numbers_on_the_device(
    engine: o1core.O1Batch, ti: Any, array: str, value: float, message: str
) -> None:
    layer, rows = small_layer(engine)
    before = layer.state()
    arrays = dict(zip("qkv", (x.copy() for x in rows), strict=True))
    arrays[array][7, 2 if array == "q" else 1, 4] = value
    arrays[array][9, 0, 0] = np.nan
    with pytest.raises(ValueError, match=message):
        layer.extend(*device_rows(ti, (arrays["q"], arrays["k"], arrays["v"])))
    assert same_state(layer.state(), before)
    # Whoever vouches for the rows gets whatever they give, and no error.
    layer.extend(*device_rows(ti, (arrays["q"], arrays["k"], arrays["v"])), check_finite=False)


@only_taichi
def test_arrays_that_do_not_belong_together(engine: o1core.O1Batch, ti: Any) -> None:
    layer, (q, k, v) = small_layer(engine)
    before = layer.state()
    Q, K, V = device_rows(ti, (q, k, v))
    with pytest.raises(TypeError, match=r"k must be (ti|qd)\.ndarray, as others of q, k and v are"):
        layer.extend(Q, k, V)
    with pytest.raises(TypeError, match=r"q must be (ti|qd)\.ndarray"):
        layer.extend(q, K, V)
    with pytest.raises(ValueError, match=r"v must have shape \[rows, 2, 12\], got \(200, 12, 2\)"):
        layer.extend(Q, K, device_array(ti, v.transpose(0, 2, 1)))
    with pytest.raises(ValueError, match="k must have as many rows as q, 200, got 199"):
        layer.extend(Q, device_array(ti, k[1:]), V)
    whole = ti.ndarray(ti.i32, q.shape)
    with pytest.raises(TypeError, match="q must be an array of numbers, of type f16, f32 or f64"):
        layer.extend(whole, K, V)
    vectors = ti.Vector.ndarray(12, ti.f32, (200, 2))
    with pytest.raises(TypeError, match="v must be an array of numbers, of type f16, f32 or f64"):
        layer.extend(Q, K, vectors)
    assert same_state(layer.state(), before)


@only_taichi
def test_a_backend_that_returns_nan_on_the_device_is_caught(
    engine: o1core.O1Batch, ti: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from o1core_taichi import TaichiExecutor

    layer, rows = small_layer(engine)
    before = layer.state()
    launch = TaichiExecutor.launch

    def spoiled(executor: Any, handle: Any, slabs: Any, qkv: Any, out: Any, held: Any) -> None:
        launch(executor, handle, slabs, qkv, out, held)
        ti.sync()
        out[199, 3, 11] = np.nan

    with monkeypatch.context() as patch:
        patch.setattr(TaichiExecutor, "launch", spoiled)
        with pytest.raises(RuntimeError, match="backend taichi returned NaN or infinity"):
            layer.extend(*device_rows(ti, rows))
    assert same_state(layer.state(), before)

    def stuck(executor: Any, handle: Any, slabs: Any, qkv: Any, out: Any, held: Any) -> None:
        out.fill(0)
        held.fill(0)

    with monkeypatch.context() as patch:
        patch.setattr(TaichiExecutor, "launch", stuck)
        with pytest.raises(RuntimeError, match="where the plan predicts"):
            layer.extend(*device_rows(ti, rows))
    assert same_state(layer.state(), before)


def test_more_numbers_than_the_language_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    require_backend("taichi")
    from o1core_taichi.resident import LanguageRows

    rows = LanguageRows.__new__(LanguageRows)
    rows.shapes = {"q": (2**22, 8, 64), "k": (2**22, 8, 64), "v": (2**22, 8, 64)}
    g = SMALL.geometry(groups=8, heads_per_group=1, head_dim=64, value_dim=64, rows=80)
    handle: Any = None
    with pytest.raises(
        ValueError, match=r"q must have at most 2,147,483,647 elements .* less rows"
    ):
        rows.run(o1core.Plan.build(g, 2**22), handle, None, None)


def test_the_first_engine_in_a_thread(tmp_path: Path) -> None:
    """The thread that initialised the language is gone when the process ends."""
    require_backend("taichi")
    script = tmp_path / "script.py"
    script.write_text(f"""
import threading
import o1core
from o1core.testing import random_rows

q, k, v = random_rows(0, 200)
outs = []

def use():
    engine = o1core.O1Batch("taichi", fallback=None, device={TAICHI_ARCH!r})
    outs.append(engine.seal(q[:150], k[:150], v[:150]).extend(q[150:], k[150:], v[150:]))

for call in (threading.Thread(target=use), threading.Thread(target=use)):
    call.start()
    call.join()
use()
assert len(outs) == 3
assert (outs[0] == outs[1]).all() and (outs[0] == outs[2]).all()
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def cuda_torch() -> Any:
    if TAICHI_ARCH != "cuda":
        pytest.skip("only with O1CORE_TAICHI_ARCH=cuda, on a machine that has it")
    return pytest.importorskip("torch")


@only_taichi
def test_tensors_of_torch_stay_on_the_device(engine: o1core.O1Batch) -> None:
    torch = cuda_torch()
    host, rows = small_layer(engine)
    layer = engine.load(host.state())
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    at = 0
    for size, stream in zip((1, 70, 64, 65), streams * 2, strict=True):
        part = [x[at : at + size] for x in rows]
        with torch.cuda.stream(stream):
            # Work that is not done yet when the call is made.
            wait = torch.ones(3000, 3000, device="cuda")
            for _ in range(20):
                wait = wait @ wait * 1e-4
            given = [torch.from_numpy(x).cuda() + 0 * wait[0, 0] for x in part]
            out = layer.extend(*given, check_finite=size != 70)
            after = out * 1
        assert out.device.type == "cuda"
        assert after.cpu().numpy().tobytes() == host.extend(*part).tobytes()
        at += size
    assert same_state(layer.state(), host.state())


@only_taichi
def test_tensors_of_every_kind(engine: o1core.O1Batch) -> None:
    torch = cuda_torch()
    host, rows = small_layer(engine)
    layer = engine.load(host.state())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        tensors = [torch.from_numpy(x[:20]).to(dtype) for x in rows]
        want = host.extend(*(x.float().numpy() for x in tensors))
        out = layer.extend(*(x.cuda() for x in tensors))
        assert out.dtype == torch.float32
        assert out.cpu().numpy().tobytes() == want.tobytes()
    q, k, v = (torch.from_numpy(x[:20]).cuda() for x in rows)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    want = host.extend(*(x[:20] for x in rows))
    out = layer.extend(strided.requires_grad_(), k, v.expand(20, 2, 12))
    assert not out.requires_grad
    assert out.cpu().numpy().tobytes() == want.tobytes()
    empty = layer.extend(q[:0], k[:0], v[:0])
    assert (tuple(empty.shape), empty.device.type) == ((0, 4, 12), "cuda")
    v[3, 1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"v must be finite: row 3 holds nan at index \(3, 1, 2\)"):
        layer.extend(q, k, v)
    with pytest.raises(TypeError, match="k must be a CUDA tensor, as others"):
        layer.extend(q, k.cpu(), v)
    with pytest.raises(TypeError, match="q must have dtype float16, bfloat16, float32 or float64"):
        layer.extend(q.int(), k, v)
    assert same_state(layer.state(), host.state())
    v = v.nan_to_num()
    waits = engine.seal(q[:5], k[:5], v[:5], SMALL)
    assert waits.exact_only
    assert waits.extend(q, k, v).device.type == "cuda"


# Other arches and languages, in processes of their own ------------------------------------------


ELSEWHERE: dict[str, tuple[dict[str, str], str]] = {
    # What the parity matrix does not do: without a GPU this is llvmpipe, and slow.
    "vulkan": (
        {"O1CORE_TAICHI_ARCH": "vulkan"},
        "taichi and not test_on and (same_bytes_twice or dropped_far or language or read_only)",
    ),
    "quadrants": (
        {"O1CORE_TAICHI": "quadrants"},
        "taichi and not test_on and (test_case or language) and not other_pieces",
    ),
}


def missing(what: str) -> str:
    """Why these tests cannot run; "" if they can."""
    if what == "quadrants":
        return "" if importlib.util.find_spec("quadrants") else "quadrants is not installed"
    from o1core_taichi import devices

    return "" if devices.vulkan_device("") else "there is no Vulkan device"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """All of them at once, each in a process of its own."""
    folder, started = tmp_path_factory.mktemp("elsewhere"), {}
    require_backend("taichi")
    for what, (environment, chosen) in ELSEWHERE.items():
        if missing(what):
            continue
        env = {**os.environ, "O1CORE_NESTED": "1", "O1CORE_REQUIRE": "taichi", **environment}
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
        command += ["tests/test_matrix.py", "tests/test_taichi.py", "-k", chosen]
        log = folder / what
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=env)
        started[what] = process, log
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
@pytest.mark.skipif(NESTED, reason="this is the other process")
@pytest.mark.parametrize("what", ELSEWHERE)
def test_on(elsewhere: dict[str, Any], what: str) -> None:
    """On another arch, or in the other language, of which a process has one."""
    if reason := missing(what):
        if "taichi" in REQUIRED and what == "vulkan":
            pytest.fail(reason)
        pytest.skip(reason)
    process, log = elsewhere[what]
    status, text = process.wait(), log.read_text()
    assert status == 0, text[-6000:]
    print(text.splitlines()[-1])
    assert " passed" in text
    assert what != "vulkan" or "skipped" not in text
