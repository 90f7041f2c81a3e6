"""The documents' code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support import install_plugin

from o1core.testing import cases, check_backend


def blocks(name: str) -> list[str]:
    text = (ROOT / name).read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    found = blocks("README.md")
    assert len(found) >= 3
    for block in found:
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"print\(.*\)  # (.*)", "\n".join(found))
    assert promised
    assert printed[: len(promised)] == promised


def test_contributing(site: Path) -> None:
    """The complete backend of the page, installed and checked."""
    source, check = blocks("CONTRIBUTING.md")
    install_plugin(site, "o1core_slow", source, "slow = o1core_slow:SlowExecutor")
    names = ("plain", "fm", "no-landmarks", "mixed-windows", "massive-100-at-40", "seals-itself")
    check_backend("slow", [c for c in cases() if c.name in names])
    compile(check, "CONTRIBUTING.md", "exec")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/performance.md"])
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
