"""Metadata that lies, contradicts itself or asks for the unknown ends in a typed error that names its key."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.block_config import LatentConfig
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import kv_layer_shapes
from localinfer.models.load.loader import load_model
from tests.quant.gguf.gguf_bytes import entry, gguf, text

HIDDEN = 48
NUM_LAYERS = 3
VOCAB = 11
LATENT = {
    "attention__head_count_kv": 1,
    "attention__key_length": 20,
    "attention__value_length": 16,
    "attention__kv_lora_rank": 16,
    "attention__key_length_mla": 12,
    "attention__value_length_mla": 8,
    "rope__dimension_count": 4,
}


def metadata(**changes: Any) -> dict[str, object]:
    """A small llama's metadata; keyword `a__b` stands for the key `llama.a.b`, and None removes it."""
    values: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": [str(token) for token in range(VOCAB)],
        "llama.block_count": NUM_LAYERS,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": 40,
        "llama.attention.head_count": 6,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 500000.0,
    }
    for name, value in changes.items():
        key = "llama." + name.replace("__", ".")
        values[key] = value
        if value is None:
            del values[key]
    return values


def shapes(**changes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that such a model is recognised by."""
    result: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN)}
    for layer in range(NUM_LAYERS):
        result[f"blk.{layer}.attn_output.weight"] = (HIDDEN, HIDDEN)
        result[f"blk.{layer}.attn_q.weight"] = (HIDDEN, HIDDEN)
        result |= {f"blk.{layer}.attn_{letter}.weight": (16, HIDDEN) for letter in "kv"}
    return {**result, **changes}


def latent_shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of such a model with latent attention, by the sizes in LATENT."""
    result: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN)}
    for layer in range(NUM_LAYERS):
        result[f"blk.{layer}.attn_output.weight"] = (HIDDEN, HIDDEN)
        result[f"blk.{layer}.attn_q.weight"] = (6 * 12, HIDDEN)
        result[f"blk.{layer}.attn_kv_a_mqa.weight"] = (20, HIDDEN)
    return result


def test_sizes_are_read_and_defaults_follow_the_specification() -> None:
    config = ModelConfig.from_metadata(metadata(), shapes())
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (HIDDEN, NUM_LAYERS, VOCAB)
    assert config.num_heads == (6, 6, 6)
    assert config.num_kv_heads == (2, 2, 2)
    assert config.head_dim == config.value_head_dim == config.rope.rotary_size == 8
    assert config.rope.scaling == "none"
    assert config.rope.original_context_length == 64
    assert config.experts is None


def test_head_counts_may_differ_by_layer() -> None:
    sizes = {f"blk.{layer}.attn_{letter}.weight": (8 * (layer + 1), HIDDEN) for layer in range(3) for letter in "kv"}
    counts = np.array([1, 2, 3], dtype=np.int32)
    config = ModelConfig.from_metadata(metadata(attention__head_count_kv=counts), shapes(**sizes))
    assert config.num_kv_heads == (1, 2, 3)


def test_single_layers_may_have_no_attention_or_no_keys() -> None:
    sizes = shapes() | {"blk.1.ffn_norm.weight": (HIDDEN,)}
    for name in ("attn_output", "attn_q", "attn_k", "attn_v"):
        del sizes[f"blk.1.{name}.weight"]
    for letter in "qkv":
        del sizes[f"blk.2.attn_{letter}.weight"]
    counts = {"attention__head_count": [6, 0, 6], "attention__head_count_kv": [2, 2, 0]}
    config = ModelConfig.from_metadata(metadata(**counts), sizes)
    assert (config.num_heads, config.num_kv_heads) == ((6, 0, 6), (2, 0, 0))
    assert config.head_dim == 8
    assert [shape.num_kv_heads for shape in kv_layer_shapes(config)] == [2, 0, 0]


