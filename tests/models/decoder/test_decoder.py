"""What `write_decoder` refuses, and what it leaves to the file."""

from collections.abc import Mapping

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.kernels.ops import EmbeddingTable, LinearWeight
from localinfer.kernels.program import Batch, Segment
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes, write_decoder
from localinfer.types import FloatArray
from tests.support.oracle import NumpyProgram

HIDDEN, FEED_FORWARD, VOCAB, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 24, 40, 13, 2, 3, 1, 8
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": NUM_LAYERS,
    "llama.context_length": 32,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FEED_FORWARD,
    "llama.attention.head_count": NUM_HEADS,
    "llama.attention.head_count_kv": NUM_KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


class ArrayWeights:
    """`WeightSource` over arrays in memory."""

    def __init__(self, arrays: Mapping[str, FloatArray]) -> None:
        self._arrays = arrays

    def has(self, name: str) -> bool:
        return name in self._arrays

    def shape(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].shape

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        values = self._arrays[name].astype(np.float64)
        values = values if rows is None else values[rows]
        return LinearWeight(name, values.shape[0], values.shape[1], values)

    def embedding(self, name: str) -> EmbeddingTable:
        values = self._arrays[name].astype(np.float64)
        return EmbeddingTable(name, values.shape[0], values.shape[1], values)

    def vector(self, name: str) -> FloatArray:
        return self._arrays[name]


def arrays() -> dict[str, FloatArray]:
    """Random weights of a tiny llama with tied embeddings."""
    sizes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        block = {
            "attn_norm": (HIDDEN,),
            "attn_q": (NUM_HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, NUM_HEADS * HEAD_DIM),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FEED_FORWARD, HIDDEN),
            "ffn_up": (FEED_FORWARD, HIDDEN),
            "ffn_down": (HIDDEN, FEED_FORWARD),
        }
        sizes.update({f"blk.{layer}.{name}.weight": size for name, size in block.items()})
    rng = np.random.default_rng(7)
    return {name: rng.standard_normal(size, dtype=np.float32) for name, size in sizes.items()}


def logits(values: Mapping[str, FloatArray], token_ids: list[int], output_rows: list[int]) -> FloatArray:
    """Logits of one sequence from an empty cache."""
    config = ModelConfig.from_metadata(METADATA, {name: array.shape for name, array in values.items()})
    program = NumpyProgram(write_decoder(config, ArrayWeights(values)))
    segment = Segment(0, len(token_ids), np.array([1], dtype=np.int64))
    return program.run(Batch(np.array(token_ids, np.int32), [segment], np.array(output_rows, np.int32)))


def test_every_missing_tensor_is_named() -> None:
    complete = arrays()
    for name in complete:
        values = {key: value for key, value in complete.items() if key != name}
        with pytest.raises(CorruptFileError, match=name.replace(".", r"\.")):
            logits(values, [1], [0])


def test_every_tensor_of_the_wrong_shape_is_noticed() -> None:
    """By its own name, by the key that it contradicts, or by the first tensor of the block that disagrees with it."""
    complete = arrays()
    for name, value in complete.items():
        with pytest.raises(CorruptFileError, match=rf"{name}|embedding_length|attention\.head_count|ffn_gate"):
            logits({**complete, name: value[..., :-1]}, [1], [0])


def test_tensors_that_no_one_asks_for_are_ignored() -> None:
    plain = logits(arrays(), [1, 2, 3], [2])
    stray = {"blk.0.attn_q_norm.weight": np.ones(HEAD_DIM, np.float32), "blk.9.x": np.ones(1, np.float32)}
    np.testing.assert_array_equal(logits({**arrays(), **stray}, [1, 2, 3], [2]), plain)


def test_a_model_without_output_weights_shares_those_of_its_embedding() -> None:
    tied = logits(arrays(), [1, 2], [1])
    untied = {**arrays(), "output.weight": arrays()["token_embd.weight"]}
    np.testing.assert_array_equal(logits(untied, [1, 2], [1]), tied)


