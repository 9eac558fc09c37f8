"""Encoders of pictures and text models before them, in the shapes of models that people run, with random weights."""

from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
from numpy.typing import NDArray

PATCH = 14
ENCODERS: dict[str, dict[str, Any]] = {
    "SigLIP-400M (Gemma 3)": {"projector": "gemma3", "width": 1152, "inner": 4304, "layers": 27, "scale_factor": 4},
    "Qwen2.5-VL": {
        "projector": "qwen2.5vl_merger", "width": 1280, "inner": 3420, "layers": 32, "n_wa_pattern": 8,
    },
}  # fmt: skip
"""Of 16 heads."""
TEXTS: dict[str, dict[str, Any]] = {
    # Of Gemma 3 4B's width with 12 of its 34 layers.
    "SigLIP-400M (Gemma 3)": {
        "arch": "gemma3", "width": 2560, "inner": 10240, "layers": 12, "heads": 8, "kv_heads": 4, "head": 256,
        "specials": ("<start_of_image>", "<end_of_image>"),
    },
    # Of Qwen2.5-VL-3B's width with 14 of its 36 layers.
    "Qwen2.5-VL": {
        "arch": "qwen2vl", "width": 2048, "inner": 11008, "layers": 14, "heads": 16, "kv_heads": 2, "head": 128,
        "specials": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    },
}  # fmt: skip
"""Of 1.1 to 1.2 billion weights, most of them in Q4_K."""
_POOL = 1 << 21
_Q4_K_BYTES, _Q4_K_COLUMNS = 144, 256


