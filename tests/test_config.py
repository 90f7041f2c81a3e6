"""Every refusal of a setting names the argument, the rule and the value."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import o1core


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"landmarks": 1}, ValueError, "landmarks must be 0 .* or at least 4, got 1"),
        ({"landmarks": 3}, ValueError, "landmarks must be 0 .* or at least 4, got 3"),
        ({"landmarks": -4}, ValueError, "landmarks must be between 0 and 65536, got -4"),
        ({"landmarks": 8.0}, TypeError, "landmarks must be an integer, got 8.0"),
        ({"landmarks": True}, TypeError, "landmarks must be an integer, got True"),
        ({"landmarks": "8"}, TypeError, "landmarks must be an integer, got '8'"),
        ({"window": 0}, ValueError, "window must be between 1 and .*, got 0"),
        ({"window": None}, TypeError, "window must be an integer, got None"),
        ({"sinks": -1}, ValueError, "sinks must be between 0 and .*, got -1"),
        ({"rectifier": "relu"}, ValueError, "rectifier must be 'aggregate' or 'fm', got 'relu'"),
        ({"rectifier": None}, ValueError, "rectifier must be .*, got None"),
        ({"windows": ()}, ValueError, "windows must name at least one group"),
        ({"windows": 64}, TypeError, "windows must be a sequence of integers.*, got 64"),
        ({"windows": "64"}, TypeError, "windows must be a sequence of integers.*, got '64'"),
        ({"windows": (64, 0)}, ValueError, r"windows\[1\] must be between 1 and .*, got 0"),
        ({"scale": 0.0}, ValueError, "scale must be between 1e-30 and 16384, got 0.0"),
        ({"scale": float("nan")}, ValueError, "scale must be between .*, got nan"),
        ({"scale": float("inf")}, ValueError, "scale must be between .*, got inf"),
        ({"scale": "1"}, TypeError, "scale must be a real number, got '1'"),
        ({"windows": {300, 8}}, TypeError, "windows must be a sequence of integers.*, got "),
        ({"windows": iter((3,))}, TypeError, "windows must be a sequence of integers"),
        ({"window": 2**31}, ValueError, "window must be between 1 and .*, got 2147483648"),
        ({"sinks": 2**31}, ValueError, "sinks must be between 0 and .*, got 2147483648"),
        ({"scale": 10**400}, ValueError, "scale must be between .*, got inf"),
        ({"ridge": 0}, ValueError, "ridge must be between .*, got 0.0"),
        ({"ridge": -1e-6}, ValueError, "ridge must be between .*, got -1e-06"),
    ],
)
def test_config_refuses(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        o1core.Config(**settings)


def test_config_is_frozen_and_normalised() -> None:
    config = o1core.Config(landmarks=np.int64(8), windows=[3, np.int32(4)], scale=np.float32(0.5))  # type: ignore[arg-type]
    assert config == o1core.Config(landmarks=8, windows=(3, 4), scale=0.5)
    assert {type(config.landmarks), type(config.scale)} == {int, float}
    assert hash(config) == hash(o1core.Config(**config.to_dict()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sizes", "kind", "message"),
    [
        ({"groups": 0}, ValueError, "groups must be between 1 and 65536, got 0"),
        ({"heads_per_group": 0}, ValueError, "heads_per_group must be between"),
        ({"head_dim": 0}, ValueError, "head_dim must be between"),
        ({"value_dim": -1}, ValueError, "value_dim must be between"),
        ({"head_dim": 2.5}, TypeError, "head_dim must be an integer, got 2.5"),
        ({"window": (64,)}, ValueError, "windows must name one window for each of the 2 groups"),
        ({"window": 0}, ValueError, "window must be between 1 and .*, got 0"),
        ({"landmarks": 2}, ValueError, "landmarks must be 0 .* or at least 4, got 2"),
    ],
)
def test_geometry_refuses(sizes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        o1core.Geometry.of(**{"groups": 2, "heads_per_group": 3, "head_dim": 16, **sizes})


def test_geometry_counts() -> None:
    g = o1core.Geometry.of(2, 3, 16, window=(5, 9), value_dim=7)
    assert (g.heads, g.ring, g.value_dim, g.windows) == (6, 9, 7, (5, 9))
    assert g.scale == 0.25
    assert o1core.Geometry.of(1, 1, 3).scale == float(np.float32(1 / np.sqrt(3)))
    assert o1core.Geometry(**g.to_dict()) == g
    assert g.far.name == "nystrom"
    assert o1core.Geometry.of(1, 1, 3, landmarks=0).far.name == "none"


@pytest.mark.parametrize(
    ("rows", "landmarks"), [(141, 17), (160, 20), (255, 31), (256, 32), (9999, 32)]
)
def test_landmarks_in_use(rows: int, landmarks: int) -> None:
    g = o1core.Config().geometry(groups=1, heads_per_group=1, head_dim=8, value_dim=8, rows=rows)
    assert g.landmarks == landmarks


def test_a_small_window_still_has_four_landmarks() -> None:
    config = o1core.Config(landmarks=8, window=1, sinks=0)
    g = config.geometry(groups=1, heads_per_group=1, head_dim=8, value_dim=8, rows=10)
    assert g.landmarks == 4