def test_only_the_rows_asked_for_are_returned_in_their_order() -> None:
    everything = logits(arrays(), [4, 5, 6, 7], [0, 1, 2, 3])
    np.testing.assert_array_equal(logits(arrays(), [4, 5, 6, 7], [3, 1]), everything[[3, 1]])
    assert logits(arrays(), [4, 5, 6, 7], []).shape == (0, VOCAB)


def test_sequences_of_one_batch_do_not_see_each_other() -> None:
    values = arrays()
    config = ModelConfig.from_metadata(METADATA, {name: array.shape for name, array in values.items()})
    program = NumpyProgram(write_decoder(config, ArrayWeights(values)))
    segments = [Segment(0, 3, np.array([1], np.int64)), Segment(0, 2, np.array([2], np.int64))]
    found = program.run(Batch(np.array([1, 2, 3, 9, 8], np.int32), segments, np.arange(5, dtype=np.int32)))
    np.testing.assert_allclose(found[:3], logits(values, [1, 2, 3], [0, 1, 2]), rtol=1e-6)
    np.testing.assert_allclose(found[3:], logits(values, [9, 8], [0, 1]), rtol=1e-6)


def test_the_cache_keeps_keys_and_values_of_every_layer() -> None:
    config = ModelConfig.from_metadata(METADATA, {name: array.shape for name, array in arrays().items()})
    shapes = kv_layer_shapes(config)
    assert [(s.num_kv_heads, s.key_size, s.value_size) for s in shapes] == [(1, 8, 8)] * NUM_LAYERS


def refused(values: Mapping[str, FloatArray], error: type[Exception], match: str, **settings: object) -> None:
    metadata = METADATA | {key.replace("__", "."): value for key, value in settings.items()}
    config = ModelConfig.from_metadata(metadata, {name: array.shape for name, array in values.items()})
    with pytest.raises(error, match=match):
        write_decoder(config, ArrayWeights(values))


def test_a_layer_whose_keys_have_no_heads_is_refused() -> None:
    refused(arrays(), UnsupportedFormatError, "has keys in layer 1", llama__attention__head_count_kv=[1, 0])


def test_a_layer_without_feed_forward_keeps_its_attention() -> None:
    values = arrays()
    with_zeros = values | {"blk.1.ffn_down.weight": np.zeros((HIDDEN, FEED_FORWARD), np.float32)}
    without = {name: array for name, array in values.items() if not name.startswith("blk.1.ffn_")}
    settings = METADATA | {"llama.feed_forward_length": [FEED_FORWARD, 0]}
    config = ModelConfig.from_metadata(settings, {name: array.shape for name, array in without.items()})
    program = NumpyProgram(write_decoder(config, ArrayWeights(without)))
    ids, rows = np.array([1, 5, 2], np.int32), np.array([0, 1, 2], np.int32)
    found = program.run(Batch(ids, [Segment(0, 3, np.array([1], np.int64))], rows))
    np.testing.assert_array_equal(found, logits(with_zeros, [1, 5, 2], [0, 1, 2]))
    # A file that names a size there is broken.
    refused(without, CorruptFileError, "blk.1.ffn_norm.weight is not in the file")


def test_layers_that_run_several_times_are_refused() -> None:
    settings = {key.replace("llama", "nanbeige"): value for key, value in METADATA.items()}
    settings |= {"general.architecture": "nanbeige", "nanbeige.num_loops": 2}
    values = arrays()
    config = ModelConfig.from_metadata(settings, {name: array.shape for name, array in values.items()})
    with pytest.raises(UnsupportedFormatError, match="runs its layers 2 times"):
        write_decoder(config, ArrayWeights(values))


def test_a_learned_activation_without_its_parameters_is_refused() -> None:
    settings = {key.replace("llama", "apertus"): value for key, value in METADATA.items()}
    values = arrays()
    config = ModelConfig.from_metadata(
        settings | {"general.architecture": "apertus"}, {name: array.shape for name, array in values.items()}
    )
    with pytest.raises(CorruptFileError, match=r"xielu\.alpha_p is missing"):
        write_decoder(config, ArrayWeights(values))
