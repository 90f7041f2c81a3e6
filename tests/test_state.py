"""LayerState: a state moves between engines, files and machines, and cannot be wrong unnoticed."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import SMALL, same_state, small_layer, small_rows

import o1core
from o1core.state import _checksum


@pytest.fixture
def state(engine: o1core.O1Batch) -> o1core.LayerState:
    layer, rows = small_layer(engine)
    layer.extend(*rows)
    return layer.state()


@pytest.mark.parametrize("prompt", [80, 20])
@pytest.mark.parametrize("landmarks", [0, 8])
def test_save_and_load(engine: o1core.O1Batch, tmp_path: Path, prompt: int, landmarks: int) -> None:
    config = o1core.Config(landmarks, 32, 2, windows=(32, 40), scale=0.3)
    layer, rows = small_layer(engine, config, prompt=prompt)
    path = tmp_path / "layer.safetensors"
    layer.state().save(path)
    loaded = o1core.LayerState.load(path)
    assert same_state(layer.state(), loaded)
    assert (loaded.config, loaded.geometry) == (config, layer.geometry)
    assert loaded.exact_only == layer.exact_only
    again = engine.load(loaded)
    assert again.rows_seen == prompt
    assert again.extend(*rows).tobytes() == layer.extend(*rows).tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]


def test_state_is_a_copy_and_read_only(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    before = layer.state()
    layer.extend(*rows)
    assert not same_state(before, layer.state())
    assert before.rows_seen == 80
    with pytest.raises(ValueError, match="read-only"):
        before.ring_k[0] = 0
    with pytest.raises(AttributeError, match="no array 'ring_q'"):
        _ = before.ring_q


def test_unused_slots_do_not_leak(engine: o1core.O1Batch) -> None:
    """A half-full ring whose empty slots hold NaN, as a foreign engine may leave them."""
    config = o1core.Config(8, 32, 2, windows=(32, 200))
    layer, rows = small_layer(engine, config)
    state = layer.state()
    assert tuple(state.meta[1]) == (78, 0, 0)
    ring_k, ring_v = state.ring_k.copy(), state.ring_v.copy()
    for ring in (ring_k, ring_v):
        ring[0, 32:] = np.nan
        ring[1, 78:] = np.nan
    dirty = state.replace(ring_k=ring_k, ring_v=ring_v)
    assert same_state(dirty, state)
    assert engine.load(dirty).extend(*rows).tobytes() == layer.extend(*rows).tobytes()


def edit(name: str, index: Any, value: float) -> Any:
    def change(state: o1core.LayerState) -> dict[str, Any]:
        array = state.arrays[name].copy()
        array[index] = value
        return {name: array}

    return change


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda s: {"ring_k": s.ring_k[:, :-1]}, ValueError, "ring_k must have shape"),
        (lambda s: {"mix": s.mix.astype(np.float64)}, TypeError, "mix must be a float32 numpy"),
        (lambda s: {"meta": s.meta.astype(np.int64)}, TypeError, "meta must be a uint32 numpy"),
        (lambda s: {"far_num": [1.0]}, TypeError, "far_num must be a float32 numpy array, got lis"),
        (lambda s: {"ring_q": s.ring_k}, ValueError, "replace.. knows meta, ring_k.*got ring_q"),
        (edit("meta", (0, 0), 33), ValueError, "meta of group 0 must have length <= window"),
        (edit("meta", (1, 1), 32), ValueError, "meta of group 1 must have .* head < window"),
        (edit("meta", (0, 0), 31), ValueError, "a full ring once keys went far"),
        (edit("meta", (1, 2), 9), ValueError, "meta must have length .* far equal in all groups"),
        (edit("ring_k", (0, 3, 1), np.nan), ValueError, "ring_k must be finite"),
        (edit("ring_v", (0, 3, 1), np.inf), ValueError, "ring_v must be finite"),
        (edit("sink_k", (0, 1, 1), 1e30), ValueError, "sink_k must be at most 2.81e.14"),
        (edit("k_landmarks", (0, 1, 1), np.nan), ValueError, "k_landmarks must be finite"),
        (edit("mix", (0, 0, 1, 1), np.nan), ValueError, "mix must be finite"),
        (edit("mix", (0, 0, 1, 1), 3e38), ValueError, "mixing matrix does not fit float32"),
        (edit("far_max", (0, 0, 1), -np.inf), ValueError, "far_max must be finite in group 0"),
        (edit("far_max", (0, 0, 1), np.nan), ValueError, "far_max must be finite in group 0"),
        (edit("far_mass", (0, 0, 1), -1), ValueError, "far_mass must be >= 0, got -1"),
        (edit("far_num", (0, 0, 1, 2), np.nan), ValueError, "far_num must be finite"),
        (
            edit("far_num", (0, 0, 1, 2), 3e38),
            ValueError,
            "far_num must be what 246 far keys can give, got 3e.38",
        ),
        (
            edit("far_mass", (0, 0, 1), 300),
            ValueError,
            "far_mass must be what 246 far keys can give, got 300",
        ),
        (edit("q_landmarks", (0, 0, 1, 1), 1e30), ValueError, "q_landmarks must be at most 2.81"),
        (edit("k_landmarks", (0, 1, 1), -1e30), ValueError, "k_landmarks must be at most 2.81"),
    ],
)
def test_impossible_states_are_refused(
    state: o1core.LayerState, change: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        state.replace(**change(state))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (o1core.Config(8, 33, 2), r"geometry.windows must be \(33, 33\) as the config says"),
        (o1core.Config(8, 32, 3), "geometry.sinks must be 3 as the config says, got 2"),
        (o1core.Config(4, 32, 2), "geometry.landmarks must be 4 to 4 as the config says, got 8"),
        (o1core.Config(0, 32, 2), "geometry.landmarks must be 0 as the config says, got 8"),
        (o1core.Config(8, 32, 2, "fm"), "geometry.rectifier must be 'fm'"),
        (o1core.Config(8, 32, 2, scale=2.0), "geometry.scale must be 2.0"),
    ],
)
def test_config_and_geometry_must_agree(
    state: o1core.LayerState, config: o1core.Config, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        o1core.LayerState(config, state.geometry, state.arrays)


def test_batch_must_divide_the_groups(state: o1core.LayerState) -> None:
    with pytest.raises(ValueError, match="batch must divide the 2 groups of the geometry, got 3"):
        o1core.LayerState(state.config, state.geometry, state.arrays, batch=3)


def foreign(path: Path, state: o1core.LayerState) -> None:
    save_file({"a": np.zeros(3, np.float32)}, path)


def other_version(path: Path, state: o1core.LayerState) -> None:
    metadata = {"format": "o1core-layer-state", "version": "99", "layer": "{}"}
    save_file(dict(state.arrays), path, metadata)


def frame_of(state: o1core.LayerState) -> dict[str, Any]:
    config, geometry = state.config.to_dict(), state.geometry.to_dict()
    return {"config": config, "geometry": geometry, "batch": None, "exact_only": False}


def written(path: Path, arrays: dict[str, Any], layer: str) -> None:
    """A file with all that a state file has around its contents."""
    metadata = {"format": "o1core-layer-state", "version": "1", "layer": layer}
    save_file(arrays, path, {**metadata, "crc32": _checksum(layer, arrays)})


def wrong_layer(path: Path, state: o1core.LayerState) -> None:
    written(path, dict(state.arrays), '{"config": {"x": 1}}')


def not_json(path: Path, state: o1core.LayerState) -> None:
    written(path, dict(state.arrays), "?")


def nested(path: Path, state: o1core.LayerState) -> None:
    written(path, dict(state.arrays), "[" * 100_000)


def huge_scale(path: Path, state: o1core.LayerState) -> None:
    frame = json.dumps(frame_of(state)).replace('"scale": null', f'"scale": 1{400 * "0"}')
    written(path, dict(state.arrays), frame)


def lacks_an_array(path: Path, state: o1core.LayerState) -> None:
    state.save(path)
    arrays = load_file(path)
    del arrays["mix"]
    written(path, arrays, json.dumps(frame_of(state)))


def truncated(path: Path, state: o1core.LayerState) -> None:
    state.save(path)
    path.write_bytes(path.read_bytes()[:-100])


def cut_in_the_header(path: Path, state: o1core.LayerState) -> None:
    state.save(path)
    path.write_bytes(path.read_bytes()[:40])


def flipped(path: Path, state: o1core.LayerState) -> None:
    """One bit of one number of a ring changed on its way."""
    state.save(path)
    data = bytearray(path.read_bytes())
    data[data.index(state.ring_k[0, 3].tobytes())] ^= 1
    path.write_bytes(data)


def other_settings(path: Path, state: o1core.LayerState) -> None:
    """The description of the layer edited, to one that is possible as well."""
    state.save(path)
    data = path.read_bytes()
    assert data.count(b"1e-06") == 1
    path.write_bytes(data.replace(b"1e-06", b"1e-02"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_settings, "is damaged: its contents do not have its checksum"),
        (foreign, "must be an o1core-layer-state file, got format None"),
        (other_version, "state version must be 1, got '99'"),
        (wrong_layer, "is not a readable state file"),
        (not_json, "is not a readable state file"),
        (lacks_an_array, "arrays must be meta, .*mix.*; got"),
        (truncated, "is not a readable state file"),
        (cut_in_the_header, "is not a readable state file"),
        (flipped, "is damaged: its contents do not have its checksum"),
        (nested, "is not a readable state file"),
        (huge_scale, "scale must be between"),
        (lambda p, s: p.write_bytes(b""), "is not a readable state file"),
        (lambda p, s: p.write_text("hello world, this is text"), "is not a readable state file"),
    ],
)
def test_bad_files_are_refused(
    state: o1core.LayerState, tmp_path: Path, make: Any, message: str
) -> None:
    path = tmp_path / "layer.safetensors"
    make(path, state)
    with pytest.raises(ValueError, match=message) as caught:
        o1core.LayerState.load(path)
    assert str(path) in str(caught.value) or "must be" in str(caught.value)


def test_pickle_and_copy(state: o1core.LayerState) -> None:
    for twin in (pickle.loads(pickle.dumps(state)), copy.copy(state), copy.deepcopy(state)):
        assert same_state(twin, state)
        assert (twin.config, twin.geometry) == (state.config, state.geometry)


def test_arrays_of_the_wrong_kind(state: o1core.LayerState) -> None:
    with pytest.raises(TypeError, match="arrays must be a mapping, got NoneType"):
        o1core.LayerState(state.config, state.geometry, None)  # type: ignore[arg-type]


def test_no_folder(state: o1core.LayerState, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nothing/layer.* cannot be written"):
        state.save(tmp_path / "nothing" / "layer.safetensors")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        o1core.LayerState.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        o1core.LayerState.load(tmp_path)


def test_a_failed_save_leaves_the_old_file(
    state: o1core.LayerState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layer.safetensors"
    state.save(path)
    before = path.read_bytes()

    def fails(tensors: Any, filename: str, metadata: Any) -> None:
        Path(filename).write_bytes(before[:10])
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.numpy.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        state.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["layer.safetensors"]


def test_memory_is_constant_and_counted(engine: o1core.O1Batch) -> None:
    layer, rows = small_layer(engine)
    sealed = layer.nbytes
    g, h, w, s, m, d, dv = 2, 2, 32, 2, 8, 16, 12
    floats = g * (w + s) * (d + dv) + g * m * d + g * h * m * (d + m + 2 + dv)
    assert sealed == 4 * (floats + g * 4)
    for _ in range(3):
        layer.extend(*rows)
    assert layer.nbytes == sealed
    assert layer.state().nbytes == sealed - 4 * g  # the meta of a state has no window column


def test_exact_only_states_are_checked(engine: o1core.O1Batch) -> None:
    layer, _ = small_layer(engine, prompt=20)
    state = layer.state()
    assert state.exact_only
    assert repr(state).startswith("LayerState(2 groups x 2 heads, exact-only, 20 rows seen")
    with pytest.raises(ValueError, match="prompt_q must have one row for each of the 20 rows"):
        state.replace(prompt_q=state.prompt_q[:-1])
    meta = state.meta.copy()
    meta[:, 0] = 43
    with pytest.raises(ValueError, match="an exact-only state must hold fewer than 43 rows"):
        state.replace(meta=meta)
    with pytest.raises(ValueError, match=r"geometry.windows must be"):
        o1core.LayerState(SMALL, state.geometry, state.arrays)


def test_sealing_rows_by_themselves_is_sealing_a_prompt(engine: o1core.O1Batch) -> None:
    """An exact-only layer becomes, bit for bit, the layer of its first 43 rows."""
    rows = small_rows(43)
    whole = engine.seal(*rows, SMALL)
    assert not whole.exact_only
    layer = engine.seal(*(x[:9] for x in rows), SMALL)  # type: ignore[call-arg, arg-type]
    sizes = [layer.nbytes]
    for first, last in ((9, 30), (30, 42), (42, 43)):
        assert layer.exact_only
        layer.extend(*(x[first:last] for x in rows))
        sizes.append(layer.nbytes)
    assert not layer.exact_only
    assert layer.geometry == whole.geometry
    assert same_state(layer.state(), whole.state())
    assert layer.nbytes == whole.nbytes
