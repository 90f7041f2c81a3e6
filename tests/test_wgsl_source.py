"""WGSL from elsewhere: where it is found, what is read from it, and what is refused."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

pytest.importorskip("wgpu")

from o1core import Geometry
from o1core.layout import buffers, kernels
from o1core_wgpu import interface, source
from o1core_wgpu.interface import Binding, EntryPoint, Limits, check, limits, parse
from o1core_wgpu.source import load

G = Geometry.of(1, 1, 8)
NUMBERS = {b.name: b.binding for b in buffers(G, 1)}
KERNELS = {k.name: k for k in kernels(G, "sub-chunk")}
WRITTEN = {name for k in KERNELS.values() for name in k.writes}
USES = {
    "o1b_far_e": (0, 1, 6, 8, 13, 15),
    "o1b_attend": (0, 1, 2, 3, 4, 5, 7, 9, 10, 11, 12, 13, 14, 15),
    "o1b_far_commit": (0, 2, 8, 9, 13, 15),
    "o1b_ring_commit": (0, 1, 2, 11, 12, 15),
    "o1b_meta": (0, 15),
}
"""What the entry points of the original use (docs/operator.md section 6 has the numbers' names)."""


def kernels_text() -> str:
    """Kernels that compute nothing, with the interface and names of the original."""
    lines = ["struct Sizes { words: array<vec4<u32>, 3> }", "const OB_K = 48u;"]
    for name, number in NUMBERS.items():
        access = "read_write" if name in WRITTEN else "read"
        item = "u32" if name == "meta" else "f32"
        lines.append(
            f"@group(0) @binding({number}) var<storage, {access}> b_{name}: array<{item}>;"
        )
    lines.append("@group(0) @binding(15) var<uniform> sizes: Sizes;")
    for name, floats in {"qs": 128, "scr": 1000, "f": 24, "u": 16, "g": 20}.items():
        lines.append(f"var<workgroup> oba_{name}: array<f32, {floats}>;")
    for kernel in KERNELS.values():
        used = dict.fromkeys((*kernel.reads, *kernel.writes))
        body = " ".join(f"_ = b_{name}[0];" for name in used)
        lines.append(f"@compute @workgroup_size(32)\nfn o1b_{kernel.name}() {{")
        lines.append(f"    _ = sizes.words[0]; {body}\n}}")
    return "\n".join(lines) + "\n"


TEXT = kernels_text()


def changed(old: str, new: str, text: str = TEXT) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def rust(text: str, hashes: str = "#") -> str:
    return f'//! It\'s the "kernels".\npub const KERNELS: &str = r{hashes}"\n{text}"{hashes};\n'


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def entry(text: str) -> EntryPoint:
    """The only entry point of a text."""
    (only,) = parse(text).entry_points.values()
    return only


def uses(body: str, more: str = "", parameters: str = "") -> tuple[int, ...]:
    """What an entry point with this body uses of three buffers: a 0, b 1, c 2."""
    declared = "".join(
        f"@group(0) @binding({i}) var<storage, read_write> {name}: array<f32>;\n"
        for i, name in enumerate("abc")
    )
    text = f"{declared}{more}\n@compute @workgroup_size(1) fn main({parameters}) {{ {body} }}"
    return entry(text).bindings


def binding(declaration: str) -> Binding:
    """The only binding of a text with this declaration."""
    (only,) = parse(f"{declaration}\n@compute @workgroup_size(1) fn main() {{}}").bindings.values()
    return only


def test_needs_no_device() -> None:
    """The modules can be read, and a text checked, where wgpu cannot be imported."""
    for module in (interface, source):
        tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
        modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        known = {"o1core", *sys.stdlib_module_names}
        assert {m.split(".")[0] for m in modules - {"o1core_wgpu.interface"}} <= known


# The original and our own -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def original(shared: Path) -> Path:
    """The Rust source with the original kernels."""
    return next((shared / "seed").glob("*.txt"))


def test_original(original: Path) -> None:
    found = load(original)
    assert found.is_original
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    assert found.origin == str(original)
    assert str(found) == "original WGSL, byte for byte (sha256 d1e283f4659d)"
    assert len(found.text) == 12_624
    entry_points = found.interface.entry_points
    assert {name: e.bindings for name, e in entry_points.items()} == USES
    assert {name: e.name for name, e in entry_points.items()} == {n: n for n in USES}
    widths = {"o1b_far_e": 64, "o1b_meta": 64}
    assert {n: e.workgroup_size for n, e in entry_points.items()} == {
        n: (widths.get(n, 256), 1, 1) for n in USES
    }
    assert found.limits == interface.ORIGINAL_LIMITS == Limits(64, 256, 32, 64, 255, 2052)


def test_original_has_the_table_of_the_plan(original: Path) -> None:
    bindings = load(original).interface.bindings
    assert list(bindings) == list(range(16))
    for buffer in buffers(G, 1):
        b = bindings[buffer.binding]
        assert b.access == ("read_write" if buffer.name in WRITTEN else "read"), buffer.name
        assert b.type == ("array<f32>" if buffer.dtype == "float32" else "array<u32>")
    assert bindings[15].access == "uniform"


def test_original_as_wgsl_file(original: Path, tmp_path: Path) -> None:
    text = load(original).text
    path = put(tmp_path / "kernels.wgsl", text)
    assert load(path).is_original
    assert load(str(path)).text == text
    # All that stands between the quotes, the newline after the first one too.
    assert load(put(tmp_path / "quoted.wgsl", f"\n{text}")).is_original


@pytest.mark.parametrize("as_rust", [False, True])
def test_one_byte_less_is_not_the_original(original: Path, tmp_path: Path, as_rust: bool) -> None:
    text = load(original).text.removesuffix("\n")
    path = put(tmp_path / "kernels", rust(text) if as_rust else text)
    found = load(path)
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert not found.is_original
    assert str(found) == f"WGSL of {path}, not the known original (sha256 {digest[:12]})"
    assert found.interface == load(original).interface


def test_original_with_crlf(original: Path, tmp_path: Path) -> None:
    """To Rust the ends of lines in a raw string are LF; a WGSL file has the bytes it has."""
    windows = original.read_text("utf-8").replace("\n", "\r\n")
    assert load(put(tmp_path / "kernels.rs", windows)).is_original
    text = load(original).text.replace("\n", "\r\n")
    found = load(put(tmp_path / "kernels.wgsl", text))
    assert not found.is_original
    assert found.text == text
    assert found.interface == load(original).interface


def test_our_kernels_have_the_interface_too() -> None:
    """The same names and numbers, and each launch binds what its part of the work needs."""
    interface = parse((ROOT / "backends/wgpu/o1core_wgpu/kernels.wgsl").read_text("utf-8"))
    needs = {
        "gather": "meta ring_k ring_v sink_k sink_v k v scratch",
        "logits": "q q_landmarks k_landmarks scratch",
        "far_sums": "scratch",
        "commit": "meta ring_k ring_v far_max_mass far_num k v scratch",
        "weights": "mix scratch",
        "attend": "scratch out",
    }
    entry_points = interface.entry_points
    assert entry_points.keys() == {f"o1b_{name}" for name in needs}
    for name, names in needs.items():
        used = set(entry_points[f"o1b_{name}"].bindings) - {15}
        assert used == {NUMBERS[n] for n in names.split()}, name
    for buffer in buffers(G, 1):
        written = interface.bindings[buffer.binding].access == "read_write"
        assert written == (buffer.name in WRITTEN), buffer.name
    # Of storage buffers WebGPU guarantees 8.
    assert max(len(set(e.bindings) - {15}) for e in entry_points.values()) == 8


def test_our_kernels_are_not_for_load() -> None:
    """They have launches of their own, which the plan of the original's grids does not make."""
    with pytest.raises(ValueError, match="entry point o1b_gather is not a kernel"):
        load(ROOT / "backends/wgpu/o1core_wgpu/kernels.wgsl")


# parse --------------------------------------------------------------------------------------------


def test_interface_of_a_text() -> None:
    interface = parse(TEXT)
    assert {name: e.bindings for name, e in interface.entry_points.items()} == USES
    assert interface.bindings[0] == Binding(0, "b_meta", "read_write", "array<u32>")
    assert interface.bindings[15] == Binding(15, "sizes", "uniform", "Sizes")
    check(interface)


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ("@group(0) @binding(3) var<storage, read> x: array<f32>;", (3, "read", "array<f32>")),
        ("@binding(3)\n@group( 0 )\tvar < storage >x:array<f32>;", (3, "read", "array<f32>")),
        (
            "@group(0u) @binding(0x0Bi,) var<storage,read_write,> x : array< vec4 <f32>, >;",
            (11, "read_write", "array<vec4<f32>>"),
        ),
        (
            "const N = 7; @group(0) @binding(N) var<storage> x: array<f32,9>;",
            (7, "read", "array<f32, 9>"),
        ),
        ("@group(0) @binding(2) var<uniform> x: Sizes;", (2, "uniform", "Sizes")),
        ("@group(0) /* ; */ @binding(2) var<uniform> x // y;\n: S;", (2, "uniform", "S")),
    ],
)
def test_bindings(declaration: str, expected: tuple[int, Any, str]) -> None:
    number, access, kind = expected
    assert binding(declaration) == Binding(number, "x", access, kind)


