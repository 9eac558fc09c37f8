"""A sound file injured at random: it still reads, or is refused by a typed error, cheaply."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import array, entry, gguf, tensor, text, u32

from localinfer.errors import ModelFileError
from localinfer.quant.gguf.reader import read_gguf

MAX_READER_BYTES = 4 << 20
INTERESTING = [0, 1, 7, 8, 9, 31, 2**15, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]


def sound_file() -> bytes:
    floats = np.linspace(-1, 1, 64, dtype=np.float32).tobytes()
    tokens = b"".join(text(token) for token in ["<s>", "a", "日本", "<0x0A>"])
    keys = [
        entry("general.architecture", 8, text("llama")),
        entry("general.alignment", 4, u32(32)),
        entry("llama.block_count", 4, u32(1)),
        entry("llama.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
        entry("tokenizer.ggml.tokens", 9, array(8, tokens, 4)),
        entry("tokenizer.ggml.scores", 9, array(6, floats[:16], 4)),
        entry("tokenizer.ggml.token_type", 9, array(5, u32(1) * 4, 4)),
        entry("tokenizer.ggml.add_bos_token", 7, b"\1"),
        entry("tokenizer.chat_template", 8, text("{{ messages }}")),
    ]
    tensors = [
        tensor("token_embd.weight", [8, 4]),
        tensor("blk.0.ffn_up.weight", [32, 2], 2, 128),
        tensor("output_norm.weight", [8], 0, 192),
    ]
    return gguf(keys, tensors, floats[:224])


def injure(content: bytes, generator: np.random.Generator) -> bytes:
    """Return the file with one to three small injuries."""
    changed = bytearray(content)
    for _ in range(int(generator.integers(1, 4))):
        where = int(generator.integers(0, len(changed)))
        length = int(generator.integers(1, 9))
        match generator.integers(0, 6):
            case 0:
                changed[where] ^= 1 << int(generator.integers(0, 8))
            case 1:
                changed[where:where] = generator.bytes(length)
            case 2 if len(changed) > 8:
                del changed[where : where + length]
            case 3:
                changed[where : where + length] = generator.bytes(length)
            case 4 if generator.random() < 0.2:
                del changed[where + 1 :]
            case _:
                width = int(generator.choice([4, 8]))
                value = INTERESTING[int(generator.integers(0, len(INTERESTING)))]
                changed[where : where + width] = (value % 256**width).to_bytes(width, "little")
    return bytes(changed)


def read_everything(path: Path) -> int:
    """Read what a file holds; return how many values of its metadata are refused."""
    num_refused = 0
    with read_gguf(path) as model:
        for info in model.tensors.values():
            assert len(model.tensor_bytes(info.name).tobytes()) == info.num_bytes
        for key in model.metadata:
            try:
                model.metadata[key]
            except ModelFileError:
                num_refused += 1
    return num_refused


def test_sound_file_of_the_fuzz_reads(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    path.write_bytes(sound_file())
    assert read_everything(path) == 0


@pytest.mark.parametrize("seed", range(4))
def test_injured_file_reads_or_is_refused(tmp_path: Path, seed: int) -> None:
    """Injured files; any other exception, or a large allocation, fails the test."""
    generator = np.random.default_rng(seed)
    content = sound_file()
    path = tmp_path / "injured.gguf"
    num_refused = 0
    tracemalloc.start()
    try:
        for _ in range(250):
            path.write_bytes(injure(content, generator))
            try:
                read_everything(path)
            except ModelFileError:
                num_refused += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_READER_BYTES
    assert 25 < num_refused < 250


@pytest.mark.parametrize("stop", range(24))
def test_every_prefix_of_a_file_is_refused(tmp_path: Path, stop: int) -> None:
    content = sound_file()
    path = tmp_path / "short.gguf"
    for length in range(stop, len(content), 24):
        path.write_bytes(content[:length])
        with pytest.raises(ModelFileError):
            read_gguf(path)
