"""The documents' code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import REQUIRED, ROOT, require_backend
from support import install_plugin

import o1core
from o1core.testing import cases, check_backend, random_rows


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


def test_wgpu_page() -> None:
    """All but the last block, which names files of the reader's."""
    reasons = [i.reasons for i in o1core.backends() if i.name == "wgpu" and not i.usable]
    if reasons and "wgpu" not in REQUIRED:
        pytest.skip(f"backend wgpu is not usable here: {reasons[0]}")
    import wgpu

    rows = 5
    first, *found, last = blocks("docs/wgpu.md")
    compile(last, "docs/wgpu.md", "exec")
    namespace: dict[str, Any] = {"o1core": o1core}
    exec(compile(first, "docs/wgpu.md", "exec"), namespace)
    device = namespace["engine"]._executor._gpu.device
    q, k, v = random_rows(1, 300 + rows, groups=2)
    usage = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC
    for name, x in zip("qkv", (q, k, v), strict=True):
        namespace[f"{name}_buffer"] = device.create_buffer_with_data(
            data=np.ascontiguousarray(x[300:]), usage=usage
        )
    namespace["out_buffer"] = device.create_buffer(size=4 * v[300:].size, usage=usage)
    namespace.update(device=device, rows=rows, q=q[:300], k=k[:300], v=v[:300])
    for block in found:
        exec(compile(block, "docs/wgpu.md", "exec"), namespace)
    out = np.frombuffer(device.queue.read_buffer(namespace["out_buffer"]), np.float32)
    with o1core.O1Batch("numpy") as numpy:
        want = numpy.seal(q[:300], k[:300], v[:300]).extend(q[300:], k[300:], v[300:])
    np.testing.assert_allclose(out.reshape(want.shape), want, atol=1e-5)
    assert namespace["layer"].rows_seen == 300 + rows


def test_taichi_page() -> None:
    require_backend("taichi")
    from o1core_taichi.language import ti

    first, durable, resident = blocks("docs/taichi.md")
    namespace: dict[str, Any] = {"o1core": o1core, "ti": ti}
    exec(compile(first, "docs/taichi.md", "exec"), namespace)
    q, k, v = random_rows(1, 400, groups=2, heads_per_group=3, head_dim=64)
    layer = namespace["layer"] = namespace["engine"].seal(q[:300], k[:300], v[:300])
    exec(compile(durable, "docs/taichi.md", "exec"), namespace)
    assert layer.rows_seen == 300
    exec(compile(resident, "docs/taichi.md", "exec"), namespace)
    assert layer.rows_seen == 300 + 2 * 64
    assert isinstance(namespace["out"], ti.Ndarray)
    assert namespace["out"].shape == (64, 6, 64)


def test_parity_page(capsys: pytest.CaptureFixture[str]) -> None:
    found = blocks("docs/parity.md")
    assert len(found) == 3
    namespace: dict[str, Any] = {}
    for block in found:
        exec(compile(block, "docs/parity.md", "exec"), namespace)
    assert namespace["steps"] is not None
    assert namespace["report"].worst <= 1
    assert "0 failed" in capsys.readouterr().out


def test_workflow_has_the_inputs_that_are_documented() -> None:
    """And the project's own CI gives it no others."""
    workflow = (ROOT / ".github/workflows/parity.yml").read_text()
    inputs = re.findall(r"^      ([a-z-]+):$", workflow.partition("permissions:")[0], re.MULTILINE)
    assert {"runner", "python", "install", "require"} <= set(inputs)
    for name in ("docs/parity.md", ".github/workflows/ci.yml"):
        text = (ROOT / name).read_text()
        (given,) = re.findall(r"uses: .*parity\.yml.*\n +with:\n((?: {6,}.*\n)+)", text)
        keys = re.findall(r"^ +([a-z-]+):", given, re.MULTILINE)
        assert keys
        assert set(keys) <= set(inputs), name


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/parity.md",
        "docs/performance.md",
        "docs/taichi.md",
        "docs/wgpu.md",
    ],
)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