def test_what_is_no_binding() -> None:
    text = (
        "enable f16; requires some_feature; diagnostic(off, derivative_uniformity);;\n"
        "alias Row = vec4<f32>; struct S { @size(16) a: u32, b: array<Row, 4>, };\n"
        "const_assert 1 < 2; var<private> p: f32 = 1.0; var<workgroup> w: array<f32, 4>;\n"
        "@id(3) override o: bool; const list = array<u32, 2>(1u, 2u);\n"
        "@compute @workgroup_size(1) fn main() {}"
    )
    assert parse(text).bindings == {}


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("64", (64, 1, 1)),
        ("8u, 4i", (8, 4, 1)),
        ("0x10, 2, 3,", (16, 2, 3)),
        ("X, Y, Z", (32, 5, 9)),
    ],
)
def test_workgroup_sizes(size: str, expected: tuple[int, int, int]) -> None:
    constants = "const X: u32 = 32u; @id(1) override Y = 5;"
    # A constant may stand for another one, declared anywhere.
    text = f"{constants} @workgroup_size({size}) @compute fn main() {{}} const Z = W; const W = 9;"
    assert entry(text).workgroup_size == expected


@pytest.mark.parametrize(
    "size",
    [
        "@workgroup_size(N)",
        "@workgroup_size(2.0)",
        "@workgroup_size(0)",
        "@workgroup_size(1, 8 * 8)",
        "@workgroup_size(1, 1, 1, 1)",
        "@workgroup_size(A)",
        "@workgroup_size(O)",
        "@workgroup_size(F)",
        "@workgroup_size()",
        "",
    ],
)
def test_workgroup_size_must_be_a_number(size: str) -> None:
    text = f"const A = B;\nconst B = A;\noverride O: u32;\nconst F = 4.5;\n@compute {size}\n"
    with pytest.raises(ValueError, match="line 6: the workgroup size of main must be"):
        parse(text + "fn main() {}")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", ()),
        ("a[0] = c[1];", (0, 2)),
        ("_ = arrayLength(&b);", (1,)),
        ("if (false) { return; } b[0] += 1.0;", (1,)),
        ("let a = 1.0; _ = a;", ()),
        ("var a: array<f32, 2>; a[0] = 1.0;", ()),
        ("var<function> a = 1.0; a += 1.0;", ()),
        ("const a = 1.0; _ = a;", ()),
        # A local is itself only from its declaration on, and only in its block.
        ("let a = a[0];", (0,)),
        ("_ = a[0]; let a = 1.0;", (0,)),
        ("{ let a = 1.0; } _ = a[0];", (0,)),
        ("if (true) { let a = 1; _ = a; } else { _ = a[0]; }", (0,)),
        ("loop { var a = 1; continuing { a += 1; break if a > 3; } }", ()),
        ("for (var a = 0u; a < 4u; a++) { b[a] = 0.0; }", (1,)),
        ("for (var a = 0u; a < 4u; a++) { { let b = 1; } _ = b[0]; } _ = a[0];", (0, 1)),
        ("for (var a = 0; a < 4; a++) { for (var b = 0; b < a; b++) {} _ = b[a]; }", (1,)),
        ("for (; a[0] < 1.0;) {}", (0,)),
        ("switch 1 { case 1: { let a = 1; } default: { _ = a[0]; } }", (0,)),
        # Members, numbers, attributes and comments that look like names.
        ("let x = vec4<f32>(); _ = x.a + x.b . c;", ()),
        ("_ = 0xau + 0xbu; _ = 1e3 + .5 + 0xcp1;", ()),
        ("@diagnostic(off, a) if (true) {}", ()),
        ("/* a /* b */ c */ // a\n _ = 1;", ()),
    ],
)
def test_uses(body: str, expected: tuple[int, ...]) -> None:
    assert uses(body) == expected


