"""The plan: sub-chunks, table, dispatches, prediction, JSON, text."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from support import small_layer

import o1core
from o1core import Geometry, GroupMeta, Plan, SubChunk
from o1core.layout import Strategy
from o1core.plan import MAX_SLAB, STRATEGIES

DATA = Path(__file__).parent / "data"
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("rows", [0, 3, 70, 200])
@pytest.mark.parametrize("landmarks", [0, 32])
def test_json_round_trip(rows: int, landmarks: int, strategy: Strategy) -> None:
    geometry = dataclasses.replace(PRODUCTION, landmarks=landmarks)
    plan = Plan.build(geometry, rows, strategy=strategy, scratch=2**22)
    assert Plan.from_json(plan.to_json()) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert json.loads(plan.to_json())["version"] == 2


# The whole call ---------------------------------------------------------------------------------


def bytes_of_scratch(plan: Plan) -> int:
    (nbytes,) = (b.nbytes for b in plan.buffers if b.name == "scratch")
    assert nbytes == 4 * sum(math.prod(shape) for shape in plan.scratch_parts.values())
    return nbytes


def test_a_whole_call_is_a_handful_of_dispatches() -> None:
    """However many rows; windows do not bound its sub-chunks."""
    for geometry in (PRODUCTION, Geometry.of(2, 6, 256, window=(128, 7))):
        plan = Plan.build(geometry, 4000, strategy="whole-call")
        assert [c.rows for c in plan.sub_chunks] == [64] * 62 + [32]
        assert plan.slabs == ((0, 4000),)
        kernels = ["far_e", "far_sums", "far_commit", "attend", "ring_commit", "meta"]
        assert [d.kernel for d in plan.dispatches] == kernels
        assert {(d.first_row, d.rows) for d in plan.dispatches} == {(0, 4000)}
        assert dict(plan.dispatches[1].grid) == {"heads": 12, "landmarks": 32, "sub_chunks": 63}
        # Each kernel reads what those before it left in scratch.
        assert all("scratch" in d.writes for d in plan.dispatches[:4])
        assert all("scratch" in d.reads for d in plan.dispatches[1:4])
    bare = Plan.build(Geometry.of(2, 6, 256, landmarks=0), 4000, strategy="whole-call")
    assert [d.kernel for d in bare.dispatches] == ["attend", "ring_commit", "meta"]


@pytest.mark.parametrize("rows", [64, 4096, 10**5, 10**6])
@pytest.mark.parametrize("scratch", [2**24, 2**26, 2**28])
def test_scratch_of_a_whole_call_is_bounded(rows: int, scratch: int) -> None:
    plan = Plan.build(PRODUCTION, rows, strategy="whole-call", scratch=scratch)
    assert bytes_of_scratch(plan) <= scratch
    assert all(slab.rows % 64 == 0 for slab in plan.slabs[:-1])
    assert sum(slab.rows for slab in plan.slabs) == rows
    if len(plan.slabs) > 1:
        # One sub-chunk more would not fit, or be more than a slab is given.
        more = Plan.build(PRODUCTION, plan.slabs[0].rows + 64, strategy="whole-call", scratch=2**40)
        assert bytes_of_scratch(more) > scratch or plan.slabs[0].rows == MAX_SLAB


def test_scratch_too_small_for_a_sub_chunk() -> None:
    large = Geometry.of(64, 8, 16, window=4096)
    plan = Plan.build(large, 20, strategy="whole-call", scratch=2**27)
    assert plan.slabs == ((0, 8), (8, 8), (16, 4))
    assert plan.sub_chunks == tuple(map(SubChunk._make, plan.slabs))
    assert bytes_of_scratch(plan) <= 2**27
    assert {s.rows for s in Plan.build(large, 3, strategy="whole-call", scratch=1).slabs} == {1}


def test_slabs_of_less_rows() -> None:
    plan = Plan.build(PRODUCTION, 500, strategy="whole-call", slab=200)
    assert [slab.rows for slab in plan.slabs] == [192, 192, 116]
    assert [s.first_row for s in plan.sub_chunks] == list(range(0, 500, 64))


def test_slabs_of_sub_chunks() -> None:
    plan = Plan.build(PRODUCTION, 150)
    assert plan.sub_chunks == tuple(map(SubChunk._make, plan.slabs))
    assert plan.scratch_parts == {}


def broken(change: dict[str, Any], **options: Any) -> str:
    data = json.loads(Plan.build(PRODUCTION, 70, **options).to_json())
    return json.dumps({**data, **change})


def broken_whole(change: dict[str, Any]) -> str:
    return broken(change, strategy="whole-call")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "text must be JSON"),
        ("[]", "text must be an o1core-plan document"),
        (broken({"format": "other"}), "text must be an o1core-plan document"),
        (broken({"version": 1}), "plan version must be 2, got 1"),
        (broken({"strategy": "none"}), "plan strategy must be one of .*, got 'none'"),
        (broken({"strategy": "whole-call"}), "plan buffers must be the table"),
        (broken({"slabs": [[0, 70]]}), "plan slabs must be its sub-chunks with strategy"),
        (broken_whole({"slabs": [[0, 69]]}), "plan slabs must cover 70 rows, got 69"),
        (broken_whole({"slabs": [[0, 60], [60, 10]]}), "plan slabs must begin where sub-chunks do"),
        (broken_whole({"sub_chunks": [[0, 65], [65, 5]]}), "1 to 64 at a time"),
        (broken_whole({"strategy": "sub-chunk"}), "plan slabs must be its sub-chunks"),
        (broken({"geometry": {}}), "plan document is malformed"),
        (broken({"rows": -1}), "rows must be between 0 and"),
        (broken({"rows": 71}), "plan sub-chunks must cover 71 rows, got 70"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "slabs"}, "strategy must be 'sub-chunk' or 'whole-call', got 'slabs'"),
        (
            {"strategy": "whole-call", "sub_chunk": 32},
            "sub_chunk must be 64 with strategy 'whole-call', got 32",
        ),
        ({"scratch": 0}, "scratch must be >= 1, got 0"),
        ({"slab": 0}, "slab must be >= 1, got 0"),
    ],
)
def test_build_refuses_options(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.build(PRODUCTION, 1, **options)


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


@pytest.mark.parametrize(
    ("strategy", "rows", "golden"),
    [("sub-chunk", 200, "plan"), ("whole-call", 20000, "plan_whole")],
)
def test_text(strategy: Strategy, rows: int, golden: str) -> None:
    """The printed plan, character for character: a change of the sequence shows here first."""
    text = str(Plan.build(PRODUCTION, rows, strategy=strategy)) + "\n"
    assert text == (DATA / f"{golden}.txt").read_text()