def test_old_latent_attention_has_keys_and_values_of_every_head() -> None:
    changes: dict[str, Any] = {"attention__kv_lora_rank": 16, "rope__dimension_count": 4, "attention__head_count_kv": 6}
    changes |= {"attention__key_length": 12, "attention__value_length": 8}
    sizes = latent_shapes() | {f"blk.{layer}.attn_kv_b.weight": (6 * 16, 16) for layer in range(NUM_LAYERS)}
    config = ModelConfig.from_metadata(metadata(**changes), sizes)
    assert config.latent == LatentConfig(key_size=12, value_size=8, kv_rank=16, is_absorbed=False)
    with pytest.raises(CorruptFileError, match=r"llama\.attention\.head_count_kv is 2"):
        ModelConfig.from_metadata(metadata(**changes | {"attention__head_count_kv": 2}), sizes)
    with pytest.raises(CorruptFileError, match=r"llama\.attention\.head_count is .*attn_kv_b"):
        ModelConfig.from_metadata(metadata(**changes | {"attention__value_length": 7}), sizes)
    with pytest.raises(CorruptFileError, match=r"llama\.attention\.key_length is 4"):
        ModelConfig.from_metadata(metadata(**changes | {"attention__key_length": 4}), sizes)


def test_settings_of_blocks_are_read_per_layer() -> None:
    changes: dict[str, Any] = {"swiglu_clamp_exp": [0.0, 1.5, 1e-9], "swiglu_clamp_shexp": 2.0}
    values = metadata(**changes, attention__clamp_kqv=1.25, attention__rope_pattern=[True, False, True])
    values |= {"xielu.alpha_p": [0.5, 1.0, 2.0], "xielu.alpha_n": 0.25, "xielu.beta": 0.5, "xielu.eps": -1e-6}
    config = ModelConfig.from_metadata(values, shapes())
    assert (config.expert_clamps, config.dense_clamps) == ((0.0, 1.5, 0.0), (2.0, 2.0, 2.0))
    assert (config.projection_clamp, config.rope_pattern) == (1.25, (True, False, True))
    assert [layer.alpha_positive for layer in config.xielu] == [0.5, 1.0, 2.0]
    assert {(layer.alpha_negative, layer.beta, layer.epsilon) for layer in config.xielu} == {(0.25, 0.5, -1e-6)}
    del values["xielu.beta"]
    with pytest.raises(CorruptFileError, match=r"xielu\.beta is missing"):
        ModelConfig.from_metadata(values, shapes())


def test_latent_attention_keeps_one_wide_head() -> None:
    config = ModelConfig.from_metadata(metadata(**LATENT), latent_shapes())
    assert config.latent == LatentConfig(key_size=12, value_size=8, kv_rank=16)
    assert (config.head_dim, config.value_head_dim, config.rope.rotary_size) == (20, 16, 4)