def test_parameters_are_not_bindings() -> None:
    parameters = "@builtin(workgroup_id) a: vec3<u32>, @builtin(local_invocation_index) c: u32,"
    assert uses("_ = a.x + c; b[0] = 1.0;", parameters=parameters) == (1,)


def test_uses_of_called_functions() -> None:
    more = (
        "fn outer(b: u32) -> f32 { return inner(b) + inner(b); }"
        "fn inner(x: u32) -> f32 { return c[x]; }"
        "fn unused() -> f32 { return a[0]; }"
        "@must_use fn pointer(x: ptr<function, array<f32, 4>>) -> @location(0) f32 { return 1; }"
    )
    assert uses("_ = outer(1u);", more) == (2,)
    assert uses("let outer = 1.0; _ = outer;", more) == ()
    assert uses("_ = pointer(&b);", more) == (1,)
    # WGSL forbids recursion; it ends here too.
    assert uses("f();", "fn f() { g(); a[0] = 1.0; } fn g() { f(); b[0] = 1.0; }") == (0, 1)


@pytest.mark.parametrize(
    "comment",
    ["// }", "/* { */", "/* /* } */ { // */", "// /*", "/* // */", "//\r", "// } \u2028", "/**/"],
)
def test_comments_with_brackets(comment: str) -> None:
    declaration = f"@group(0) {comment}\n@binding(0) var<storage> x: array<f32>;"
    text = (
        f"{declaration} @compute {comment}\n@workgroup_size(1) fn f() {{ {comment}\n _ = x[0]; }}"
    )
    assert entry(text).bindings == (0,)


