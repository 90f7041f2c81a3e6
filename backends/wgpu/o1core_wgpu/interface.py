"""The interface of a WGSL text: bindings, entry points, which of these uses what.

A text is not compiled here, only read that far, so that a wrong one is refused with all its
mismatches before a device sees it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from o1core.config import Geometry
from o1core.layout import buffers, kernels

__all__ = [
    "ORIGINAL_LIMITS",
    "Binding",
    "EntryPoint",
    "Interface",
    "Limits",
    "check",
    "comment_end",
    "limits",
    "parse",
]

Access = Literal["read", "read_write", "uniform"]

UNIFORM = 15


@dataclass(frozen=True)
class Binding:
    """A buffer of bind group 0; `type` is as in WGSL, `array<f32>`."""

    number: int
    name: str
    access: Access
    type: str


@dataclass(frozen=True)
class EntryPoint:
    """A compute entry point; bindings are the numbers that it and what it calls use, sorted."""

    name: str
    workgroup_size: tuple[int, int, int]
    bindings: tuple[int, ...]


@dataclass(frozen=True)
class Interface:
    """Bindings by number, entry points by name."""

    bindings: Mapping[int, Binding]
    entry_points: Mapping[str, EntryPoint]


@dataclass(frozen=True)
class Limits:
    """The largest sizes for which kernels are right; near is sinks + window."""

    sub_chunk: int
    head_dim: int
    landmarks: int
    groups: int
    sinks: int
    near: int


ORIGINAL_LIMITS = Limits(sub_chunk=64, head_dim=256, landmarks=32, groups=64, sinks=255, near=2052)


def parse(text: str) -> Interface:
    """The interface of a WGSL text.

    A binding is used by an entry point if it, or a function that it calls through any others, names
    the binding, even where control never comes. A local or a parameter of the same name is, in its
    scope, not the binding. The size of a workgroup may be given by module constants, and by an
    `override` with its default.

    ValueError with the line for: a binding outside group 0, two bindings with one number, one that
    is neither storage nor uniform, brackets that do not match, a workgroup size that is no number,
    and whatever cannot be WGSL; and for a text without entry point.
    """
    module = _Module(text)
    numbers = {b.name: b.number for b in module.bindings.values()}
    entry_points = {}
    for name, function in module.functions.items():
        if "compute" not in function.attributes:
            continue
        reached, new = {name}, {name}
        mentions: set[str] = set()
        while new:
            mentions.update(*(module.functions[f].mentions for f in new))
            new = (mentions & module.functions.keys()) - reached
            reached |= new
        used = sorted(numbers[n] for n in mentions & numbers.keys())
        entry_points[name] = EntryPoint(name, module.workgroup_size(name), tuple(used))
    if not entry_points:
        raise ValueError("there is no entry point, a function with @compute")
    return Interface(dict(sorted(module.bindings.items())), entry_points)


def check(interface: Interface) -> None:
    """ValueError naming every difference from the plan's table (docs/operator.md section 6).

    The entry points must be o1b_ and a kernel's name each, all of them and no others, since nobody
    would launch these. Each may use the buffers that its kernel reads or writes, and the uniform.
    A buffer that any kernel writes must be read_write; the others may be.
    """
    g = Geometry.of(1, 1, 8)
    table = {b.binding: b for b in buffers(g, 1)}
    numbers = {b.name: b.binding for b in table.values()}
    names = {number: b.name for number, b in table.items()} | {UNIFORM: "the uniform"}
    steps = {f"o1b_{k.name}": k for k in kernels(g, "sub-chunk")}
    written = {numbers[name] for k in steps.values() for name in k.writes}
    bindings, entry_points = interface.bindings, interface.entry_points

    wrong = [f"entry point {name} is missing" for name in steps if name not in entry_points]
    wrong += [f"entry point {name} is not a kernel" for name in entry_points if name not in steps]
    for number in sorted((written | {UNIFORM}) - bindings.keys()):
        wrong.append(f"binding {number} ({names[number]}) is missing")
    for number, b in bindings.items():
        what = f"binding {number} ({b.name})"
        if number not in names:
            wrong.append(f"{what} is unknown, the highest is {UNIFORM}")
        elif (number == UNIFORM) != (b.access == "uniform"):
            kind = "a uniform" if number == UNIFORM else f"storage, {names[number]}"
            wrong.append(f"{what} must be {kind}")
        elif number != UNIFORM:
            if number in written and b.access != "read_write":
                wrong.append(f"{what} must be read_write, a kernel writes {names[number]}")
            # No vec3: in memory it takes four numbers, and the buffers have no such gaps.
            item = "f32" if table[number].dtype == "float32" else "u32"
            if not re.fullmatch(rf"array<({item}|vec[24](<{item}>|{item[0]}))>", b.type):
                wrong.append(f"{what} must be array<{item}>, also of vec2 or vec4, not {b.type}")
    for name, kernel in steps.items():
        allowed = {numbers[n] for n in (*kernel.reads, *kernel.writes)} | {UNIFORM}
        for number in entry_points[name].bindings if name in entry_points else ():
            if number not in allowed:
                wrong.append(f"{name} must not use binding {number} ({bindings[number].name})")
    if wrong:
        raise ValueError("; ".join(wrong))


def limits(text: str) -> Limits:
    """The limits of a WGSL text that declares its arrays under the names of the original.

    sub_chunk is the constant OB_K; head_dim the size of the workgroup array oba_qs, near that of
    oba_scr, landmarks the least of oba_f, oba_u and oba_g, all counted in numbers where elements
    are vectors; groups is the width of o1b_meta's workgroup, and sinks what 8 bits of the uniform
    hold. Where a text has no such name, that limit is the original's. ValueError for one that it
    has with a size that is no number.
    """
    module, known = _Module(text), ORIGINAL_LIMITS

    def least(default: int, *names: str) -> int:
        return min((module.size(n) for n in names if n in module.arrays), default=default)

    sub_chunk, groups = known.sub_chunk, known.groups
    if "OB_K" in module.constants:
        value = module.number(["OB_K"])
        if not value:
            raise ValueError("the constant OB_K must be a number of rows")
        sub_chunk = value
    if "o1b_meta" in module.functions:
        groups = module.workgroup_size("o1b_meta")[0]
    return Limits(
        sub_chunk=sub_chunk,
        head_dim=least(known.head_dim, "oba_qs"),
        landmarks=least(known.landmarks, "oba_f", "oba_u", "oba_g"),
        groups=groups,
        sinks=known.sinks,
        near=least(known.near, "oba_scr"),
    )


# Numbers come first: their suffixes and exponents are no names.
_TOKEN = re.compile(r"\.?[0-9][\w.]*|[^\W\d]\w*|\S")
_NAME = re.compile(r"[^\W\d]\w*")
_INTEGER = re.compile(r"(?:0[xX]([0-9a-fA-F]+)|([0-9]+))[iu]?")
_ARRAY = re.compile(r"array<(?:vec([234]).*|\w+), (\w+)>")
_COMMENT = re.compile(r"//[^\n\v\f\r\x85\u2028\u2029]*|/\*")
_COMMENT_MARK = re.compile(r"/\*|\*/")
_OPENING = {")": "(", "]": "[", "}": "{"}
_ACCESS: Mapping[tuple[str, ...], Access] = {
    ("uniform",): "uniform",
    ("storage",): "read",
    ("storage", "read"): "read",
    ("storage", "read_write"): "read_write",
}


@dataclass(frozen=True)
class _Function:
    at: int  # its token
    attributes: Mapping[str, Sequence[str]]  # the tokens between the brackets of each
    mentions: frozenset[str]  # names in its body that it does not declare itself


class _Module:
    """The declarations of a WGSL text, as far as an interface depends on them."""

    def __init__(self, text: str) -> None:
        self.bindings: dict[int, Binding] = {}
        self.functions: dict[str, _Function] = {}
        self.constants: dict[str, Sequence[str]] = {}  # the tokens of each value
        self.arrays: dict[str, str] = {}  # of the workgroup: the types
        self._text = text
        tokens = list(_TOKEN.finditer(_without_comments(text)))
        self._starts = [m.start() for m in tokens]
        self._tokens = [m[0] for m in tokens]
        self._closing = self._match_brackets()
        self._read()

    def number(self, tokens: Sequence[str]) -> int | None:
        """The integer that a literal or a constant's name stands for; None for anything else."""
        seen = set()
        while len(tokens) == 1 and tokens[0] in self.constants and tokens[0] not in seen:
            seen.add(tokens[0])
            tokens = self.constants[tokens[0]]
        digits = _INTEGER.fullmatch(tokens[0]) if len(tokens) == 1 else None
        if digits is None:
            return None
        return int(digits[1], 16) if digits[1] else int(digits[2])

    def size(self, name: str) -> int:
        """How many numbers a workgroup array holds."""
        found = _ARRAY.fullmatch(self.arrays[name])
        count = self.number([found[2]]) if found else None
        if not found or not count:
            raise ValueError(
                f"the workgroup array {name} must have a number of elements, scalars or vectors, "
                f"not {self.arrays[name]}"
            )
        return count * int(found[1] or 1)

    def workgroup_size(self, name: str) -> tuple[int, int, int]:
        """Of an entry point, in three dimensions."""
        function = self.functions[name]
        parts: list[list[str]] = [[]]
        for token in function.attributes.get("workgroup_size", ()):
            if token == ",":
                parts.append([])
            else:
                parts[-1].append(token)
        sizes = [self.number(part) or 0 for part in parts]
        if len(sizes) > 3 or 0 in sizes:
            self._fail(function.at, f"the workgroup size of {name} must be one to three numbers")
        x, y, z = *sizes, *(1,) * (3 - len(sizes))
        return x, y, z

    def _fail(self, at: int, what: str) -> NoReturn:
        end = self._starts[at] if at < len(self._starts) else len(self._text)
        raise ValueError(f"line {_line(self._text, end)}: {what}")

    def _token(self, i: int) -> str:
        return self._tokens[i] if i < len(self._tokens) else ""

    def _match_brackets(self) -> dict[int, int]:
        closing, opened = {}, []
        for i, token in enumerate(self._tokens):
            if token in _OPENING.values():
                opened.append(i)
            elif token in _OPENING:
                if not opened:
                    self._fail(i, f"{token!r} closes nothing")
                if self._tokens[opened[-1]] != _OPENING[token]:
                    break
                closing[opened.pop()] = i
        if opened:
            self._fail(opened[-1], f"{self._tokens[opened[-1]]!r} is never closed")
        return closing

    def _find(self, wanted: str, start: int) -> int:
        try:
            return self._tokens.index(wanted, start)
        except ValueError:
            self._fail(start, f"no {wanted!r} follows {self._token(start)!r}")

    def _read(self) -> None:
        attributes: dict[str, Sequence[str]] = {}
        i = 0
        while i < len(self._tokens):
            token = self._tokens[i]
            if token == "@":
                name, attributes[name], i = self._attribute(i)
                continue
            if token == "fn":
                i = self._function(i, attributes)
            elif token == "var":
                i = self._variable(i, attributes)
            elif token == "struct":
                i = self._closing[self._find("{", i)]
            elif token in ("const", "override"):
                end = self._find(";", i)
                declared = self._tokens[i + 1 : end]
                value = declared.index("=") + 1 if "=" in declared else len(declared)
                self.constants[self._token(i + 1)] = declared[value:]
                i = end
            elif token in ("alias", "const_assert", "diagnostic", "enable", "requires"):
                i = self._find(";", i)
            elif token != ";":
                self._fail(i, f"a declaration must begin here, got {token!r}")
            attributes = {}
            i += 1

    def _attribute(self, i: int) -> tuple[str, Sequence[str], int]:
        """Name, tokens between its brackets, and what comes next, of the attribute at `i`."""
        if self._token(i + 2) != "(":
            return self._token(i + 1), (), i + 2
        end = self._closing[i + 2]
        arguments = self._tokens[i + 3 : end]
        if arguments[-1:] == [","]:
            arguments.pop()
        return self._token(i + 1), arguments, end + 1

    def _variable(self, i: int, attributes: Mapping[str, Sequence[str]]) -> int:
        """Read the variable at `i`; its last token."""
        end = self._find(";", i)
        at = self._template_end(i + 1)
        space = tuple(t for t in self._tokens[i + 2 : at - 1] if t != ",")
        name = self._token(at)
        declared = self._tokens[at + 2 : end] if self._token(at + 1) == ":" else []
        if "=" in declared:
            del declared[declared.index("=") :]
        kind = "".join(declared).replace(",>", ">").replace(",", ", ")
        if space == ("workgroup",):
            self.arrays[name] = kind
        elif space[:1] in (("storage",), ("uniform",)) or attributes.keys() & {"group", "binding"}:
            group = self.number(attributes.get("group", ()))
            number = self.number(attributes.get("binding", ()))
            if group is None or number is None:
                self._fail(i, f"{name} must have @group and @binding with a number each")
            if group != 0:
                self._fail(i, f"binding {number} ({name}) must be in group 0, it is in {group}")
            if number in self.bindings:
                other = self.bindings[number].name
                self._fail(i, f"{name} must have a binding of its own, {number} is {other}")
            if space not in _ACCESS:
                spelt = f"<{', '.join(space)}>" if space else ""
                self._fail(
                    i,
                    f"binding {number} ({name}) must be var<storage>, with read or read_write, or "
                    f"var<uniform>, it is var{spelt}",
                )
            self.bindings[number] = Binding(number, name, _ACCESS[space], kind)
        return end

    def _template_end(self, i: int) -> int:
        """What follows `<...>`, which may be absent at `i`."""
        return self._find(">", i) + 1 if self._token(i) == "<" else i

    def _function(self, i: int, attributes: Mapping[str, Sequence[str]]) -> int:
        """Read the function at `i`; its last token."""
        head = self._find("(", i)
        body = self._find("{", head)
        end = self._closing[body]
        parameters = {
            self._tokens[j - 1] for j in range(head, self._closing[head]) if self._tokens[j] == ":"
        }
        mentions = frozenset(self._mentions(parameters, body + 1, end))
        self.functions[self._token(i + 1)] = _Function(i, attributes, mentions)
        return end

    def _mentions(self, parameters: set[str], i: int, end: int) -> set[str]:
        """The names between two tokens of a body that no scope around them declares.

        A local is known from the end of its declaration on: in `let k = k[0];` the second is not
        it. The head of a `for` is a scope of its own around its block.
        """
        found: set[str] = set()
        scopes, heads = [parameters], [False]
        declared = ""
        while i < end:
            token = self._tokens[i]
            if token in ("{", "for"):
                scopes.append(set())
                heads.append(token == "for")
            elif token == "}":
                scopes.pop()
                heads.pop()
                if heads[-1]:
                    scopes.pop()
                    heads.pop()
            elif token in ("let", "var", "const"):
                i = self._template_end(i + 1)
                declared = self._token(i)
            elif token == ";":
                scopes[-1].add(declared)
                declared = ""
            elif token == "@":
                i = self._attribute(i)[2]
                continue
            elif token == ".":
                i += 1  # the name of a member
            elif _NAME.fullmatch(token) and not any(token in scope for scope in scopes):
                found.add(token)
            i += 1
        return found


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def comment_end(text: str, start: int) -> int | None:
    """Where the block comment that begins at `start` ends; they nest, in WGSL and in Rust."""
    depth = 0
    for mark in _COMMENT_MARK.finditer(text, start):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return mark.end()
    return None


def _without_comments(text: str) -> str:
    """The text with blanks for comments: what remains stays where it was."""
    parts, at = [], 0
    while comment := _COMMENT.search(text, at):
        end: int | None = comment.end()
        if comment[0] == "/*":
            end = comment_end(text, comment.start())
        if end is None:
            raise ValueError(f"line {_line(text, comment.start())}: '/*' is never closed")
        parts += [text[at : comment.start()], " " * (end - comment.start())]
        at = end
    return "".join((*parts, text[at:]))