def test_a_file_without_tokens_takes_its_vocabulary_from_the_embedding() -> None:
    values = metadata()
    del values["tokenizer.ggml.tokens"]
    assert ModelConfig.from_metadata(values, shapes()).vocab_size == VOCAB


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"block_count": 10**6}, "llama.block_count"),
        ({"block_count": NUM_LAYERS + 1}, "llama.block_count"),
        ({"block_count": 0}, "llama.block_count"),
        ({"block_count": -1}, "llama.block_count"),
        ({"block_count": None}, "llama.block_count"),
        ({"nextn_predict_layers": NUM_LAYERS}, "llama.nextn_predict_layers"),
        ({"embedding_length": HIDDEN + 6}, "llama.embedding_length"),
        ({"embedding_length": 2**31}, "llama.embedding_length"),
        ({"embedding_length": "48"}, "llama.embedding_length"),
        ({"embedding_length": 48.0}, "llama.embedding_length"),
        ({"context_length": 0}, "llama.context_length"),
        ({"vocab_size": VOCAB + 1}, "llama.vocab_size"),
        ({"attention__head_count": 0}, "llama.attention.head_count"),
        ({"attention__head_count": 5, "attention__head_count_kv": 5}, "llama.attention.head_count"),
        ({"attention__head_count": [6, 6]}, "llama.attention.head_count"),
        ({"attention__head_count": [6, 0, 6]}, "llama.attention.head_count"),
        ({"attention__head_count": [0, 0, 0]}, "llama.attention.head_count"),
        ({"attention__head_count_kv": 0}, "llama.attention.head_count_kv"),
        ({"swiglu_clamp_exp": [1.0, 1.0]}, "llama.swiglu_clamp_exp"),
        ({"swiglu_clamp_exp": [1.0, math.nan, 1.0]}, "llama.swiglu_clamp_exp"),
        ({"attention__clamp_kqv": -1.0}, "llama.attention.clamp_kqv"),
        ({"attention__rope_pattern": [1, 2, 1]}, "llama.attention.rope_pattern"),
        ({"attention__head_count_kv": 4}, "llama.attention.head_count_kv"),
        ({"attention__head_count_kv": 12}, "llama.attention.head_count_kv"),
        ({"attention__key_length": 16, "attention__value_length": 16}, "llama.attention.head_count"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "llama.attention.layer_norm_rms_epsilon"),
        ({"attention__layer_norm_rms_epsilon": -1e-5}, "llama.attention.layer_norm_rms_epsilon"),
        ({"attention__layer_norm_rms_epsilon": None}, "llama.attention.layer_norm_rms_epsilon"),
        ({"attention__sliding_window_pattern": [1]}, "llama.attention.sliding_window_pattern"),
        ({"attention__scale": math.inf}, "llama.attention.scale"),
        ({"rope__dimension_count": 10}, "llama.rope.dimension_count"),
        ({"rope__dimension_count": 7}, "llama.rope.dimension_count"),
        ({"rope__freq_base": 0.0}, "llama.rope.freq_base"),
        ({"rope__freq_base": math.nan}, "llama.rope.freq_base"),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": math.inf}, "llama.rope.scaling.factor"),
        ({"rope__scaling__type": 3}, "llama.rope.scaling.type"),
        ({"rope__dimension_sections": [1] * 17}, "llama.rope.dimension_sections"),
        ({"expert_count": 4}, "llama.expert_used_count"),
        ({"expert_count": 4, "expert_used_count": 5}, "llama.expert_used_count"),
        ({"expert_count": 4, "expert_used_count": 1, "expert_group_count": 3}, "llama.expert_group_count"),
        (LATENT | {"attention__key_length": 30}, "llama.attention.key_length"),
        (LATENT | {"attention__value_length": 20}, "llama.attention.value_length"),
        (LATENT | {"attention__key_length_mla": 4}, "llama.attention.key_length_mla"),
        (LATENT | {"attention__key_length_mla": 13}, "llama.attention.head_count"),
        (LATENT | {"attention__value_length_mla": 9}, "llama.attention.value_length_mla"),
        (LATENT | {"attention__q_lora_rank": 16}, "blk.0.attn_q_b.weight"),
        ({"attention__key_length": 1 << 22, "attention__value_length": 8}, "llama.attention.key_length"),
        ({"attention__head_count_kv": 3}, "llama.attention.head_count_kv"),
        ({"rope__freq_base": 1e300}, "llama.rope.freq_base"),
        ({"rope__freq_base_swa": 0.5}, "llama.rope.freq_base_swa"),
        ({"rope__scaling__yarn_beta_fast": 1e300}, "llama.rope.scaling.yarn_beta_fast"),
        ({"rope__scaling__yarn_log_multiplier": -0.5}, "llama.rope.scaling.yarn_log_multiplier"),
        ({"rope__scaling__factor": 10**400}, "llama.rope.scaling.factor"),
        ({"logit_scale": 1e300}, "llama.logit_scale"),
        ({"logit_scale": 1e-300}, "llama.logit_scale"),
        ({"attn_logit_softcapping": 1e-300}, "llama.attn_logit_softcapping"),
        ({"rope__scaling__factor": 1e-300}, "llama.rope.scaling.factor"),
        ({"attn_logit_softcapping": -1.0}, "llama.attn_logit_softcapping"),
        ({"use_parallel_residual": "yes"}, "llama.use_parallel_residual"),
    ],
)
def test_values_that_contradict_the_file_name_their_key(changes: dict[str, Any], key: str) -> None:
    tensor_shapes = latent_shapes() if "attention__kv_lora_rank" in changes else shapes()
    with pytest.raises(CorruptFileError) as caught:
        ModelConfig.from_metadata(metadata(**changes), tensor_shapes)
    assert str(caught.value).startswith(key + " is ")
    assert "wanted" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rope__scaling__type": "dynamic"}, "llama.rope.scaling.type"),
        ({"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 9}, "llama.expert_gating_func"),
        ({"attention__key_length_swa": 4}, "llama.attention.key_length_swa"),
        ({"rope__dimension_count_swa": 4}, "llama.rope.dimension_count_swa"),
        ({"attention__causal": False}, "llama.attention.causal"),
    ],
)
def test_values_of_a_newer_runtime_say_so(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedFormatError, match=key):
        ModelConfig.from_metadata(metadata(**changes), shapes())


