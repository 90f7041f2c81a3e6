"""WGSL kernels that come from elsewhere: files, Rust sources, cargo's folders."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from o1core_wgpu.interface import Interface, Limits, check, comment_end, limits, parse

__all__ = ["ENVIRONMENT", "ORIGINAL_SHA256", "Source", "load"]

ENVIRONMENT = "O1CORE_WGSL"
"""The variable that names the kernels to run in place of o1core's own."""

ORIGINAL_SHA256 = "d1e283f4659d6ada3bbab54af8fde3888a7c44c341211bb6b938dba3d7c326b2"
"""Of the kernels in cortiq-engine 0.8.51: their raw string without its first newline."""

MAX_BYTES = 4_000_000
# What a raw string must have to be the kernels and not just a mention of one.
MARKS = ("@compute", "o1b_far_e")
# A folder is searched up to here: enough for a checkout, and an end for a mistaken "/".
MAX_FOLDERS = 5_000


@dataclass(frozen=True)
class Source:
    """Kernels whose interface was checked; origin is the file that they were read from."""

    text: str
    origin: str
    sha256: str
    interface: Interface
    limits: Limits

    @property
    def is_original(self) -> bool:
        """Whether the text is that of `ORIGINAL_SHA256`."""
        return self.sha256 == ORIGINAL_SHA256

    def __str__(self) -> str:
        if self.is_original:
            return f"original WGSL, byte for byte (sha256 {self.sha256[:12]})"
        return f"WGSL of {self.origin}, not the known original (sha256 {self.sha256[:12]})"


def load(wgsl: str | os.PathLike[str]) -> Source:
    """The kernels of a file, of a folder, or (for "original") of the upstream engine, checked.

    A file is WGSL, or it has the kernels in one raw string (`r"..."`, `r#"..."#`) as Rust source
    does; its suffix does not matter. Of a raw string, a newline right after the opening quote is
    not part of the text, and CRLF is LF there, as it is to Rust. A byte-order mark is dropped.

    Of a folder, the first .rs file with the kernels is taken, subfolders of newer releases of
    cortiq-engine before older ones. "original" is what the environment variable O1CORE_WGSL names,
    if that is the known original byte for byte; else it is looked for in cargo's folder
    (`$CARGO_HOME` or `~/.cargo`): the releases in registry/src, newest first, then git checkouts,
    the one last changed first.

    FileNotFoundError where there is nothing to read. ValueError for a file that is too large, not
    UTF-8 or without the kernels, and for what `parse`, `check` and `limits` refuse.
    """
    if wgsl == "original" and (given := _original_of_environment()) is not None:
        return given
    path = _find(wgsl)
    text = _kernels_of(path)
    try:
        interface = parse(text)
        check(interface)
        sizes = limits(text)
    except ValueError as error:
        raise ValueError(f"wgsl must name kernels that fit o1core, got {path}: {error}") from None
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Source(text, str(path), digest, interface, sizes)


def _original_of_environment() -> Source | None:
    named = os.environ.get(ENVIRONMENT)
    if not named or named == "original":
        return None
    try:
        found = load(named)
    except (OSError, ValueError):
        return None  # of no use for this; who asks for what it names is told
    return found if found.is_original else None


# What of Rust may have quotes in it: comments, raw strings, strings, characters.
_RUST = re.compile(
    r"""//[^\n]*|/\*|r(?P<hashes>#*)"(?P<raw>.*?)"(?P=hashes)"""
    r"""|"(?:\\.|[^"\\])*"|'(?:\\.[^'\n]*|[^\\'])'""",
    re.DOTALL,
)


def _kernels_of(path: Path) -> str:
    text = _read(path)
    strings = _raw_strings(text)
    if len(strings) > 1:
        raise ValueError(
            f"wgsl must name a file with the kernels in one raw string, got {path} with "
            f"{len(strings)} of them"
        )
    if strings:
        return strings[0]
    if "@compute" in text:
        # What stands between the quotes of a Rust source, saved as it is, begins with a newline.
        return text.removeprefix("\n")
    raise ValueError(
        f"wgsl must name a file with WGSL kernels, or with o1b_far_e in a raw string, got {path} "
        "with neither"
    )


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"wgsl must name a file of at most {MAX_BYTES:,} bytes, got {path}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"wgsl must name a file in UTF-8, got {path}: {error}") from None