def test_line_comments_end_with_the_line() -> None:
    for end in ("\n", "\r\n", "\r", "\v", "\f", "\x85", "\u2028", "\u2029"):
        assert uses(f"// b {end} _ = c[0]; // b \n") == (2,), repr(end)


MAIN = "@compute @workgroup_size(1) fn main() {}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no entry point, a function with @compute"),
        ("fn main() {}", "there is no entry point"),
        ("// @compute @workgroup_size(1) fn main() {}", "there is no entry point"),
        (
            "\n@group(1) @binding(4) var<storage> x: array<f32>;",
            r"line 2: binding 4 \(x\) must be in group 0, it is in 1",
        ),
        (
            "@group(0) @binding(4) var<storage> x: array<f32>;\n"
            "@group(0) @binding(4) var<storage> y: array<f32>;",
            "line 2: y must have a binding of its own, 4 is x",
        ),
        ("@binding(4) var<storage> x: array<f32>;", "x must have @group and @binding"),
        ("@group(0) var<storage> x: array<f32>;", "x must have @group and @binding"),
        ("@group(0) @binding(N) var<storage> x: array<f32>;", "x must have @group and @binding"),
        ("var<storage> x: array<f32>;", "x must have @group and @binding"),
        ("@group(0) @binding(1) var x: texture_2d<f32>;", "var<storage>.*it is var$"),
        (
            "@group(0) @binding(1) var<storage, write> x: array<f32>;",
            "line 1: binding 1 .* it is var<storage, write>",
        ),
        ("\nfn f() {\n{", "line 3: '{' is never closed"),
        (f"{MAIN}\n}}", "line 2: '}' closes nothing"),
        ("fn f() { a(]; }", r"line 1: '\(' is never closed"),
        (f"/* /* */\n{MAIN}", r"line 1: '/\*' is never closed"),
        ("var<workgroup> x: f32", "line 1: no ';' follows 'var'"),
        ("struct", "line 1: no '{' follows 'struct'"),
        ("\n\nimpl Kernels {}", "line 3: a declaration must begin here, got 'impl'"),
        ("@", "there is no entry point"),
        ("fn", r"line 1: no '\(' follows 'fn'"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_an_entry_point_does_not_hide_a_mistake() -> None:
    with pytest.raises(ValueError, match="must be in group 0, it is in 2"):
        parse(f"{MAIN} @group(2) @binding(0) var<uniform> x: S;")


# check --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fn o1b_meta(", "fn o1b_mete(", "entry point o1b_meta is missing"),
        ("fn o1b_meta(", "fn o1b_mete(", "entry point o1b_mete is not a kernel"),
        (
            "fn o1b_meta() {",
            "fn o1b_meta() { _ = b_q[0];",
            r"^o1b_meta must not use binding 10 \(b_q\)$",
        ),
        ("@binding(11)", "@binding(16)", r"binding 16 \(b_k\) is unknown, the highest is 15"),
        ("<storage, read> b_q:", "<uniform> b_q:", r"^binding 10 \(b_q\) must be storage, q$"),
        ("<uniform> sizes", "<storage> sizes", r"^binding 15 \(sizes\) must be a uniform$"),
        (
            "read_write> b_out",
            "read> b_out",
            r"^binding 14 \(b_out\) must be read_write, a kernel writes out$",
        ),
        ("read_write> b_scratch", "read> b_scratch", "a kernel writes scratch$"),
        (
            "b_meta: array<u32>",
            "b_meta: array<f32>",
            r"^binding 0 \(b_meta\) must be array<u32>, also of vec2 or vec4, not array<f32>$",
        ),
        ("b_q: array<f32>", "b_q: array<u32>", r"must be array<f32>,.* not array<u32>$"),
        ("b_q: array<f32>", "b_q: array<f32, 64>", r"must be array<f32>,.* not array<f32, 64>$"),
        ("b_q: array<f32>", "b_q: array<vec3<f32>>", r"not array<vec3<f32>>$"),
        ("b_q: array<f32>", "b_q: array<vec4u>", r"not array<vec4u>$"),
        ("b_q: array<f32>", "b_q: Rows", "not Rows$"),
    ],
)
def test_check_refuses(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(parse(changed(old, new)))


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_every_written_buffer_must_be_writable(name: str) -> None:
    with pytest.raises(ValueError, match=f"^binding {NUMBERS[name]} .* a kernel writes {name}$"):
        check(parse(changed(f"read_write> b_{name}:", f"read> b_{name}:")))


@pytest.mark.parametrize("number", [14, 15])
def test_bindings_without_which_nothing_comes_out(number: int) -> None:
    text = re.sub(rf"@group\(0\) @binding\({number}\).*", "", TEXT)
    what = "out" if number == 14 else "the uniform"
    with pytest.raises(ValueError, match=rf"^binding {number} \({what}\) is missing$"):
        check(parse(text))


def test_check_lists_everything() -> None:
    text = changed("read_write> b_out", "read> b_out")
    text = changed("fn o1b_far_e(", "fn o1b_far(", text)
    text = changed("b_q: array<f32>", "b_q: array<f16>", text)
    text = changed("fn o1b_meta() {", "fn o1b_meta() { _ = b_q[0]; _ = b_k[0];", text)
    with pytest.raises(ValueError) as refusal:
        check(parse(text))
    assert str(refusal.value).split("; ") == [
        "entry point o1b_far_e is missing",
        "entry point o1b_far is not a kernel",
        "binding 10 (b_q) must be array<f32>, also of vec2 or vec4, not array<f16>",
        "binding 14 (b_out) must be read_write, a kernel writes out",
        "o1b_meta must not use binding 10 (b_q)",
        "o1b_meta must not use binding 11 (b_k)",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("b_q: array<f32>", "b_q: array<vec4<f32>>"),
        ("b_q: array<f32>", "b_q: array<vec2f>"),
        ("b_meta: array<u32>", "b_meta: array<vec4<u32>>"),
        ("b_meta: array<u32>", "b_meta: array<vec4u>"),
        ("read> b_q:", "read_write> b_q:"),
        ("@group(0) @binding(6)", "// @group(0) @binding(6)"),
    ],
)
def test_check_lets_pass(old: str, new: str) -> None:
    text = changed(old, new).replace("_ = b_q_landmarks[0];", "")
    check(parse(text))


