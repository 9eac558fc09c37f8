"""Good model files, and copies of them with one thing broken."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.loading.options import model_path
from localinfer.models.checks import Finding
from localinfer.models.checks.quick import KnownModel, check_loaded, known_models
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.load.loader import open_model_file, read_config, read_tokenizer
from localinfer.models.text.vocabulary import KINDS
from localinfer.quant.formats.types import TensorRecord
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, copy_values, encode_value
from localinfer.types import FloatArray
from tests.models.small_models import write_small_llama

Change = Callable[[FloatArray], FloatArray | None]


def demo() -> Path:
    """The bundled model: byte-level BPE, a ChatML template, matrices of several types."""
    return model_path(None)


def small_llama(folder: Path) -> Path:
    """Four layers of float32 weights, without a vocabulary."""
    path = folder / "small.gguf"
    return path if path.exists() else write_small_llama(path, num_layers=4)


def edited(
    good: Path,
    broken: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    changes: Mapping[str, Change] | None = None,
    renames: Callable[[str], str | None] = lambda name: name,
) -> Path:
    """Write a copy of a file with other settings and tensors.

    without: settings that are left out. changes: of float32 tensors, in place or by what is returned. renames: a
    tensor's new name, None to leave it out.
    """
    with read_gguf(good) as file:
        values = {key: value for key, value in copy_values(file.metadata).items() if key not in without}
        values |= {key: encode_value(value) for key, value in (settings or {}).items()}
        kept = [(new, one) for one in file.tensors.values() if (new := renames(one.name)) is not None]
        records = [TensorRecord(new, one.type, one.shape) for new, one in kept]
        with GGUFWriter(broken, values, records) as writer:
            for _, one in kept:
                data = file.tensor_bytes(one.name)
                if changes and one.name in changes:
                    weights = data.view(np.float32).reshape(one.shape).copy()
                    found = changes[one.name](weights)
                    data = np.ascontiguousarray(weights if found is None else found, np.float32).view(np.uint8)
                writer.write(data.reshape(-1))
    return broken


def findings_of(path: Path) -> list[Finding]:
    """What a load finds, without loading."""
    file = open_model_file(path)
    try:
        config = read_config(file)
        tokenizer = None
        if file.metadata.get("tokenizer.ggml.model") in KINDS:
            tokenizer = read_tokenizer(file)
        return list(check_loaded(file, config, tokenizer))
    finally:
        file.close()


def all_known(architecture: str = "") -> list[KnownModel]:
    """Every known model, or those of one architecture."""
    return [one for group in known_models().values() for one in group if architecture in ("", one.architecture)]


def sized_config(
    architecture: str,
    sizes: tuple[int, int, int, int],
    context_length: int,
    *,
    base: float | None = None,
    epsilon: float = 1e-5,
    more: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], ModelConfig]:
    """The metadata and the configuration of a model of a size, of which there are no weights.

    sizes: layers, width, width of the feed-forward blocks, tokens. more: settings by their keys without the
    architecture.
    """
    num_layers, width, feed_forward, vocab_size = sizes
    alike = [
        one
        for one in all_known(architecture)
        if (one.num_layers, one.hidden_size, one.intermediate_size) == (num_layers, width, feed_forward)
    ]
    known = min(alike, key=lambda one: abs(one.vocab_size - vocab_size), default=None)
    num_heads, num_kv_heads = (known.num_heads, known.num_kv_heads) if known else (width // 64, width // 64)
    settings: dict[str, Any] = {
        "block_count": num_layers,
        "embedding_length": width,
        "feed_forward_length": feed_forward,
        "context_length": context_length,
        "attention.head_count": num_heads,
        "attention.head_count_kv": num_kv_heads,
        "attention.layer_norm_rms_epsilon": epsilon,
    }
    if base is not None:
        settings["rope.freq_base"] = base
    settings |= more or {}
    metadata = {"general.architecture": architecture, **{f"{architecture}.{key}": v for key, v in settings.items()}}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, width)}
    keys = num_kv_heads * (width // num_heads)
    for layer in range(num_layers):
        rows = {"q": width, "k": keys, "v": keys, "output": width}
        shapes |= {f"blk.{layer}.attn_{name}.weight": (count, width) for name, count in rows.items()}
    return metadata, ModelConfig.from_metadata(metadata, shapes)
