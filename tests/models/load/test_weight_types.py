"""A small Llama in every weight type, through the public API: near the oracle, and the same bits however it runs."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.kernels.layouts import GGUF_LAYOUTS
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_decoder
from localinfer.quant.formats.reference_encoders import ENCODABLE_TYPES, quantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from tests.support.oracle import NumpyProgram, NumpyWeights

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD, VOCAB = 256, 256, 4, 2, 64, 251
ROWS = {"attn_q": HEADS * HEAD, "attn_k": KV_HEADS * HEAD, "attn_v": KV_HEADS * HEAD} | dict.fromkeys(
    ("ffn_gate", "ffn_up"), INTERMEDIATE
)
MATRICES = {name: (rows, HIDDEN) for name, rows in ROWS.items()}
MATRICES |= {"attn_output": (HIDDEN, HEADS * HEAD), "ffn_down": (HIDDEN, INTERMEDIATE)}
ENCODED = [type for type in ENCODABLE_TYPES if type.name in {layout.name for layout in GGUF_LAYOUTS}]
"""Types with an encoder; `test_every_type.py` has the others."""
TOKEN_IDS = np.random.default_rng(4).integers(0, VOCAB, 41).astype(np.int32)


def write_model(path: Path, type: TensorType) -> None:
    """Two layers of random weights, every matrix and the tied embedding in `type`."""
    generator = np.random.default_rng(9)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)

    # Encoding takes longest, so both layers have the same matrices, of the same rows in other orders.
    values = (generator.standard_normal((HIDDEN, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)
    rows = quantize(values, type).reshape(HIDDEN, -1)

    def encoded(shape: tuple[int, int]) -> NDArray[np.uint8]:
        return rows[generator.permutation(HIDDEN)[: shape[0]]]

    matrices = {name: encoded(shape) for name, shape in MATRICES.items()}
    raw_type = gguf.GGMLQuantizationType[type.name]
    writer.add_tensor("token_embd.weight", encoded((VOCAB, HIDDEN)), raw_dtype=raw_type)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", 1 + 0.1 * generator.standard_normal(HIDDEN, np.float32))
        for name, raw in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", raw, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def oracle_logits(path: Path) -> np.ndarray:
    """What the weights in the file give in NumPy, with exact activations."""
    with read_gguf(path) as file:
        config = ModelConfig.from_metadata(file.metadata, {name: info.shape for name, info in file.tensors.items()})
    program = NumpyProgram(write_decoder(config, NumpyWeights(path)))
    pages = np.arange(1, 5, dtype=np.int64)
    rows = np.arange(len(TOKEN_IDS), dtype=np.int32)
    return program.run(Batch(TOKEN_IDS, [Segment(0, len(TOKEN_IDS), pages)], rows))


@pytest.mark.parametrize("type", ENCODED, ids=lambda type: type.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_model_in_every_weight_type_is_right_and_the_same_bits_in_any_batch(type: TensorType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, type)
    wanted = oracle_logits(path)
    results = []
    for threads in (1, 2):
        with localinfer.load(path, threads=threads, kv_type="f32") as llm:
            whole = llm.logits(TOKEN_IDS)
            results.append(whole)
            for length in ((1, 40), (7,))[threads - 1]:
                np.testing.assert_array_equal(llm.logits(TOKEN_IDS[:length]), whole[:length])
            greedy = [llm.complete(TOKEN_IDS[:9].tolist(), max_tokens=12, temperature=0).token_ids for _ in range(2)]
            assert greedy[0] == greedy[1]
            # One token at a time is what decoding does: its choices must be those of the logits computed at once.
            sequence = [*TOKEN_IDS[:9].tolist(), *greedy[0]]
            assert llm.logits(sequence)[8:-1].argmax(axis=1).tolist() == list(greedy[0])
    np.testing.assert_array_equal(results[0], results[1])
    error = np.linalg.norm(results[0] - wanted) / np.linalg.norm(wanted)
    # Activations rounded to int8 in every product of two layers; float layouts round nothing.
    assert error <= (1e-5 if type in (TensorType.F32, TensorType.F16, TensorType.BF16) else 4e-2)
