"""Quantize the encoders of a model that sees or hears (an mmproj file), and measure what their embeddings lose.

Products inside the blocks, which are nearly all weights, become Q8_0. What decides much and weighs little stays half or
single precision: the products with pixels, tables of positions, convolutions, norms, biases and the projector, whose
output is what the text model reads. Fewer than 8 bits are refused: the rows of a picture are few, and every layer of
the text model reads each error in them.
"""

import contextlib
import os
import re
from pathlib import Path

import numpy as np

from localinfer.errors import RequestError
from localinfer.kernels.cpu.encoding import ENCODERS, prepare_encoders
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models.load.threads import available_threads, checked_threads
from localinfer.models.media.encoder import MediaEncoder, read_mmproj
from localinfer.models.media.mmproj import ARCHITECTURE
from localinfer.models.media.picture_layouts import lay_out
from localinfer.models.media.records import EncoderInput
from localinfer.models.media.spectrograms import lay_out_sound
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.encoding import can_hold
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.methods.presets import Preset, TypeChoice, find_preset
from localinfer.quant.pipeline.quantize import QuantizedModel, check_target, quantize_model
from localinfer.system.files import check_output
from localinfer.types import ProgressCallback

DEFAULT_TYPE = "Q8_0"
_TYPES = ("Q8_0", "F16", "BF16")
_PRODUCT = re.compile(r"[va]\.blk\.\d+\.(attn_\w+|ffn_\w+|conv_pw\d|linear_pos)\.weight")
"""Matrices that become blocks."""
_SIDES = ((320, 240), (500, 700))
"""Widths and heights of the pictures that the loss is measured on."""
_SECONDS, _RATE = 2, 16000


def is_encoders(source: str | os.PathLike[str]) -> bool:
    """True for a file of encoders. Raises: ModelFileError for a file that is no GGUF."""
    if os.path.isdir(source):
        return False
    with read_gguf(source) as file:
        return file.metadata.get("general.architecture") == ARCHITECTURE


def quantize_encoders(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    type: str = DEFAULT_TYPE,
    threads: int | None = None,
    progress: ProgressCallback | None = None,
) -> QuantizedModel:
    """Write a file of encoders with quantized products; see the module for which.

    type: Q8_0, F16 or BF16. threads: None for the physical cores; the bytes do not depend on it.
    Raises: RequestError for another type, ModelFileError.
    """
    preset = find_preset(type)
    if preset.name not in _TYPES:
        raise RequestError(f"type is {type}, with which encoders lose too much; take one of {', '.join(_TYPES)}")
    with read_gguf(source) as file:
        read_mmproj(file)
        check_target(file, Path(target))
        check_output(target, inputs=file.paths)
        choices = {name: _choice(record, preset) for name, record in file.tensors.items()}
        names = sorted({choice.type.name for choice in choices.values()} & ENCODERS.keys())
        prepare_encoders(names, progress)
        with contextlib.closing(ThreadPool(_count(threads))) as pool:
            return quantize_model(file, target, preset, pool, choices=choices, progress=progress)


def embedding_loss(
    base: str | os.PathLike[str], candidate: str | os.PathLike[str], *, threads: int | None = None
) -> float:
    """Return the normalized squared error of a file's embeddings from another's, of pictures and sounds made here.

    They are smooth shapes with noise, and tones. Raises: ModelFileError; RequestError for files of different families.
    """
    with (
        contextlib.closing(ThreadPool(_count(threads))) as pool,
        read_gguf(base) as first,
        read_gguf(candidate) as second,
    ):
        error = size = 0.0
        for piece in _inputs(first):
            wanted, found = (_embeddings(file, piece, pool) for file in (first, second))
            if wanted.shape != found.shape:
                raise RequestError(
                    f"{candidate} makes embeddings of shape {found.shape}, and {base} {wanted.shape}; give files of "
                    "one model"
                )
            error += float(np.square(found - wanted).sum())
            size += float(np.square(wanted).sum())
    return error / size if size else 0.0


def _count(threads: int | None) -> int:
    return available_threads() if threads is None else checked_threads(threads)


def _choice(record: TensorRecord, preset: Preset) -> TypeChoice:
    wanted = record.type
    if len(record.shape) == 2 and _PRODUCT.fullmatch(record.name):
        wanted = preset.default
    elif len(record.shape) == 2 and record.type is not TensorType.F32:
        wanted = TensorType.F16
    fitting = wanted if can_hold(wanted, record.shape[-1]) else TensorType.F16
    return TypeChoice(fitting, wanted)


def _inputs(file: ModelFile) -> list[EncoderInput]:
    config = read_mmproj(file)
    rng = np.random.default_rng(1)
    pieces: list[str | EncoderInput] = []
    for width, height in _SIDES if config.picture is not None else ():
        down, across = np.mgrid[:height, :width]
        waves = [np.sin(across / (9 + 20 * channel)) * np.cos(down / (31 - 9 * channel)) for channel in range(3)]
        values = 128 + 90 * np.stack(waves, -1) + rng.normal(0, 8, (height, width, 3))
        pieces += lay_out(np.clip(values, 0, 255).astype(np.uint8), config).pieces
    if config.sound is not None:
        seconds = np.arange(_SECONDS * _RATE) / _RATE
        tones = 0.3 * np.sin(2 * np.pi * 220 * seconds * (1 + seconds)) + rng.normal(0, 0.02, seconds.size)
        pieces += lay_out_sound(tones.astype(np.float32), config).pieces
    return [piece for piece in pieces if not isinstance(piece, str)]


def _embeddings(
    file: ModelFile, piece: EncoderInput, pool: ThreadPool
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    encoder = MediaEncoder(read_mmproj(file), file, pool)
    try:
        return encoder.encode(piece).copy()
    finally:
        encoder.close()