@pytest.mark.parametrize("shape", [(VOCAB + 1, HIDDEN), (VOCAB,), (1, VOCAB, HIDDEN)])
def test_an_embedding_that_does_not_fit_the_vocabulary_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CorruptFileError, match=r"tokenizer\.ggml\.tokens|token_embd"):
        ModelConfig.from_metadata(metadata(), shapes(**{"token_embd.weight": shape}))


def test_a_file_without_tensors_is_refused() -> None:
    with pytest.raises(ModelFileError):
        ModelConfig.from_metadata(metadata(), {})


@pytest.mark.parametrize("name", [None, 7, "", b"llama"])
def test_a_file_without_an_architecture_is_refused(name: object) -> None:
    with pytest.raises(CorruptFileError, match=r"general\.architecture"):
        ModelConfig.from_metadata({"general.architecture": name}, shapes())


def test_an_unknown_architecture_is_refused_with_the_nearest_of_those_known() -> None:
    values = {key.replace("llama.", "rwkv9.", 1): value for key, value in metadata().items()}
    values["general.architecture"] = "rwkv9"
    config = ModelConfig.from_metadata(values, shapes())
    with pytest.raises(UnsupportedFormatError, match="'rwkv9'.*nearest.*'rwkv7'.*list --architectures"):
        find_architecture(config)


@pytest.mark.parametrize(("name", "reason"), [("rwkv6", r"an earlier kind \(RWKV 6\)"), ("arwkv7", "in the place of")])
def test_a_model_with_recurrent_layers_is_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf([entry("general.architecture", 8, text(name))]))
    with pytest.raises(UnsupportedFormatError, match=f"'{name}', with recurrent layers .*{reason}"):
        load_model(path)


NONSENSE = [None, True, -1, 0, 2**63, -(2**63), 1e308, math.nan, "", "yarn", [], [0], [-1] * 3, ["a"] * 3, [[1]]]
NONSENSE += [10**400, math.inf, -math.inf, "\ud800", {}, {"a": 1}, [math.nan] * 3, [None] * 3, 2**31, 1 << 22]
OPTIONAL = {
    "rope__scaling__factor": 2.0,
    "rope__scaling__type": "yarn",
    "rope__scaling__original_context_length": 32,
    "rope__scaling__yarn_beta_fast": 32.0,
    "rope__scaling__yarn_log_multiplier": 0.1,
    "attention__sliding_window": 16,
    "attention__sliding_window_pattern": 2,
    "attention__scale": 0.1,
    "expert_count": 4,
    "expert_used_count": 2,
    "logit_scale": 1.0,
}


@pytest.mark.parametrize(("more", "tensors"), [({}, shapes()), (LATENT, latent_shapes())], ids=["heads", "latent"])
def test_whatever_one_value_becomes_the_error_is_typed(more: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Every key of the metadata, replaced by every kind of nonsense: some of it is refused for every key."""
    valid = metadata(**OPTIONAL, **more)
    ModelConfig.from_metadata(valid, tensors)
    for key in valid:
        num_refused = 0
        for value in NONSENSE:
            try:
                find_architecture(ModelConfig.from_metadata({**valid, key: value}, tensors))
            except ModelFileError:
                num_refused += 1
        assert num_refused >= len(NONSENSE) // 2, key