# limits -------------------------------------------------------------------------------------------


def test_limits_of_a_text() -> None:
    expected = Limits(sub_chunk=48, head_dim=128, landmarks=16, groups=32, sinks=255, near=1000)
    assert limits(TEXT) == expected


def test_limits_are_those_of_the_original_where_a_text_is_silent() -> None:
    text = re.sub(r"(var<workgroup>|const OB_K).*", "", TEXT)
    known = interface.ORIGINAL_LIMITS
    assert limits(text) == Limits(64, 256, 32, 32, 255, 2052)
    assert limits(MAIN) == known
    one = limits(text + "var<workgroup> oba_u: array<f32, 30>;")
    assert (one.landmarks, one.head_dim) == (30, 256)


@pytest.mark.parametrize(
    ("old", "new", "field", "expected"),
    [
        ("OB_K = 48u", "OB_K: u32 = 0x20", "sub_chunk", 32),
        ("const OB_K = 48u;", "const ROWS = 8; override OB_K = ROWS;", "sub_chunk", 8),
        ("array<f32, 128>", "array<vec4<f32>, 128>", "head_dim", 512),
        ("array<f32, 128>", "array<vec2f, OB_K,>", "head_dim", 96),
        ("array<f32, 1000>", "array<f16, 500>", "near", 500),
        ("array<f32, 20>", "array<f32, 4>", "landmarks", 4),
    ],
)
def test_limits_follow_the_declarations(old: str, new: str, field: str, expected: int) -> None:
    assert getattr(limits(changed(old, new)), field) == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("OB_K = 48u", "OB_K = 6u * 8u", "the constant OB_K must be a number of rows"),
        ("OB_K = 48u", "OB_K = 0", "the constant OB_K must be a number of rows"),
        (
            "oba_qs: array<f32, 128>",
            "oba_qs: array<f32, 2 * 64>",
            r"workgroup array oba_qs must have a number of elements.* not array<f32, 2\*64>",
        ),
        ("oba_scr: array<f32, 1000>", "oba_scr: array<array<f32, 4>, 250>", "array oba_scr must"),
        ("oba_f: array<f32, 24>", "oba_f: array<f32, N>", "array oba_f must"),
        ("oba_f: array<f32, 24>", "oba_f: f32", "array oba_f must"),
    ],
)
def test_limits_must_be_numbers(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = changed(old, new)
    with pytest.raises(ValueError, match=message):
        limits(text)
    with pytest.raises(
        ValueError, match=rf"^wgsl must name kernels that .* got .*x\.wgsl: .*{message}"
    ):
        load(put(tmp_path / "x.wgsl", text))


# Files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hashes", ["", "#", "##"])
@pytest.mark.parametrize("name", ["kernels.rs", "kernels.txt", "kernels.wgsl", "kernels"])
def test_rust_files(tmp_path: Path, hashes: str, name: str) -> None:
    text = changed("const OB_K", '// "quoted"\nconst OB_K') if hashes else TEXT
    found = load(put(tmp_path / name, rust(text, hashes)))
    assert found.text == text
    assert found.interface == parse(text)
    assert found.limits == limits(text)
    assert not found.is_original


def test_only_one_newline_belongs_to_the_quote(tmp_path: Path) -> None:
    assert load(put(tmp_path / "two.rs", rust("\n" + TEXT))).text == "\n" + TEXT
    close = rust(TEXT).replace('r#"\n', 'r#"')
    assert load(put(tmp_path / "none.rs", close)).text == TEXT


def test_other_text_of_a_rust_file(tmp_path: Path) -> None:
    """Quotes, comments and mentions of a kernel around the raw string are not the kernels."""
    other = f"""
    // r#"{TEXT.replace(chr(10), " ")}"#
    /* /* r"" */ r#"{TEXT}"# */
    const A: [&str; 4] = ["r", "\\" r#", r"o1b_far_e", "@compute o1b_far_e"];
    fn f<'a>(x: &'a str) -> bool {{ x.contains('"') || x.contains('\\'') }}
    """
    found = load(put(tmp_path / "kernels.rs", other + rust(TEXT) + other))
    assert found.text == TEXT


def test_rust_file_with_crlf(tmp_path: Path) -> None:
    assert load(put(tmp_path / "kernels.rs", rust(TEXT).replace("\n", "\r\n"))).text == TEXT


def test_wgsl_file_is_taken_as_it_is(tmp_path: Path) -> None:
    text = TEXT.replace("\n", "\r\n") + '// r"not Rust"\r\n'
    found = load(put(tmp_path / "kernels.wgsl", text))
    assert found.text == text
    assert found.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert found.interface == parse(TEXT)
    assert load(put(tmp_path / "bom.wgsl", "\ufeff" + TEXT)).text == TEXT


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (rust(TEXT) + rust(TEXT), "the kernels in one raw string, got FILE with 2 of them"),
        ("fn main() {}", "WGSL kernels, or with o1b_far_e in a raw string, got FILE with neither"),
        ("", "got FILE with neither"),
        (TEXT.encode() + b"\xff", "a file in UTF-8, got FILE: .* byte 0xff"),
        (TEXT.encode("utf-16"), "a file in UTF-8, got FILE"),
        (b" " * 4_000_001, "a file of at most 4,000,000 bytes, got FILE$"),
        ('const K: &str = "@compute";', "got FILE: there is no entry point"),
        (changed("fn o1b_meta(", "fn o1b_mete("), "got FILE: entry point o1b_meta is missing; "),
    ],
)
def test_files_that_are_refused(tmp_path: Path, data: str | bytes, message: str) -> None:
    path = tmp_path / "kernels.wgsl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    expected = message.replace("FILE", re.escape(str(path)))
    with pytest.raises(ValueError, match=f"^wgsl must name .*{expected}"):
        load(path)