def _raw_strings(text: str) -> list[str]:
    """The raw strings of a Rust text that are the kernels."""
    if any(mark not in text for mark in MARKS):
        return []
    text = text.replace("\r\n", "\n")
    found, at = [], 0
    while token := _RUST.search(text, at):
        at = token.end()
        if token[0] == "/*":
            at = comment_end(text, token.start()) or len(text)
        elif token["raw"] and all(mark in token["raw"] for mark in MARKS):
            found.append(token["raw"].removeprefix("\n"))
    return found


def _find(wgsl: str | os.PathLike[str]) -> Path:
    """The file that the argument stands for."""
    if not isinstance(wgsl, (str, os.PathLike)):
        raise TypeError(f"wgsl must be 'own', 'original' or a path, got {type(wgsl).__name__}")
    if wgsl == "original":
        home = Path(os.environ.get("CARGO_HOME") or os.path.expanduser("~/.cargo"))
        releases = sorted(home.glob("registry/src/*/cortiq-engine-*"))
        releases.sort(key=lambda p: _release(p.name), reverse=True)
        # Below git/checkouts: repository/revision, and the engine there or further below.
        places = ("*cortiq*/*", "*/*/*cortiq*", "*/*/*/*cortiq*")
        below = {p for place in places for p in home.glob(f"git/checkouts/{place}")}
        checkouts = sorted(p for p in below if p.is_dir())
        checkouts.sort(key=lambda p: p.stat().st_mtime, reverse=True)
        found = _search((*releases, *checkouts))
        if found is None:
            raise FileNotFoundError(
                "wgsl='original' needs the source of cortiq-engine, and no .rs file in "
                f"{home / 'registry' / 'src' / '*' / 'cortiq-engine-*'} or in *cortiq* of "
                f"{home / 'git' / 'checkouts'} has the kernels; wgsl, or {ENVIRONMENT}, "
                "may also be the path of a file or folder that has them"
            )
        return found
    path = Path(wgsl)
    if not os.fspath(wgsl) or not path.exists():
        raise FileNotFoundError(
            "wgsl must be 'own', 'original' or the path of a file or folder, "
            f"got {os.fspath(wgsl)!r}, which is neither"
        )
    if path.is_dir():
        found = _search((path,))
        if found is None:
            raise FileNotFoundError(
                f"wgsl must name a folder with the kernels in a .rs file, got {path}, where none "
                f"has them (at most {MAX_FOLDERS:,} folders are searched); name the file instead"
            )
        return found
    return path


def _search(roots: Iterable[Path]) -> Path | None:
    """The first .rs file with the kernels below one of the folders."""
    for root in roots:
        for folder, folders, files in islice(os.walk(root), MAX_FOLDERS):
            # What cargo builds, and git's own files, are no source.
            folders[:] = sorted({*folders} - {"target", ".git"})
            folders.sort(key=_release, reverse=True)
            for path in (Path(folder, name) for name in sorted(files) if name.endswith(".rs")):
                try:
                    if _raw_strings(_read(path)):
                        return path
                except (OSError, ValueError):
                    continue  # a search is not about files that cannot be read
    return None


def _release(folder: str) -> tuple[tuple[int, ...], bool, tuple[tuple[bool, int, str], ...]]:
    """A key that sorts folders cortiq-engine-VERSION by age and all others before them.

    As for cargo, a pre-release is older than its release, and numbers in its name are numbers.
    """
    version = re.fullmatch(r"cortiq-engine-(\d+(?:\.\d+)*)(?:-([^+]+))?(?:\+.*)?", folder)
    if version is None:
        return (), False, ()
    numbers = tuple(int(n) for n in version[1].split("."))
    parts = version[2].split(".") if version[2] else []
    pre = tuple((False, int(p), "") if p.isdecimal() else (True, 0, p) for p in parts)
    return numbers, not parts, pre
