"""o1core's own WGSL: at the edges of its tiles, cut into slabs, and wrong in one place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import pytest
from conftest import poison_gpu
from support import GEOMETRIES, ROW_COUNTS, SUBSET

pytest.importorskip("wgpu")

from o1core import Config, O1Batch, Plan
from o1core.plan import Slab
from o1core.testing import Case, cases, check_backend, random_rows, run_case
from o1core_wgpu import WgpuExecutor, executor
from o1core_wgpu.device import Gpu
from o1core_wgpu.interface import parse
from o1core_wgpu.kernel_set import GivenKernels, Launch, OwnKernels, own_kernels
from o1core_wgpu.source import load

ORDER = ("o1b_gather", "o1b_logits", "o1b_far_sums", "o1b_commit", "o1b_weights", "o1b_attend")


def named(*names: str) -> list[Case]:
    found = [c for c in cases() if c.name in names]
    assert len(found) == len(names)
    return found


# Sizes that the matrix does not have --------------------------------------------------------------


def sized(name: str, config: Config, prompt: int, chunks: tuple[int, ...], **shape: int) -> Case:
    return Case(
        name, config, lambda: random_rows(11, prompt + sum(chunks), **shape), prompt, chunks
    )


MOST = OwnKernels.MAX_LANDMARKS
# One more than a tile's rows, columns and staged terms; one less; sinks that take more than 8 bits.
MORE = {"heads_per_group": 5, "head_dim": 33, "value_dim": 65}
LESS = {"groups": 2, "heads_per_group": 3, "head_dim": 31, "value_dim": 63}
SIZES = [
    sized("one-more", Config(33, 65, 5), 300, (33, 1, 65, 31), **MORE),
    sized("one-less", Config(31, 63, 3), 270, (63, 31, 7), **LESS),
    sized("wide-values", Config(7, 40, 1), 90, (97,), head_dim=3, value_dim=130),
    sized("one-wide", Config(4, 8, 1), 40, (40, 3), heads_per_group=33, head_dim=1, value_dim=1),
    sized("many-sinks", Config(8, 20, 300), 400, (50, 2)),
    sized("most-landmarks", Config(MOST, 16, 2), 8 * MOST, (70,)),
    sized("one-landmark-less", Config(MOST - 1, 16, 2), 8 * MOST - 1, (70,)),
]


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_size(gpu: Gpu, case: Case) -> None:
    with O1Batch(WgpuExecutor(gpu, own_kernels()), fallback=None) as engine:
        run_case(engine, case)
        run_case(engine, case, chunks=(1, 2, sum(case.chunks) - 3))


# Slabs --------------------------------------------------------------------------------------------


class Watched(OwnKernels):
    """Knows how many rows it launched at once, at most."""

    most = 0

    def launches(self, plan: Plan, slabs: Sequence[Slab]) -> list[Launch]:
        launches = super().launches(plan, slabs)
        self.most = max(self.most, *(struct.unpack("<12I", x.uniform[:48])[7] for x in launches))
        return launches


def test_scratch_is_no_more_than_the_plan_says() -> None:
    for geometry in GEOMETRIES:
        for rows in ROW_COUNTS:
            plan = Plan.build(geometry, rows, strategy="whole-call", scratch=2**40)
            (told,) = (b.nbytes for b in plan.buffers if b.name == "scratch")
            assert own_kernels().scratch_bytes(plan) <= told, (geometry, rows)


@pytest.mark.parametrize(("budget", "rows"), [(1, 1), (140_000, 32), (400_000, 64), (500_000, 100)])
def test_slabs(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, budget: int, rows: int) -> None:
    """Scratch too small for a call, and calls of several submissions."""
    monkeypatch.setattr(executor, "SUBMITTED_ROWS", 3 * rows)
    kernels = Watched()
    slabs = WgpuExecutor(gpu, kernels)
    slabs.largest_scratch = budget
    check_backend(slabs, named("plain"))
    assert kernels.most == rows
    names = ("no-landmarks", "half-full", "mixed-windows", "massive-100-at-40")
    check_backend(slabs, named(*names))


def test_submissions_of_the_original(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, original_wgsl: str
) -> None:
    monkeypatch.setattr(executor, "SUBMITTED_ROWS", 128)
    given = GivenKernels(load(original_wgsl))
    check_backend(WgpuExecutor(gpu, given), named("plain", "mixed-windows"))


# Sabotage -----------------------------------------------------------------------------------------
#
# All faults are in one text, where a word of the uniform that the kernels do not use switches one
# of them on: compiling the kernels for each would take minutes on a CPU.

Edit = tuple[str, str]
"""What is replaced in the kernels, and with what: there, $ON is whether the fault is on."""


def instead(old: str, wrong: str) -> Edit:
    """Another statement; for one with a value, another value."""
    if old.startswith("let "):
        name, value = old.removesuffix(";").split(" = ", 1)
        return old, f"{name} = select({value}, {wrong}, $ON);"
    if old.startswith("return "):
        return old, f"if ($ON) {{ return {wrong}; }} {old}"
    return old, f"if ($ON) {{ {wrong} }} else {{ {old} }}"


def edited(old: str, part: str, wrong: str) -> Edit:
    """Its own value with a part replaced."""
    value = old.removeprefix("return ").rpartition(" = ")[2].removesuffix(";")
    assert value.count(part) == 1
    return instead(old, value.replace(part, wrong))


def edited_statement(old: str, *parts: str) -> Edit:
    """Itself with parts replaced, each by the one that follows it."""
    wrong = old
    for part, other in zip(parts[::2], parts[1::2], strict=True):
        assert wrong.count(part) == 1
        wrong = wrong.replace(part, other)
    return instead(old, wrong)


def after(old: str, more: str) -> Edit:
    return old, f"{old} if ($ON) {{ {more} }}"


RESULT = "result[at + c] = tile_b[i * 16u + thread % 64u / 4u][thread % 4u];"
GONE = "return select(0u, held - ring.window, held > ring.window);"
SLOT = "let to = group * call.ring + (ring.head + ring.length + row) % ring.window;"
HEAD = "let head = group * call.heads_per_group + number / each;"
ROW = "return (call.first_row + row) * call.groups + group;"
KEY = "quad = row_key(row * d + 4u * i, d - 4u * i);"
LOGITS = "scratch[to.at + column * to.pitch + quad] = logits * call.scale;"
SINKS = "return (call.sinks_rectifier & 255u) | ((call.sinks_rectifier >> 9u) << 8u);"
SAFE = "let safe = (sizes > vec4<f32>(LEAST_SIZE)) & (sizes > vec4<f32>(entry * LEAST_SIZE));"
ODD_TERM = "sums = add_term(sums, (i + 1u) * STRIDE_A + y, (i + 1u) * STRIDE_B + x);"
FIRST = "call.first_row +"
FAULTS: dict[str, list[Edit]] = {
    "zeros": [instead(RESULT, "result[at + c] = 0.0;")],
    "minus-999": [instead(RESULT, "result[at + c] = -999.0;")],
    "nan": [instead(RESULT, "result[at + c] = bitcast<f32>(call.rows | 0x7fc00000u);")],
    "ring-slot-off-by-one": [edited(SLOT, "+ row)", "+ row + 1u)")],
    "evicts-one-too-many": [edited(GONE, "ring.window,", "ring.window + 1u,")],
    "evicts-one-too-few": [edited(GONE, "ring.window,", "ring.window - 1u,")],
    "stale-far-max": [instead("far_max_mass[most_at] = sums.most;", "")],
    "stale-far-mass": [instead("far_max_mass[most_at + call.landmarks] = sums.mass;", "")],
    "stale-far-num": [instead("far_num[state + j] = sums.numerator[j];", "")],
    "far-sums-not-rescaled": [instead("let carry = decay(before.most - most);", "1.0")],
    "wrong-head-order": [
        edited(HEAD, "number / each", "call.heads_per_group - 1u - number / each")
    ],
    "wrong-group-order": [instead(ROW, "(call.first_row + row + 1u) * call.groups - 1u - group")],
    "wrong-scale": [edited_statement(LOGITS, "call.scale", "call.scale * 1.001")],
    "low-precision": [
        edited_statement(KEY, "row_key(row", "quantizeToF16(row_key(row", ");", "));")
    ],
    "ignores-rectifier": [instead("return (call.sinks_rectifier & 256u) != 0u;", "false")],
    "maximum-after-the-block": [instead("running = max(running, logit);", "running = peak;")],
    "forgets-the-sinks": [instead(SINKS, "0u")],
    "keeps-a-negative-far-field": [
        instead("let kept = mass > vec4<f32>();", "mass != vec4<f32>()")
    ],
    "says-a-wrong-meta": [after("group_meta[at + 2u] += evicted;", "group_meta[at + 2u] += 1u;")],
    "half-of-the-terms": [instead(ODD_TERM, "")],
    "one-column-less": [
        edited("let end = span.end - call.landmarks;", "call.landmarks", "call.landmarks - 1u")
    ],
}
# For these the subset has no case.
FOR_LARGE_LOGITS: dict[str, list[Edit]] = {
    "shift-by-landmarks-of-no-weight": [
        instead("top = select(top, max(top, scale), u != vec4<f32>());", "top = max(top, most);")
    ],
    "weights-beside-the-largest-logit": [instead(SAFE, "vec4<bool>(true)")],
    "products-across-a-leap": [
        instead("let near_leap = all(leap <= vec4<f32>(MOST_LEAP));", "true")
    ],
}
QUERY = "let row = call.first_row + min(number % each + QUAD, vec4<u32>(call.rows - 1u));"
PLACE = "let at = ((call.first_row + row) * call.heads + head) * call.value_dim;"
FOR_SLABS: dict[str, list[Edit]] = {
    "no-first-row-in-q": [edited(QUERY, FIRST, "")],
    "no-first-row-in-k-and-v": [edited(ROW, FIRST, "")],
    "no-first-row-in-out": [edited(PLACE, FIRST, "")],
}
FOR_DIRTY_MEMORY: dict[str, list[Edit]] = {
    "blocks-without-evictions": [("return before;", "if (!$ON) { return before; }")],
}
ALL_FAULTS = {**FAULTS, **FOR_LARGE_LOGITS, **FOR_SLABS, **FOR_DIRTY_MEMORY}


@cache
def faulty_text() -> str:
    text = OwnKernels().text
    for number, edits in enumerate(ALL_FAULTS.values(), 1):
        for old, new in edits:
            assert text.count(old) == 1, f"the kernels have changed: {old}"
            text = text.replace(old, new.replace("$ON", f"(call.unused == {number}u)"))
    return text


class Faulty(OwnKernels):
    """The kernels with one fault, or none."""

    label = "faulty WGSL"

    def __init__(self, fault: str | None = None) -> None:
        super().__init__()
        self.number = 0 if fault is None else [*ALL_FAULTS].index(fault) + 1
        self.text = faulty_text()
        self.interface = parse(self.text)

    def launches(self, plan: Plan, slabs: Sequence[Slab]) -> list[Launch]:
        word = struct.pack("<I", self.number)
        return [
            x._replace(uniform=x.uniform[:44] + word + x.uniform[48:])
            for x in super().launches(plan, slabs)
        ]


class Ordered(OwnKernels):
    """The kernels with other launches than a slab should have."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        self.order = order

    def launches(self, plan: Plan, slabs: Sequence[Slab]) -> list[Launch]:
        ordered: list[Launch] = []
        slab: dict[str, Launch] = {}
        for launch in super().launches(plan, slabs):
            slab[launch.entry_point] = launch
            if launch.entry_point == ORDER[-1]:
                ordered += [slab[name] for name in self.order if name in slab]
                slab = {}
        return ordered