def test_largest_file(tmp_path: Path) -> None:
    text = TEXT + " " * (4_000_000 - len(TEXT))
    assert load(put(tmp_path / "kernels.wgsl", text)).text == text


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "absent.wgsl"
    for wgsl in (path, str(path)):
        with pytest.raises(FileNotFoundError, match=r"^wgsl must be .* got '.*absent\.wgsl'"):
            load(wgsl)


def test_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(put(tmp_path / "kernels.rs", rust(TEXT)).parent)
    with pytest.raises(FileNotFoundError, match=r"^wgsl must be .* got ''"):
        load("")
    wrong: Any = 3
    with pytest.raises(TypeError, match=r"^wgsl must be 'own', 'original' or a path, got int"):
        load(wrong)


# Cargo's folder and other folders -----------------------------------------------------------------


@pytest.fixture
def cargo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "cargo"
    monkeypatch.setenv("CARGO_HOME", str(home))
    return home


def release(home: Path, version: str, index: str = "index.crates.io-1") -> Path:
    """A release of the engine in cargo's registry; its kernels name the version."""
    name = f"cortiq-engine-{version}"
    folder = home / "registry" / "src" / index / name
    put(folder / "src" / "lib.rs", '//! Has o1b_far_e.\nconst NAME: &str = r"o1b_far_e @compile";')
    return put(folder / "src" / "gpu" / "batch.rs", rust(f"// {version}\n{TEXT}"))