class RandomFile:
    """A GGUF file of random matrices, the same numbers in every two million."""

    def __init__(self, path: Path, architecture: str, seed: int = 1) -> None:
        self.writer = gguf.GGUFWriter(str(path), architecture)
        self._random = np.random.default_rng(seed)
        self._normal = self._random.standard_normal(_POOL, dtype=np.float32)
        self._pools: dict[tuple[str, int], NDArray[Any]] = {}

    def add(self, name: str, kind: str, *sides: int) -> None:
        """Add a tensor of a type; a vector is the weight of a norm, or a bias, in float32."""
        if len(sides) == 1:
            center = 0.0 if name.endswith("bias") else 1.0
            values = center + 0.1 * self._random.standard_normal(sides)
            self.writer.add_tensor(name, values.astype(np.float32))
            return
        columns = sides[-1] if len(sides) == 2 else int(np.prod(sides[1:]))
        is_plain = kind in ("F32", "F16")
        shape = sides if is_plain else (sides[0], gguf.quants.quant_shape_to_byte_shape(sides, _type(kind))[-1])
        # From another place of it each time: layers that are copies of each other are a damaged file.
        pool, block = self._pool(kind, columns), 1 if is_plain else gguf.GGML_QUANT_SIZES[_type(kind)][1]
        start = block * int(self._random.integers(len(pool) // block))
        data = np.resize(np.roll(pool, -start), int(np.prod(shape))).reshape(shape)
        self.writer.add_tensor(name, data, raw_dtype=None if is_plain else _type(kind))

    def finish(self) -> None:
        """Write all of it."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def _pool(self, kind: str, columns: int) -> NDArray[Any]:
        if (kind, columns) not in self._pools:
            values = self._normal * np.float32(columns**-0.5)
            if kind == "Q4_K":
                self._pools[kind, columns] = self._q4_k(columns)
            elif kind == "Q8_0":
                rows = values.reshape(-1, 32)
                self._pools[kind, columns] = gguf.quants.quantize(rows, _type(kind)).reshape(-1)
            else:
                self._pools[kind, columns] = values.astype(np.float16 if kind == "F16" else np.float32)
        return self._pools[kind, columns]

    def _q4_k(self, columns: int) -> NDArray[np.uint8]:
        """Blocks of random codes and scales whose products keep about the size of what they multiply."""
        blocks = self._random.integers(0, 256, (_POOL // _Q4_K_COLUMNS, _Q4_K_BYTES), np.uint8)
        # A weight is d * scale * code - dmin * minimum, of six bits, four and six.
        scale = columns**-0.5 / 300
        blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
        return blocks.reshape(-1)


def _type(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind]


def write_encoder(path: Path, name: str, kind: str, *, side: int, output: int, layers: int = 0) -> None:
    """Write an mmproj file of a shape of `ENCODERS`, of fewer layers if asked.

    kind: F32, F16 or Q8_0, of matrices whose rows hold whole blocks; others are in F16 then, as convertors leave them.
    side: pixels of the pictures of a family that has one size. output: width of the text model.
    """
    shape = ENCODERS[name]
    width, inner = shape["width"], shape["inner"]
    is_gated = shape["projector"] != "gemma3"
    file, prefix = RandomFile(path, "clip"), "clip.vision."
    writer, layers = file.writer, layers or shape["layers"]
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_silu" if is_gated else "clip.use_gelu", True)
    writer.add_string(f"{prefix}projector_type", shape["projector"])
    sizes = {"image_size": side, "patch_size": PATCH, "embedding_length": width, "feed_forward_length": inner}
    sizes |= {"block_count": layers, "projection_dim": output, "attention.head_count": 16}
    sizes |= {"projector.scale_factor": shape.get("scale_factor", 1), "n_wa_pattern": shape.get("n_wa_pattern", 0)}
    for key, value in sizes.items():
        writer.add_uint32(prefix + key, value)
    writer.add_float32(f"{prefix}attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(prefix + key, [0.5, 0.5, 0.5])

    def linear(tensor: str, rows: int, columns: int, *, has_bias: bool = True) -> None:
        file.add(f"{tensor}.weight", "F16" if kind == "Q8_0" and columns % 32 else kind, rows, columns)
        if has_bias:
            file.add(f"{tensor}.bias", "F32", rows)

    def norm(tensor: str) -> None:
        file.add(f"{tensor}.weight", "F32", width)
        if not is_gated:
            file.add(f"{tensor}.bias", "F32", width)

    patches = "F32" if kind == "F32" else "F16"
    file.add("v.patch_embd.weight", patches, width, 3, PATCH, PATCH)
    norm("v.post_ln")
    if is_gated:
        file.add("v.patch_embd.weight.1", patches, width, 3, PATCH, PATCH)
        linear("mm.0", 4 * width, 4 * width)
        linear("mm.2", output, 4 * width)
    else:
        file.add("v.patch_embd.bias", "F32", width)
        file.add("v.position_embd.weight", "F32", (side // PATCH) ** 2, width)
        file.add("mm.soft_emb_norm.weight", "F32", width)
        file.add("mm.input_projection.weight", patches, width, output)
    for layer in range(layers):
        block = f"v.blk.{layer}."
        norm(f"{block}ln1")
        norm(f"{block}ln2")
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            linear(f"{block}{part}", width, width)
        for part in ("ffn_gate", "ffn_up") if is_gated else ("ffn_up",):
            linear(f"{block}{part}", inner, width)
        linear(f"{block}ffn_down", width, inner)
    file.finish()


def write_text_model(path: Path, name: str, *, layers: int = 0) -> None:
    """Write a text model of a shape of `TEXTS`, whose vocabulary is of bytes and what stands around a picture."""
    shape = TEXTS[name]
    arch, width, inner, head = shape["arch"], shape["width"], shape["inner"], shape["head"]
    heads, kv_heads, layers = shape["heads"], shape["kv_heads"], layers or shape["layers"]
    file = RandomFile(path, arch)
    writer, is_gemma = file.writer, arch == "gemma3"
    tokens = [*_byte_characters(), "th", "<|bos|>", "<|eos|>", *shape["specials"]]
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(8192)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if is_gemma:
        writer.add_sliding_window(1024)
    else:
        writer.add_array(f"{arch}.rope.dimension_sections", [16, 24, 24, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * (len(tokens) - 257))
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_add_bos_token(is_gemma)
    file.add("token_embd.weight", "F16", len(tokens), width)
    file.add("output_norm.weight", "F32", width)
    if not is_gemma:
        file.add("output.weight", "F16", len(tokens), width)
    for layer in range(layers):
        block = f"blk.{layer}."
        norms = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if is_gemma else [])
        for part in norms:
            file.add(f"{block}{part}.weight", "F32", width)
        for part in ("attn_q_norm", "attn_k_norm") if is_gemma else ():
            file.add(f"{block}{part}.weight", "F32", head)
        for part, rows in (("attn_q", heads * head), ("attn_k", kv_heads * head), ("attn_v", kv_heads * head)):
            file.add(f"{block}{part}.weight", "Q4_K", rows, width)
            if not is_gemma:
                file.add(f"{block}{part}.bias", "F32", rows)
        for part, rows, columns in (
            ("attn_output", width, heads * head),
            ("ffn_gate", inner, width),
            ("ffn_up", inner, width),
            ("ffn_down", width, inner),
        ):
            file.add(f"{block}{part}.weight", "Q4_K", rows, columns)
    file.finish()


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a vocabulary of bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]
