"""Processor time of picture encoders of common shapes on one thread, op by op.

python -m tests.bench.bench_media_encoders [--layers 2] [--types f16,f32,q8_0]: random weights, 1,024 patches. Seconds
are the thread's own, so that other programs' turns do not count; what they leave in caches does.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np

from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.models.media.encoder import MediaEncoder, read_mmproj
from localinfer.models.media.records import EncoderInput
from localinfer.quant.gguf.reader import read_gguf

SIDE, PATCH, OUTPUT = 448, 14, 64
SHAPES = {
    "SigLIP-400M (Gemma 3)": {"projector": "gemma3", "width": 1152, "inner": 4304, "scale_factor": 4},
    "Qwen2.5-VL": {"projector": "qwen2.5vl_merger", "width": 1280, "inner": 3420, "n_wa_pattern": 8},
}
HEADS, ROUNDS = 16, 5


def write(path: Path, shape: dict[str, Any], layers: int, kind: str) -> None:
    """An mmproj file of a shape with random weights."""
    generator, width, inner = np.random.default_rng(1), shape["width"], shape["inner"]
    is_gated = shape["projector"] != "gemma3"
    writer, prefix = gguf.GGUFWriter(str(path), "clip"), "clip.vision."
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_silu" if is_gated else "clip.use_gelu", True)
    writer.add_string(f"{prefix}projector_type", shape["projector"])
    sizes = {"image_size": SIDE, "patch_size": PATCH, "embedding_length": width, "feed_forward_length": inner}
    sizes |= {"block_count": layers, "projection_dim": OUTPUT, "attention.head_count": HEADS}
    sizes |= {"projector.scale_factor": shape.get("scale_factor", 1), "n_wa_pattern": shape.get("n_wa_pattern", 0)}
    for key, value in sizes.items():
        writer.add_uint32(prefix + key, value)
    writer.add_float32(f"{prefix}attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(prefix + key, [0.5, 0.5, 0.5])

    def add(name: str, *sides: int) -> None:
        values = (generator.standard_normal(sides, dtype=np.float32) * np.float32(sides[-1] ** -0.5)).astype(np.float32)
        if len(sides) != 2 or kind == "f32" or name == "v.position_embd.weight":
            writer.add_tensor(name, values)
        elif kind == "f16" or sides[-1] % 32:
            # Rows of SigLIP's last matrix hold no whole blocks.
            writer.add_tensor(name, values.astype(np.float16))
        else:
            type = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, type), raw_dtype=type)

    add("v.patch_embd.weight", width, 3, PATCH, PATCH)
    add("v.post_ln.weight", width)
    if is_gated:
        add("mm.0.weight", 4 * width, 4 * width)
        add("mm.2.weight", OUTPUT, 4 * width)
    else:
        add("v.position_embd.weight", (SIDE // PATCH) ** 2, width)
        add("mm.soft_emb_norm.weight", width)
        add("mm.input_projection.weight", width, OUTPUT)
    for layer in range(layers):
        name = f"v.blk.{layer}."
        for norm in ("ln1", "ln2"):
            add(f"{name}{norm}.weight", width)
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            add(f"{name}{part}.weight", width, width)
        for part in ("ffn_gate", "ffn_up") if is_gated else ("ffn_up",):
            add(f"{name}{part}.weight", inner, width)
        add(f"{name}ffn_down.weight", width, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def op_seconds(program: CpuProgram) -> tuple[dict[str, float], dict[str, int]]:
    """The least processor time and the multiply-adds per row of each kernel of the last batch."""
    operations = program.operations()
    least = [float("inf")] * len(operations)
    for _ in range(ROUNDS):
        for index in range(len(operations)):
            begin = time.thread_time()
            program.run_operations(index, 1)
            least[index] = min(least[index], time.thread_time() - begin)
    seconds: dict[str, float] = defaultdict(float)
    products: dict[str, int] = defaultdict(int)
    for operation, taken in zip(operations, least, strict=True):
        seconds[operation.kernel] += taken
        products[operation.kernel] += operation.multiply_adds
    return seconds, products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--types", default="f16,f32,q8_0")
    options = parser.parse_args()
    pool = ThreadPool(1)
    pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    patches = (SIDE // PATCH) ** 2
    for name, shape in SHAPES.items():
        for kind in options.types.split(","):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "mmproj.gguf"
                write(path, shape, options.layers, kind)
                with read_gguf(path) as file:
                    encoder = MediaEncoder(read_mmproj(file), file, pool)
            rows = patches // (16 if shape["projector"] == "gemma3" else 4)
            piece = EncoderInput(False, pixels, rows, None, rows)
            encoder.encode(piece)
            whole = []
            for _ in range(ROUNDS):
                begin = time.thread_time()
                encoder.encode(piece)
                whole.append(time.thread_time() - begin)
            assert encoder._pictures is not None and encoder._pictures._body is not None, "a file of pictures"
            program = encoder._pictures._body._program
            assert program is not None, "it has run"
            seconds, products = op_seconds(program)
            print(f"{name}, {kind}, {options.layers} blocks, {patches} patches: {min(whole) * 1e3:.0f} ms")
            for kernel, taken in sorted(seconds.items(), key=lambda entry: -entry[1])[:5]:
                rate = f"{products[kernel] * patches / taken / 1e9:8.1f} G products/s" if products[kernel] else ""
                print(f"  {kernel:28} {taken * 1e3:8.1f} ms {rate}")
            encoder.close()
    pool.close()


if __name__ == "__main__":
    main()
