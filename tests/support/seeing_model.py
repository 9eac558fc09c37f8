"""Tiny mmproj files for any text model, so that every interface can be tried with pictures and sounds alone."""

import io
import wave
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
from PIL import Image

from localinfer.loading.options import model_path
from localinfer.quant.gguf.reader import read_gguf

IMAGE_SIZE, PATCH_SIZE, WIDTH = 42, 14, 32
PICTURE_ROWS = (IMAGE_SIZE // PATCH_SIZE) ** 2
"""Rows of every picture, in whatever size it comes."""
SAMPLE_RATE, SAMPLES_A_ROW = 16_000, 640


def write_mmproj(path: Path, text_width: int, seed: int = 1, kind: str = "F32") -> Path:
    """Write an encoder of two blocks with random weights and LLaVA's projector, whose rows are `text_width` wide.

    kind: type of its matrices.
    """
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    sizes = {
        "embedding_length": WIDTH,
        "feed_forward_length": 2 * WIDTH,
        "block_count": 3,
        "projection_dim": text_width,
        "attention.head_count": 4,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.25, 0.75])
    rng = np.random.default_rng(seed)
    for name, shape in _shapes(text_width).items():
        scale = 0.1 if len(shape) == 1 else 1 / np.sqrt(np.prod(shape[1:]))
        center = 1.0 if name.endswith(("ln.weight", "ln1.weight", "ln2.weight")) else 0.0
        values = (center + scale * rng.standard_normal(shape)).astype(np.float32)
        if len(shape) != 2 or kind == "F32":
            writer.add_tensor(name, values)
        else:
            type = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_sound_mmproj(path: Path, text_width: int, seed: int = 1) -> Path:
    """Write the smallest file that hears: Gemma 4's without an encoder, where 640 samples are a row."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_audio_encoder", True)
    writer.add_string("clip.projector_type", "gemma4ua")
    for key in ("embedding_length", "feed_forward_length", "projection_dim", "attention.head_count", "num_mel_bins"):
        writer.add_uint32(f"clip.audio.{key}", 1)
    writer.add_uint32("clip.audio.block_count", 0)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    weights = np.random.default_rng(seed).standard_normal((text_width, SAMPLES_A_ROW)) / SAMPLES_A_ROW**0.5
    writer.add_tensor("mm.a.input_projection.weight", weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(text_width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "v.class_embd": (WIDTH,),
        "v.patch_embd.weight": (WIDTH, 3, PATCH_SIZE, PATCH_SIZE),
        "v.position_embd.weight": (PICTURE_ROWS + 1, WIDTH),
    }
    matrices = {"mm.0": (text_width, WIDTH), "mm.2": (text_width, text_width)}
    norms = ["v.pre_ln"]
    for index in range(3):
        block = f"v.blk.{index}"
        matrices |= {f"{block}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        matrices |= {f"{block}.ffn_up": (2 * WIDTH, WIDTH), f"{block}.ffn_down": (WIDTH, 2 * WIDTH)}
        norms += [f"{block}.ln1", f"{block}.ln2"]
    for name, shape in matrices.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    return shapes


def seeing_demo(folder: Path) -> Path:
    """A copy of the demo model with such a file beside it, under the name by which it is found."""
    return _demo_with(folder, write_mmproj)


def hearing_demo(folder: Path) -> Path:
    """The same with a file that hears."""
    return _demo_with(folder, write_sound_mmproj)


def _demo_with(folder: Path, write: Callable[[Path, int], Path]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "demo-f16.gguf"
    if not model.exists():
        model.write_bytes(model_path(None).read_bytes())
        with read_gguf(model) as file:
            width = file.metadata[f"{file.metadata['general.architecture']}.embedding_length"]
        write(folder / "mmproj-demo-f16.gguf", width)
    return model


def picture_file(seed: int = 0, width: int = 60, height: int = 40) -> bytes:
    """The bytes of a PNG file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def sound_file(num_rows: int = 5, seed: int = 0) -> bytes:
    """The bytes of a WAV file of noise that becomes so many rows."""
    samples = np.random.default_rng(seed).integers(-9000, 9000, num_rows * SAMPLES_A_ROW, np.int16)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()
