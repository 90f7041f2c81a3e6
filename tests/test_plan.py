"""The plan: sub-chunks, table, dispatches, prediction, JSON, text."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from support import small_layer

import o1core
from o1core import Geometry, GroupMeta, Plan

GOLDEN_TEXT = Path(__file__).parent / "data" / "plan.txt"
PRODUCTION = Geometry.of(2, 6, 256, window=(128, 512))


@pytest.mark.parametrize(
    ("window", "rows", "sizes"),
    [
        (128, 0, []),
        (128, 1, [1]),
        (128, 64, [64]),
        (128, 65, [64, 1]),
        (128, 130, [64, 64, 2]),
        (63, 64, [63, 1]),
        ((100, 16), 40, [16, 16, 8]),
        (1, 3, [1, 1, 1]),
    ],
)
def test_sub_chunks(window: Any, rows: int, sizes: list[int]) -> None:
    groups = len(window) if isinstance(window, tuple) else 2
    plan = Plan.build(Geometry.of(groups, 2, 8, window=window), rows)
    assert [c.rows for c in plan.sub_chunks] == sizes
    assert [c.first_row for c in plan.sub_chunks] == [sum(sizes[:i]) for i in range(len(sizes))]


def test_sub_chunks_can_be_shorter() -> None:
    plan = Plan.build(PRODUCTION, 100, sub_chunk=32)
    assert [c.rows for c in plan.sub_chunks] == [32, 32, 32, 4]


@pytest.mark.parametrize("sub_chunk", [0, 65])
def test_sub_chunk_limits(sub_chunk: int) -> None:
    with pytest.raises(ValueError, match=f"sub_chunk must be between 1 and 64, got {sub_chunk}"):
        Plan.build(PRODUCTION, 1, sub_chunk=sub_chunk)


def test_dispatches_are_the_kernels_in_order() -> None:
    plan = Plan.build(PRODUCTION, 70)
    kernels = ["far_e", "attend", "far_commit", "ring_commit", "meta"]
    assert [d.kernel for d in plan.dispatches] == 2 * kernels
    grids = {d.kernel: dict(d.grid) for d in plan.dispatches[5:]}
    assert grids == {
        "far_e": {"heads": 12, "landmarks": 32},
        "attend": {"heads": 12, "rows": 6},
        "far_commit": {"heads": 12, "landmarks": 32},
        "ring_commit": {"groups": 2, "rows": 6},
        "meta": {"groups": 2},
    }
    assert {(d.first_row, d.rows) for d in plan.dispatches[5:]} == {(64, 6)}


def test_without_landmarks_there_are_no_far_kernels_or_buffers() -> None:
    plan = Plan.build(Geometry.of(2, 6, 256, landmarks=0), 3)
    assert [d.kernel for d in plan.dispatches] == ["attend", "ring_commit", "meta"]
    assert [b.binding for b in plan.buffers] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]


def test_the_table_is_the_interface_of_the_kernels() -> None:
    """Bindings, and which kernel touches which, as operator.md section 6 and upstream have them."""
    plan = Plan.build(PRODUCTION, 3)
    binding = {b.name: b.binding for b in plan.buffers}
    assert sorted(binding.values()) == list(range(15))
    used = {d.kernel: sorted({binding[n] for n in (*d.reads, *d.writes)}) for d in plan.dispatches}
    assert used == {
        "far_e": [0, 1, 6, 8, 13],
        "attend": [0, 1, 2, 3, 4, 5, 7, 9, 10, 11, 12, 13, 14],
        "far_commit": [0, 2, 8, 9, 13],
        "ring_commit": [0, 1, 2, 11, 12],
        "meta": [0],
    }
    shape = {b.name: b.shape for b in plan.buffers}
    assert shape["ring_k"] == (2, 512, 256)
    assert shape["far_max_mass"] == (2, 6, 2, 32)
    assert shape["q"] == (3, 12, 256)
    assert shape["scratch"] is None
    written = {n for d in plan.dispatches for n in d.writes}
    assert {b.name for b in plan.buffers if b.role == "sealed"} == {
        "sink_k",
        "sink_v",
        "k_landmarks",
        "q_landmarks",
        "mix",
    }
    assert not written & {b.name for b in plan.buffers if b.role in ("sealed", "input")}


@pytest.mark.parametrize("rows", [0, 3, 70, 200])
@pytest.mark.parametrize("landmarks", [0, 32])
def test_json_round_trip(rows: int, landmarks: int) -> None:
    plan = Plan.build(dataclasses.replace(PRODUCTION, landmarks=landmarks), rows)
    assert Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert json.loads(plan.to_json())["version"] == 1


def broken(change: dict[str, Any]) -> str:
    data = json.loads(Plan.build(PRODUCTION, 70).to_json())
    return json.dumps({**data, **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "text must be JSON"),
        ("[]", "text must be an o1core-plan document"),
        (broken({"format": "other"}), "text must be an o1core-plan document"),
        (broken({"version": 2}), "plan version must be 1, got 2"),
        (broken({"geometry": {}}), "plan document is malformed"),
        (broken({"rows": -1}), "rows must be between 0 and"),
        (broken({"rows": 71}), "plan buffers must be the table of its geometry and rows"),
        (broken({"sub_chunks": [[0, 64]]}), "plan sub-chunks must cover 70 rows, got 64"),
        (broken({"sub_chunks": [[0, 6], [7, 63]]}), "plan sub-chunks must cover the rows in order"),
        (broken({"sub_chunks": [[0, 70]]}), "1 to 64 at a time"),
        (broken({"buffers": []}), "plan buffers must be the table"),
        (broken({"dispatches": []}), "plan dispatches must be the kernels"),
        (broken({"dispatches": 3}), "plan document is malformed"),
    ],
)
def test_json_is_checked(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((PRODUCTION, -1), ValueError, "rows must be between 0 and .*, got -1"),
        ((PRODUCTION, 1.5), TypeError, "rows must be an integer, got 1.5"),
        (("geometry", 1), TypeError, "geometry must be a Geometry, got str"),
    ],
)
def test_build_refuses(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Plan.build(*arguments)


def test_prediction() -> None:
    plan = Plan.build(PRODUCTION, 200)
    meta = (GroupMeta(128, 40, 40), GroupMeta(400, 0, 0))
    assert plan.meta_after(meta) == (GroupMeta(128, 112, 240), GroupMeta(512, 88, 88))
    with pytest.raises(ValueError, match="meta must have one entry for each of 2 groups, got 1"):
        plan.meta_after(meta[:1])
    with pytest.raises(ValueError, match=r"rows must leave the far count below 2\^32, got 200"):
        plan.meta_after((GroupMeta(128, 0, 2**32 - 100), GroupMeta(512, 0, 2**32 - 484)))


@pytest.mark.parametrize("rows", [1, 5, 64, 100, 300])
def test_executors_do_as_predicted(engine: o1core.O1Batch, rows: int) -> None:
    config = o1core.Config(8, 16, 2, windows=(16, 150))
    layer, (q, k, v) = small_layer(engine, config, rows=300)
    before = layer.state().groups_meta
    want = Plan.build(layer.geometry, rows).meta_after(before)
    layer.extend(q[:rows], k[:rows], v[:rows])
    assert layer.state().groups_meta == want


def test_text() -> None:
    """The printed plan, character for character: a change of the sequence shows here first."""
    assert str(Plan.build(PRODUCTION, 200)) + "\n" == GOLDEN_TEXT.read_text()