def is_caught(gpu: Gpu, kernels: OwnKernels, only: Sequence[Case]) -> None:
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        check_backend(WgpuExecutor(gpu, kernels), only)
    print(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(gpu: Gpu, fault: str) -> None:
    is_caught(gpu, Faulty(fault), SUBSET)


@pytest.mark.parametrize("fault", FOR_LARGE_LOGITS)
def test_a_fault_for_large_logits_is_caught(gpu: Gpu, fault: str) -> None:
    is_caught(gpu, Faulty(fault), named("opposed-100", "massive-100-at-40"))


@pytest.mark.parametrize("fault", FOR_SLABS)
def test_a_fault_in_slabs_is_caught(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Rows begin at another one than the first only where scratch is too small for all."""
    monkeypatch.setattr(WgpuExecutor, "max_slab", 64)
    is_caught(gpu, Faulty(fault), named("plain"))
    check_backend(WgpuExecutor(gpu, Faulty()), named("plain"))


@pytest.mark.parametrize("fault", FOR_DIRTY_MEMORY)
def test_a_fault_with_dirty_memory_is_caught(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Of the check in the matrix that memory is written before it is read."""
    poison_gpu(monkeypatch)
    is_caught(gpu, Faulty(fault), named("half-full"))
    check_backend(WgpuExecutor(gpu, Faulty()), named("half-full"))


def test_without_a_fault_it_passes(gpu: Gpu) -> None:
    check_backend(
        WgpuExecutor(gpu, Faulty()), [*SUBSET, *named("opposed-100", "massive-100-at-40")]
    )


@pytest.mark.parametrize("name", ORDER)
def test_a_missing_launch_is_caught(gpu: Gpu, name: str) -> None:
    is_caught(gpu, Ordered(*(x for x in ORDER if x != name)), SUBSET)


@pytest.mark.parametrize("at", range(len(ORDER) - 1))
def test_a_wrong_order_is_caught(gpu: Gpu, at: int) -> None:
    pair = ORDER[at : at + 2]
    wrong = Ordered(*ORDER[:at], *pair[::-1], *ORDER[at + 2 :])
    is_caught(gpu, wrong, SUBSET)


def test_the_right_order_passes(gpu: Gpu) -> None:
    check_backend(WgpuExecutor(gpu, Ordered(*ORDER)), SUBSET)