def test_newest_release_of_two(cargo: Path) -> None:
    release(cargo, "0.9.9")
    newest = release(cargo, "0.9.10")
    found = load("original")
    assert found.origin == str(newest)
    assert found.text.startswith("// 0.9.10\n")
    assert str(found).startswith(f"WGSL of {newest}, not the known original (sha256 ")


def test_original_in_the_registry(cargo: Path, original: Path) -> None:
    release(cargo, "0.8.50")
    path = release(cargo, "0.8.51")
    path.write_bytes(original.read_bytes())
    assert load("original").is_original


def test_order_of_releases(cargo: Path) -> None:
    """Numbers are compared as numbers, a pre-release is older than its release."""
    order = ["0.9.9", "0.10.0-alpha", "0.10.0-rc.2", "0.10.0-rc.10", "0.10.0", "0.10.1+b", "1.0.0"]
    for i, version in enumerate(order):
        # Neither the index nor what was written last decides.
        path = release(cargo, version, f"index-{(7 * i) % 4}")
        os.utime(path.parents[2], (1e9 - i, 1e9 - i))
        assert load("original").text.startswith(f"// {version}\n")
    release(cargo, "macros-9.0.0")
    release(cargo, "0.9.10")
    assert load("original").text.startswith("// 1.0.0\n")


def test_releases_without_kernels_are_passed_over(cargo: Path) -> None:
    release(cargo, "0.7.0")
    release(cargo, "0.8.0").unlink()
    put(release(cargo, "0.9.0"), "")
    release(cargo, "0.10.0").write_bytes(rust(TEXT).encode() + b"\xff")
    release(cargo, "0.11.0").write_bytes(rust(TEXT).encode() + b" " * 4_000_000)
    path = release(cargo, "0.12.0")
    path.rename(path.with_suffix(".txt"))
    assert load("original").text.startswith("// 0.7.0\n")


def test_releases_that_do_not_fit_are_refused(cargo: Path) -> None:
    """An older release is not what the user runs: no silent step back."""
    release(cargo, "0.8.0")
    newest = put(release(cargo, "0.9.0"), rust(changed("fn o1b_meta(", "fn o1b_mete(")))
    with pytest.raises(ValueError, match=f"got {re.escape(str(newest))}: entry point o1b_meta is"):
        load("original")


@pytest.mark.parametrize(
    "place",
    [
        "cortiq-0123456789abcdef/abc1234/src",
        "cortiq-engine-0123456789abcdef/abc1234/crates/engine/src/gpu",
        "cmf-0123456789abcdef/abc1234/cortiq-engine/src",
        "cmf-0123456789abcdef/abc1234/crates/cortiq-engine/src",
    ],
)
def test_git_checkouts(cargo: Path, place: str) -> None:
    path = put(cargo / "git" / "checkouts" / place / "batch.rs", rust(TEXT))
    assert load("original").origin == str(path)
    published = release(cargo, "0.1.0")
    assert load("original").origin == str(published)


