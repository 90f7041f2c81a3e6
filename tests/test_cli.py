"""The command line: what it prints is true, and what it refuses it refuses in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

import o1core
from o1core import cli
from o1core.cli import main
from o1core.exact import causal_attention
from o1core.testing import Rows, random_rows

Array = npt.NDArray[Any]
Capsys = pytest.CaptureFixture[str]

ROWS, GROUPS, HEADS, DIM, VALUE_DIM = 260, 2, 4, 8, 6
SMALL = ["--landmarks", "8", "--window", "24", "--sinks", "2"]


def layer_rows(rows: int = ROWS) -> Rows:
    return random_rows(
        3, rows, groups=GROUPS, heads_per_group=HEADS // GROUPS, head_dim=DIM, value_dim=VALUE_DIM
    )


def naive(rows: Rows, scale: float, keep: Callable[[int], Array] = np.arange) -> Array:
    """Softmax attention one row and head at a time; `keep(n)` are the keys left of n of them."""
    q, k, v = (x.astype(np.float64) for x in rows)
    out = np.empty((*q.shape[:2], v.shape[2]))
    for row in range(len(q)):
        seen = keep(row + 1)
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            weights = np.exp(scale * k[seen, group] @ q[row, head])
            out[row, head] = weights @ v[seen, group] / weights.sum()
    return out


def save_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy takes them for its options


def relative_errors(out: Array, exact: Array) -> tuple[float, float]:
    off = np.sqrt(((out - exact) ** 2).sum(axis=-1))
    size = np.sqrt((exact**2).sum(axis=-1))
    return float(np.sqrt((off**2).sum() / (size**2).sum())), float((off / size).mean())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    q, k, v = layer_rows()
    path = tmp_path / "layer.npz"
    np.savez(path, q=q, k=k, v=v)
    return path


def run_json(capsys: Capsys, *argv: object) -> dict[str, Any]:
    """A command with --json that must succeed and print nothing else."""
    assert main([*map(str, argv), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out, parse_constant=pytest.fail)
    return found


def refusal(capsys: Capsys, *argv: object, code: int = 2) -> str:
    """The one line of a command that must be refused."""
    assert main(list(map(str, argv))) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("o1core: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


@pytest.fixture(autouse=True)
def same_everywhere(no_auto_gpu: None) -> None:
    pass


# The command itself ---------------------------------------------------------------------------


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=60, check=False
    )


def test_module_runs() -> None:
    done = python("-m", "o1core", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"o1core {o1core.__version__}\n", "")


def test_errors_of_a_process(tmp_path: Path) -> None:
    done = python("-m", "o1core", "run", str(tmp_path / "absent.npz"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"o1core: error: {tmp_path / 'absent.npz'}: No such file or directory\n"


def test_import_is_quiet_and_light() -> None:
    code = (
        "import sys, o1core, o1core.cli; print([m for m in ('rich', 'torch') if m in sys.modules])"
    )
    done = python("-W", "error", "-c", code)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_reader_that_goes_away() -> None:
    code = (
        "import os, sys; from o1core.cli import main; r, w = os.pipe(); os.close(r); os.dup2(w, 1)"
        "; sys.exit(main(['plan', '--json']))"
    )
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("command", ["", "backends", "plan", "run", "demo"])
def test_help(command: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    wanted = ("backends", "plan", "run", "demo") if command == "" else ("--json",)
    assert all(word in out for word in wanted)


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["plan", "--nonsense"], ["run"]])
def test_wrong_usage(argv: list[str], capsys: Capsys) -> None:
    assert "--help)" in refusal(capsys, *argv)


def test_interrupt_is_quiet(file: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "measure", interrupted)
    assert main(["run", str(file)]) == 130
    assert capsys.readouterr() == ("", "")


# backends and plan ----------------------------------------------------------------------------


def test_backends(capsys: Capsys) -> None:
    assert main(["backends"]) == 0
    text = capsys.readouterr().out
    assert main(["backends", "--json"]) == 0
    infos = json.loads(capsys.readouterr().out)
    assert [info["name"] for info in infos] == [info.name for info in o1core.backends()]
    numpy = next(info for info in infos if info["name"] == "numpy")
    assert numpy["usable"] is True
    assert numpy["reasons"] == []
    assert numpy["device"] in text


def test_backends_says_why_not(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = o1core.BackendInfo("other", False, "", ("no adapter: " + "install " * 20,), "pkg 1")
    monkeypatch.setattr(o1core, "backends", lambda: [broken])
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["other", "no", "-"]
    assert "from pkg 1" in lines[2]
    assert "no adapter: install" in lines[3]
    assert max(map(len, lines)) <= 80


def test_plan_prints_the_plan(capsys: Capsys) -> None:
    want = o1core.Plan.build(o1core.Geometry.of(2, 6, 256), 200)
    assert main(["plan"]) == 0
    assert capsys.readouterr().out == f"{want}\n"


def test_plan_json_is_the_plan(capsys: Capsys) -> None:
    argv = "plan --json --groups 3 --heads-per-group 2 --head-dim 16 --value-dim 24 --window 8,40,9"
    argv += " --sinks 1 --landmarks 5 --rectifier fm --rows 77 --sub-chunk 7"
    geometry = o1core.Geometry.of(
        3, 2, 16, value_dim=24, window=(8, 40, 9), sinks=1, landmarks=5, rectifier="fm"
    )
    assert main(argv.split()) == 0
    plan = o1core.Plan.from_json(capsys.readouterr().out)
    assert plan == o1core.Plan.build(geometry, 77, sub_chunk=7)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rows", "-1"], "--rows must be between 0 and"),
        (["--rows", "2000000000"], "--rows must be between 0 and"),
        (["--rows", "x"], "--rows: invalid int value: 'x'"),
        (["--groups", "0"], "groups must be between 1 and"),
        (["--head-dim", "0"], "head_dim must be between 1 and"),
        (["--window", "0"], "window must be between 1 and"),
        (["--window", "4,x"], "--window: must be integers separated by commas, got '4,x'"),
        (["--window", "4,5,6"], "one window for each of the 2 groups, got 3"),
        (["--landmarks", "2"], "landmarks must be 0 (no far field) or at least 4, got 2"),
        (["--sub-chunk", "65"], "sub_chunk must be between 1 and 64, got 65"),
        (["--rectifier", "none"], "invalid choice: 'none'"),
    ],
)
def test_plan_refuses(argv: list[str], says: str, capsys: Capsys) -> None:
    assert says in refusal(capsys, "plan", *argv)


# run: the figures are true --------------------------------------------------------------------


def test_errors_are_those_of_the_output(file: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out.npz"
    found = run_json(capsys, "run", file, *SMALL, "--prompt", 100, "--chunk", 33, "--out", out)
    with np.load(out) as saved:
        rows, first = saved["out"], int(saved["first_row"])
    assert first == 100
    assert rows.dtype == np.float32
    assert rows.shape == (ROWS - 100, HEADS, VALUE_DIM)

    everything = layer_rows()
    scale = 1 / np.sqrt(DIM)
    exact = naive(everything, scale)[100:]
    near = naive(everything, scale, lambda n: np.r_[0:2, max(2, n - 24) : n])[100:]
    for name, got in (("o1_error", rows), ("window_error", near)):
        want = relative_errors(got, exact)
        assert list(found[name].values()) == pytest.approx(want, rel=1e-4)
        assert want[0] > 0.01  # else this test would not tell the two apart from nothing
    assert found["o1_error"] != found["window_error"]


def test_output_is_the_layers(file: Path, tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "out.npy"
    found = run_json(capsys, "run", file, *SMALL, "--prompt", 100, "--out", out)
    q, k, v = layer_rows()
    with o1core.O1Batch("numpy") as engine:
        layer = engine.seal(q[:100], k[:100], v[:100], o1core.Config(8, 24, 2))
        np.testing.assert_allclose(np.load(out), layer.extend(q[100:], k[100:], v[100:]), atol=1e-6)
        assert found["memory"]["state_bytes"] == layer.nbytes
    each = 4 * GROUPS * (DIM + VALUE_DIM)
    assert found["memory"]["cache_bytes"] == ROWS * each
    border = found["memory"]["cache_larger_from"]
    assert (border - 1) * each <= found["memory"]["state_bytes"] < border * each
    assert found["landmarks_used"] == 8


def test_wide_window_is_exact(file: Path, capsys: Capsys) -> None:
    found = run_json(capsys, "run", file, "--landmarks", 8, "--window", ROWS)
    assert found["exact_only"] is True
    for name in ("o1_error", "window_error"):
        assert 0 <= found[name]["relative_l2"] < 1e-5
        assert 0 <= found[name]["mean_relative"] < 1e-5
    assert main(["run", str(file), "--landmarks", "8", "--window", str(ROWS)]) == 0
    assert "too few rows to seal (that takes 273)" in capsys.readouterr().out


def test_no_landmarks_is_the_baseline(file: Path, capsys: Capsys) -> None:
    plain = run_json(capsys, "run", file, *SMALL)
    none = run_json(capsys, "run", file, *SMALL, "--landmarks", 0)
    assert none["o1_error"] == none["window_error"] == plain["window_error"]
    assert none["memory"]["state_bytes"] < plain["memory"]["state_bytes"]
    assert none["landmarks_used"] == 0


def test_agreement_is_checked(file: Path, capsys: Capsys) -> None:
    found = run_json(capsys, "run", file, *SMALL)["agreement"]
    assert 0 < found["worst_of_bound"] < 1
    assert found["rows"] == 64
    assert found["results"] == 64 * HEADS


def test_wrong_backend_is_found_out(
    file: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = o1core.Layer.extend

    def off_at_the_end(self: o1core.Layer, q: Array, k: Array, v: Array) -> Array:
        out = extend(self, q, k, v)
        if self.rows_seen == ROWS:
            out[-1, -1] += 1e-3
        return out

    monkeypatch.setattr(o1core.Layer, "extend", off_at_the_end)
    # Without a far field the tolerance of a row is close to that of a softmax in float32.
    assert main(["run", str(file), *SMALL, "--landmarks", "0"]) == 1
    out, err = capsys.readouterr()
    assert "definition: OUTSIDE the tolerance" in out
    assert err == "o1core: error: backend numpy is outside the tolerance of the definition\n"


def test_backend_that_fails(file: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: object) -> None:
        raise RuntimeError("device\nlost")

    monkeypatch.setattr(o1core.Layer, "extend", lost)
    assert refusal(capsys, "run", file, code=1) == "o1core: error: device lost\n"


def test_options_reach_the_layer(file: Path, capsys: Capsys) -> None:
    options = "--landmarks 6 --window 30 --windows 10,20 --sinks 3 --rectifier fm --scale 0.5"
    found = run_json(capsys, "run", file, *options.split(), "--ridge", "1e-4", "--prompt", 99)
    want = o1core.Config(6, 30, 3, "fm", (10, 20), 0.5, 1e-4)
    assert found["config"] == {**want.to_dict(), "windows": [10, 20]}
    assert (found["scale"], found["scale_from"], found["prompt"]) == (0.5, "given", 99)


@pytest.mark.parametrize(("rows", "prompt"), [(1, 0), (260, 65), (3000, 512)])
def test_default_prompt(
    rows: int, prompt: int, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def instead(args: Any, capture: Any, schedule: Any, out: Path | None) -> int:
        asked.append((len(capture.q), schedule.prompt, schedule.chunk, out))
        return 0

    monkeypatch.setattr(cli, "_measure", instead)
    q, k, v = random_rows(1, rows, head_dim=4)
    np.savez(tmp_path / "x.npz", q=q, k=k, v=v)
    assert main(["run", str(tmp_path / "x.npz")]) == 0
    assert asked == [(rows, prompt, 512, None)]
    assert capsys.readouterr() == ("", "")


def test_one_row(tmp_path: Path, capsys: Capsys) -> None:
    q, k, v = layer_rows(1)
    np.savez(tmp_path / "x.npz", q=q, k=k, v=v)
    found = run_json(capsys, "run", tmp_path / "x.npz")
    assert (found["rows"], found["prompt"], found["seal_rows_per_s"]) == (1, 0, 0)
    assert found["o1_error"]["relative_l2"] < 1e-6


def test_zero_values(tmp_path: Path, capsys: Capsys) -> None:
    q, k, v = layer_rows()
    np.savez(tmp_path / "x.npz", q=q, k=k, v=np.zeros_like(v))
    found = run_json(capsys, "run", tmp_path / "x.npz", *SMALL)
    assert found["o1_error"] == {"relative_l2": 0, "mean_relative": 0}


def test_text_report(file: Path, capsys: Capsys) -> None:
    found = run_json(capsys, "run", file, *SMALL)
    assert main(["run", str(file), *SMALL]) == 0
    text, err = capsys.readouterr()
    assert err == ""
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    for name, error in (("O(1), 8 landmarks", "o1_error"), ("sinks + window", "window_error")):
        line = next(x for x in lines if x.startswith(f"  {name}"))
        assert line.split()[-2:] == [f"{x:.4f}" for x in found[error].values()]
    for key in ("state_bytes", "cache_bytes"):
        assert f" {found['memory'][key]:,}\n" in text
    for phrase in (
        "260 rows, 4 heads in 2 groups",
        "backend: numpy on CPU",
        "within the tolerance",
    ):
        assert phrase in text


# run: files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8"])
def test_npz_dtypes(dtype: str, file: Path, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "other.npz"
    save_npz(path, {n: x.astype(dtype) for n, x in zip("qkv", layer_rows(), strict=True)})
    want = run_json(capsys, "run", file, *SMALL)
    got = run_json(capsys, "run", path, *SMALL)
    near = 0.01 if dtype == "<f2" else 1e-5
    assert got["o1_error"] == pytest.approx(want["o1_error"], rel=near)
    assert got["dtype"] == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_safetensors(dtype: type[np.floating[Any]], tmp_path: Path, capsys: Capsys) -> None:
    rows = {n: x.astype(dtype) for n, x in zip("qkv", layer_rows(), strict=True)}
    save_npz(tmp_path / "a.npz", rows)
    save_file(rows, tmp_path / "b.safetensors", {"source": '{"model": "tiny", "scale": 0.25}'})
    a = run_json(capsys, "run", tmp_path / "a.npz", *SMALL, "--scale", "0.25")
    b = run_json(capsys, "run", tmp_path / "b.safetensors", *SMALL)
    assert b["source"] == {"model": "tiny", "scale": 0.25}
    assert (b["scale"], b["scale_from"], b["dtype"]) == (0.25, "file", np.dtype(dtype).name)
    assert a["o1_error"] == b["o1_error"]


def write_safetensors(path: Path, kind: str, arrays: dict[str, Array]) -> None:
    """The format by hand: for dtypes that numpy does not have."""
    header, body = {}, b""
    for name, array in arrays.items():
        end = len(body) + array.nbytes
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(body), end]}
        body += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_safetensors_bfloat16(tmp_path: Path, capsys: Capsys) -> None:
    upper = {
        n: (x.view(np.uint32) >> 16).astype(np.uint16)
        for n, x in zip("qkv", layer_rows(), strict=True)
    }
    write_safetensors(tmp_path / "b.safetensors", "BF16", upper)
    lifted = {n: (x.astype(np.uint32) << 16).view(np.float32) for n, x in upper.items()}
    save_npz(tmp_path / "a.npz", lifted)
    a = run_json(capsys, "run", tmp_path / "a.npz", *SMALL)
    b = run_json(capsys, "run", tmp_path / "b.safetensors", *SMALL)
    assert a["o1_error"] == b["o1_error"]
    assert (a["dtype"], b["dtype"]) == ("float32", "bfloat16")


def test_safetensors_of_integers(tmp_path: Path, capsys: Capsys) -> None:
    save_file({n: np.ones((9, 1, 4), np.int32) for n in "qkv"}, tmp_path / "x.safetensors")
    text = refusal(capsys, "run", tmp_path / "x.safetensors")
    assert "q must be one of F16, BF16, F32, F64, got I32" in text


SOURCE = {"model": "tiny", "layer": 3, "text": "a b", "text_licence": "CC0", "scale": 0.5}


@pytest.mark.parametrize("form", ["string", "bytes"])
def test_source_is_shown(form: str, tmp_path: Path, capsys: Capsys) -> None:
    q, k, v = layer_rows()
    text = json.dumps(SOURCE)
    source = np.array(text) if form == "string" else np.frombuffer(text.encode(), np.uint8)
    np.savez(tmp_path / "x.npz", q=q, k=k, v=v, source=source)
    found = run_json(capsys, "run", tmp_path / "x.npz", *SMALL)
    assert found["source"] == SOURCE
    assert (found["scale"], found["scale_from"]) == (0.5, "file")
    given = run_json(capsys, "run", tmp_path / "x.npz", *SMALL, "--scale", 0.25)
    assert (given["scale"], given["scale_from"]) == (0.25, "given")
    assert main(["run", str(tmp_path / "x.npz"), *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "  model: tiny\n  layer: 3\n  text: a b\n  text licence: CC0\n" in shown
    assert "scale 0.5 (from the file)" in " ".join(shown.split())


@pytest.mark.parametrize("text", ["plain words \x1b[31m\n", '{"scale": NaN}', "[1]"])
def test_source_that_is_no_object(text: str, tmp_path: Path, capsys: Capsys) -> None:
    q, k, v = layer_rows()
    np.savez(tmp_path / "x.npz", q=q, k=k, v=v, source=np.array(text))
    found = run_json(capsys, "run", tmp_path / "x.npz", *SMALL)
    assert (found["source"], found["scale_from"]) == (text, "head_dim")
    assert main(["run", str(tmp_path / "x.npz"), *SMALL]) == 0
    out = capsys.readouterr().out
    assert f"  source: {text.split()[0]}" in out
    assert "\x1b" not in out


def bad_arrays() -> dict[str, tuple[dict[str, Array], str]]:
    """Files that are no layer: `{name: (arrays, what the error says)}`."""
    q, k, v = layer_rows()
    holed, huge = k.copy(), v.copy()
    holed[7, 1, 3] = np.nan
    huge[8, 0, 2] = 1e30
    flipped = {n: x.swapaxes(0, 1) for n, x in (("q", q), ("k", k), ("v", v))}
    return {
        "empty": ({}, "q, k, v missing, it holds nothing"),
        "no-v": ({"q": q, "k": k, "w": v}, "v missing, it holds q, k, w"),
        "swapped": (flipped, "rows and heads look swapped"),
        "q-swapped": ({"q": flipped["q"], "k": k, "v": v}, "must have as many rows each"),
        "dim-swapped": ({"q": q, "k": k.swapaxes(1, 2), "v": v}, "must agree in groups and d"),
        "batch": ({"q": q[None], "k": k[None], "v": v[None]}, "three axes each"),
        "rows": ({"q": q, "k": k[:-1], "v": v}, "must have as many rows each"),
        "groups": ({"q": q[:, :3], "k": k, "v": v}, "heads must be a multiple of groups"),
        "no-rows": ({"q": q[:0], "k": k[:0], "v": v[:0]}, "no empty axis"),
        "nan": ({"q": q, "k": holed, "v": v}, "k must be finite: row 7 holds nan"),
        "huge": ({"q": q, "k": k, "v": huge}, "v must be at most 7.92e+28 in magnitude: row 8"),
        "integers": ({"q": q.astype(int), "k": k, "v": v}, "q must have dtype float16"),
        "objects": ({"q": np.array([[[q]]], object), "k": k, "v": v}, "Object arrays cannot be"),
        "scale": (
            {"q": q, "k": k, "v": v, "source": np.array('{"scale": -1}')},
            "source.scale: scale must be between",
        ),
    }


@pytest.mark.parametrize("case", bad_arrays())
def test_bad_arrays(case: str, tmp_path: Path, capsys: Capsys) -> None:
    arrays, says = bad_arrays()[case]
    save_npz(tmp_path / "x.npz", arrays)
    text = refusal(capsys, "run", tmp_path / "x.npz", "--json")
    assert says in text
    assert "x.npz" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "neither npz nor safetensors"),
        (b"q,k,v\n1,2,3\n", "neither npz nor safetensors"),
        (b"\xff" * 40, "neither npz nor safetensors"),
        (b"PK\x03\x04 but no more than that", "not a readable npz file"),
        (b"\x93NUMPY\x01\x00v\x00", "is a single array"),
    ],
)
def test_files_of_another_kind(content: bytes, says: str, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "x.npz").write_bytes(content)
    assert says in refusal(capsys, "run", tmp_path / "x.npz")


def test_truncated_file(file: Path, capsys: Capsys) -> None:
    file.write_bytes(file.read_bytes()[:-3000])
    assert "not a readable npz file" in refusal(capsys, "run", file)


def test_folder_instead_of_a_file(tmp_path: Path, capsys: Capsys) -> None:
    assert f"{tmp_path}: " in refusal(capsys, "run", tmp_path)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--prompt", "260"], "--prompt must be between 0 and 259"),
        (["--prompt", "-1"], "--prompt must be between 0 and 259"),
        (["--chunk", "0"], "--chunk must be at least 1, got 0"),
        (["--window", "0"], "window must be between 1 and"),
        (["--windows", "5"], "one window for each of the 2 groups, got 1"),
        (["--windows", "5,"], "must be integers separated by commas, got '5,'"),
        (["--sinks", "-1"], "sinks must be between 0 and"),
        (["--landmarks", "3"], "landmarks must be 0 (no far field) or at least 4"),
        (["--scale", "nan"], "scale must be between"),
        (["--ridge", "0"], "ridge must be between"),
        (["--rectifier", "relu"], "invalid choice: 'relu'"),
        (["--device", "7"], "device must be None or 'cpu' for the numpy backend, got 7"),
        (["--backend", "absent", "--no-fallback"], "backend 'absent' cannot be used"),
        (["--out", "x.txt"], "--out must end in .npy or .npz"),
        (["--out", "absent/x.npz"], "there is no folder absent"),
    ],
)
def test_run_refuses(argv: list[str], says: str, file: Path, capsys: Capsys) -> None:
    backend = [] if "--backend" in argv else ["--backend", "numpy"]
    assert says in refusal(capsys, "run", file, *backend, *argv)


def test_input_is_not_overwritten(file: Path, capsys: Capsys) -> None:
    before = file.read_bytes()
    assert "would overwrite the input" in refusal(capsys, "run", file, "--out", file)
    assert file.read_bytes() == before


def test_fallback_is_one_line(file: Path, capsys: Capsys, planned: str) -> None:
    assert main(["run", str(file), *SMALL, "--backend", planned, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["backend"] == "numpy"
    assert err.startswith(f"o1core: warning: numpy took over: backend '{planned}' cannot be used")
    assert err.count("\n") == 1


def test_run_on_a_gpu(file: Path, capsys: Capsys, gpu: Any) -> None:
    found = run_json(capsys, "run", file, *SMALL, "--backend", "wgpu", "--no-fallback")
    assert (found["backend"], found["device"]) == ("wgpu", gpu.name)
    assert 0 < found["agreement"]["worst_of_bound"] < 1
    same = run_json(capsys, "run", file, *SMALL, "--backend", "numpy")
    for error, value in same["o1_error"].items():
        assert found["o1_error"][error] == pytest.approx(value, rel=1e-4)


def test_progress_stays_off_stdout(
    file: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["run", str(file), *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert "exact attention" in err


# demo -----------------------------------------------------------------------------------------


def captures() -> list[str]:
    folder = resources.files("o1core").joinpath("data")
    names = [x.name for x in folder.iterdir()] if folder.is_dir() else []
    return [name for name in names if Path(name).match(cli.DEMO_CAPTURE)]


@pytest.mark.skipif(not captures(), reason=f"o1core/data holds no {cli.DEMO_CAPTURE} to show")
def test_demo(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "DEMO_REPEATS", 2)
    found = run_json(capsys, "demo", "--backend", "numpy")
    assert found["prompt"] == 512
    assert found["rows"] >= 2000
    assert found["source"]["model"]
    parts = found["parts"]
    assert [p["first_row"] for p in parts] == [
        512 + sum(p["rows"] for p in parts[:i]) for i in range(4)
    ]
    assert sum(p["rows"] for p in parts) == found["rows"] - 512
    # How much exact attention slows down is for the reader: a busy machine would fail a test.
    assert all(p["exact_rows_per_s"] > 0 and p["o1_rows_per_s"] > 0 for p in parts)
    assert found["agreement"]["worst_of_bound"] <= 1
    assert found["memory"]["state_bytes"] < found["memory"]["cache_bytes"]


@pytest.mark.skipif(not captures(), reason=f"o1core/data holds no {cli.DEMO_CAPTURE} to show")
def test_demo_text(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "DEMO_REPEATS", 1)
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    for phrase in ("rows/s by position", "error by position", "sinks + window alone", "licence"):
        assert phrase in out


def test_demo_without_its_capture(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "DEMO_CAPTURE", "absent*.npz")
    assert "must hold one capture absent*.npz, found 0" in refusal(capsys, "demo")


# exact attention ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "near"), [(np.float32, 1e-5), (np.float64, 1e-12), (np.float16, 0.02)]
)
def test_exact_attention(dtype: type[np.floating[Any]], near: float) -> None:
    rows = layer_rows(300)
    got = causal_attention(*rows, scale=0.5, dtype=dtype)
    assert got.dtype == dtype
    np.testing.assert_allclose(got, naive(rows, 0.5), rtol=near, atol=near)


@pytest.mark.parametrize("first", [0, 1, 17, 299, 300])
def test_exact_attention_of_the_last_rows(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = layer_rows(300)
    monkeypatch.setattr("o1core.exact.BLOCK_LOGITS", 1)  # many blocks
    got = causal_attention(*rows, scale=0.5, first_row=first)
    assert got.shape == (300 - first, HEADS, VALUE_DIM)
    np.testing.assert_allclose(got, naive(rows, 0.5)[first:], rtol=1e-4, atol=1e-5)


def test_exact_attention_of_large_logits() -> None:
    q, k, v = layer_rows(50)
    got = causal_attention(q * 1000, k * 1000, v, scale=1.0)
    assert np.isfinite(got).all()
    best = np.einsum("d,jd->j", q[-1, 0], k[:, 0]).argmax()
    np.testing.assert_allclose(got[-1, 0], v[best, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, v: (q[0], k, v), "q must have 3 axes"),
        (lambda q, k, v: (q, k[1:], v), "k must have shape"),
        (lambda q, k, v: (q, k, v[:, :1]), "v must have shape"),
        (lambda q, k, v: (q[:, :3], k, v), "a multiple of the 2 groups"),
    ],
)
def test_exact_attention_refuses(change: Callable[..., Rows], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        causal_attention(*change(*layer_rows(20)), scale=1.0)


def test_exact_attention_refuses_rows() -> None:
    with pytest.raises(ValueError, match="first_row must be between 0 and 20, got 21"):
        causal_attention(*layer_rows(20), scale=1.0, first_row=21)
