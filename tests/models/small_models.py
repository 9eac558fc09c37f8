"""A llama so small that the emulated GPU runs it in no time, with random weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCAB, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_SIZE = 40, 32, 32, 2, 1, 16


def write_small_llama(
    path: Path,
    num_layers: int = 2,
    seed: int = 1,
    extra: dict[str, Any] | None = None,
    more: dict[str, tuple[int, ...]] | None = None,
) -> Path:
    """Write one without a tokenizer, of float32 weights, with an output matrix of its own; return its path.

    extra: further metadata, of numbers, bools and text, by keys without `llama.`. more: shapes of further tensors, by
    names without `.weight`.
    """
    writer = _writer(path, num_layers)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (extra or {}).items():
        kinds[type(value)](f"llama.{key}", value)
    shapes = llama_shapes(VOCAB, HIDDEN, FEED_FORWARD, KV_HEADS * HEAD_SIZE, num_layers)
    write_random_tensors(writer, shapes | (more or {}), seed)
    return path


def write_small_mixture(path: Path, num_layers: int = 3, seed: int = 1) -> Path:
    """Write a llama with three experts, of which two are selected, and no dense block; return its path."""
    writer = _writer(path, num_layers)
    writer.add_expert_count(3)
    writer.add_expert_used_count(2)
    shapes = llama_shapes(VOCAB, HIDDEN, FEED_FORWARD, KV_HEADS * HEAD_SIZE, num_layers)
    shapes = {name: shape for name, shape in shapes.items() if name.rpartition(".")[2] not in _DENSE}
    for layer in range(num_layers):
        shapes[f"blk.{layer}.ffn_gate_inp"] = (3, HIDDEN)
        for name in _DENSE:
            shapes[f"blk.{layer}.{name}_exps"] = (3, HIDDEN, FEED_FORWARD)
    write_random_tensors(writer, shapes, seed)
    return path


def write_small_seer(path: Path, num_layers: int = 3, seed: int = 1) -> Path:
    """Write the same as a Qwen 3 VL's decoder: positions on interleaved axes, additions after the first two layers."""
    writer = _writer(path, num_layers, "qwen3vl")
    writer.add_uint32("qwen3vl.n_deepstack_layers", 2)
    writer.add_rope_dimension_sections([4, 2, 2, 0])
    shapes = llama_shapes(VOCAB, HIDDEN, FEED_FORWARD, KV_HEADS * HEAD_SIZE, num_layers)
    for layer in range(num_layers):
        shapes |= {f"blk.{layer}.attn_{name}_norm": (HEAD_SIZE,) for name in "qk"}
    write_random_tensors(writer, shapes, seed)
    return path


def _writer(path: Path, num_layers: int, architecture: str = "llama") -> gguf.GGUFWriter:
    """One that has been given the sizes of a small llama."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(num_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    return writer


_DENSE = ("ffn_gate", "ffn_up", "ffn_down")


def llama_shapes(
    vocab: int, hidden: int, feed_forward: int, kv_size: int, num_layers: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of a llama's weights, by their names in a GGUF file without `.weight`."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocab, hidden),
        "output": (vocab, hidden),
        "output_norm": (hidden,),
    }
    for layer in range(num_layers):
        for name, shape in (
            ("attn_norm", (hidden,)),
            ("attn_q", (hidden, hidden)),
            ("attn_k", (kv_size, hidden)),
            ("attn_v", (kv_size, hidden)),
            ("attn_output", (hidden, hidden)),
            ("ffn_norm", (hidden,)),
            ("ffn_gate", (feed_forward, hidden)),
            ("ffn_up", (feed_forward, hidden)),
            ("ffn_down", (hidden, feed_forward)),
        ):
            shapes[f"blk.{layer}.{name}"] = shape
    return shapes


def write_random_tensors(
    writer: gguf.GGUFWriter,
    shapes: dict[str, tuple[int, ...]],
    seed: int,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Write weights of a size that keeps activations what they are, all metadata, and close the file.

    matrix_type: the type of matrices; vectors are float32.
    """
    rng = np.random.default_rng(seed)
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        values = 1 + values / 10 if name.endswith("norm") else values / np.sqrt(shape[-1])
        stored_type = matrix_type if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(values.astype(np.float32), stored_type)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=stored_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