def test_latest_git_checkout(cargo: Path) -> None:
    checkouts = cargo / "git" / "checkouts"
    for i, revision in enumerate(("bbb", "aaa", "ccc")):
        path = put(checkouts / "cortiq-0123" / revision / "batch.rs", rust(TEXT))
        os.utime(path.parent, (1e9 + i, 1e9 + i))
        assert load("original").origin == str(path)


def test_other_checkouts_are_not_searched(cargo: Path) -> None:
    put(cargo / "git" / "checkouts" / "other-0123" / "abc" / "src" / "batch.rs", rust(TEXT))
    put(cargo / "git" / "checkouts" / "cortiq-0123" / "abc" / "target" / "batch.rs", rust(TEXT))
    put(cargo / "registry" / "src" / "index" / "other-1.0.0" / "batch.rs", rust(TEXT))
    put(cargo / "git" / "checkouts" / "other-0123" / "abc" / "cortiq.rs", rust(TEXT))
    if os.name == "posix":
        (cargo / "git" / "checkouts" / "cortiq-0123" / "gone").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"^wgsl='original' needs"):
        load("original")


def test_nothing_in_cargos_folder(cargo: Path) -> None:
    with pytest.raises(FileNotFoundError) as refusal:
        load("original")
    message = str(refusal.value)
    assert message.startswith("wgsl='original' needs the source of cortiq-engine")
    assert str(cargo / "registry" / "src" / "*" / "cortiq-engine-*") in message
    assert str(cargo / "git" / "checkouts") in message
    assert "the path of a file or folder" in message


@pytest.mark.parametrize("value", [None, ""])
def test_cargos_usual_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    if value is None:
        monkeypatch.delenv("CARGO_HOME", raising=False)
    else:
        monkeypatch.setenv("CARGO_HOME", value)
    path = release(tmp_path / ".cargo", "0.8.51")
    assert load("original").origin == str(path)


def test_only_the_string_means_cargo(
    cargo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = release(cargo, "0.8.51")
    put(tmp_path / "original", TEXT)
    monkeypatch.chdir(tmp_path)
    assert load("original").origin == str(published)
    assert load(Path("original")).text == TEXT


def test_folder(tmp_path: Path) -> None:
    put(tmp_path / "engine" / "target" / "a.rs", rust("// target\n" + TEXT))
    put(tmp_path / "engine" / ".git" / "a.rs", rust("// git\n" + TEXT))
    put(tmp_path / "engine" / "kernels.wgsl", TEXT)
    put(tmp_path / "engine" / "lib.rs", "mod z;")
    for name in (f"z{i}.rs" for i in range(20)):
        put(tmp_path / "engine" / "src" / name, rust(f"// {name}\n{TEXT}"))
    path = put(tmp_path / "engine" / "src" / "z.rs", rust(TEXT))
    put(tmp_path / "engine" / "tests" / "z.rs", rust("// tests\n" + TEXT))
    for folder in (tmp_path, str(tmp_path / "engine")):
        assert load(folder).origin == str(path)


def test_folder_with_releases(cargo: Path) -> None:
    for version in ("0.8.9", "0.9.9"):
        release(cargo, version)
    newest = release(cargo, "0.9.10")
    assert load(newest.parents[3]).origin == str(newest)


def test_folder_without_kernels(tmp_path: Path) -> None:
    put(tmp_path / "lib.rs", "fn o1b_far_e() {} // @compute")
    with pytest.raises(FileNotFoundError, match=f"^wgsl must name a folder .*{tmp_path.name}"):
        load(tmp_path)


def test_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a" / "b" / "c" / "batch.rs", rust(TEXT))
    monkeypatch.setattr(source, "MAX_FOLDERS", 4)
    assert load(tmp_path).text == TEXT
    monkeypatch.setattr(source, "MAX_FOLDERS", 3)
    with pytest.raises(FileNotFoundError, match="at most 3 folders are searched"):
        load(tmp_path)


def test_folder_with_kernels_twice_in_a_file(tmp_path: Path) -> None:
    put(tmp_path / "a.rs", rust(TEXT) * 2)
    with pytest.raises(ValueError, match=r"in one raw string, got .*a\.rs with 2 of them"):
        load(tmp_path)
