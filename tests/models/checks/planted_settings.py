"""Faults of metadata: settings, vocabularies and templates that a conversion gets wrong."""

from typing import Any

import numpy as np

from tests.models.checks.editable_model import MERGES, TOKENS, TYPES, EditableModel

_SCORES, _TEMPLATE, _PRE = "tokenizer.ggml.scores", "tokenizer.chat_template", "tokenizer.ggml.pre"
_EOS, _EOT, _BOS = (f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eot", "bos"))
_ADD_BOS = "tokenizer.ggml.add_bos_token"
_LLAMA3 = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] + '<|eot_id|>' }}{% endfor %}"
)
_PLAIN = "{% for message in messages %}{{ '### ' + message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
NORMAL = 1


def rope_base_too_large(model: EditableModel) -> None:
    model.put("rope.freq_base", 5e6)


def rope_dimension_halved(model: EditableModel) -> None:
    model.put("rope.dimension_count", model.get("rope.dimension_count") // 2)


def head_count_doubled(model: EditableModel) -> None:
    for key in ("attention.head_count", "attention.head_count_kv"):
        model.put(key, model.get(key) * 2)
    model.put("rope.dimension_count", model.get("rope.dimension_count") // 2)


def epsilon_too_large(model: EditableModel) -> None:
    model.put("attention.layer_norm_rms_epsilon", 0.5)


def attention_scale_of_one(model: EditableModel) -> None:
    model.put("attention.scale", 1.0)


def positions_stretched(model: EditableModel) -> None:
    model.put("rope.scaling.type", "linear")
    model.put("rope.scaling.factor", 8.0)


def window_of_one(model: EditableModel) -> None:
    model.put("attention.sliding_window", 1)


def windows_everywhere(model: EditableModel) -> None:
    """A family whose every sixth layer sees all positions, with a list that has none such."""
    model.put("attention.sliding_window_pattern", [True] * model.num_layers)


def yarn_without_a_context(model: EditableModel) -> None:
    model.put("rope.scaling.type", "yarn")
    model.put("rope.scaling.factor", 4.0)


def softcaps_dropped(model: EditableModel) -> None:
    model.drop("attn_logit_softcapping", "final_logit_softcapping")


def embedding_scale_dropped(model: EditableModel) -> None:
    """Granite's factors, which are 1 where they are not said."""
    model.drop("residual_scale")


def end_is_a_word(model: EditableModel) -> None:
    model.put(_EOS, 900)
    model.values.pop(_EOT, None)


def end_begins_turns(model: EditableModel) -> None:
    """Of a ChatML model: the token that begins a turn."""
    model.put(_EOS, model.get(TOKENS).index("<|im_start|>"))
    model.values.pop(_EOT, None)


def end_of_turn_missing(model: EditableModel) -> None:
    """A ChatML model whose end of a turn has another name than those that are known."""
    tokens = ["<|turn_done|>" if token == "<|im_end|>" else token for token in model.get(TOKENS)]
    model.put(TOKENS, tokens)
    model.put(_TEMPLATE, model.get(_TEMPLATE).replace("<|im_end|>", "<|turn_done|>"))
    model.drop(_EOT)


def end_missing(model: EditableModel) -> None:
    """Of a known vocabulary."""
    model.drop(_EOS)


def beginning_missing(model: EditableModel) -> None:
    model.drop(_BOS)


def beginning_not_added(model: EditableModel) -> None:
    """Of a family whose every text begins with the token."""
    model.put(_ADD_BOS, False)


def beginning_added(model: EditableModel) -> None:
    """To a vocabulary whose models were trained without one."""
    model.put(_ADD_BOS, True)


def controls_typed_normal(model: EditableModel) -> None:
    model.put(TYPES, np.full(len(model.get(TOKENS)), NORMAL, np.int32))


def types_missing(model: EditableModel) -> None:
    model.drop(TYPES)


def half_of_the_merges(model: EditableModel) -> None:
    merges = list(model.get(MERGES))
    model.put(MERGES, merges[: len(merges) // 2])


def merges_missing(model: EditableModel) -> None:
    model.put(MERGES, list(model.get(MERGES))[:1])


def another_word_splitting(model: EditableModel) -> None:
    model.put(_PRE, "default")


def unknown_word_splitting(model: EditableModel) -> None:
    model.put(_PRE, "of-another-version")


def tokens_off_by_one(model: EditableModel) -> None:
    tokens = list(model.get(TOKENS))
    model.put(TOKENS, [tokens[-1], *tokens[:-1]])


def last_tokens_shuffled(model: EditableModel) -> None:
    """Added tokens in the order of another release."""
    tokens = list(model.get(TOKENS))
    tokens[4:260] = tokens[259:3:-1]
    model.put(TOKENS, tokens)


def scores_all_zero(model: EditableModel) -> None:
    model.put(_SCORES, np.zeros(len(model.get(TOKENS)), np.float32))


def scores_reversed(model: EditableModel) -> None:
    """Ranks where logarithms of shares are wanted."""
    model.put(_SCORES, -np.asarray(model.get(_SCORES), np.float32))


def bytes_typed_normal(model: EditableModel) -> None:
    types = np.array(model.get(TYPES), np.int32)
    types[types == 6] = NORMAL
    model.put(TYPES, types)


def sentencepiece_called_bpe(model: EditableModel) -> None:
    """Tokens as SentencePiece writes them, called byte-level."""
    for key in (TOKENS, MERGES):
        model.put(key, [text.replace("Ġ", "▁") for text in model.get(key)])


def template_of_another_family(model: EditableModel) -> None:
    model.put(_TEMPLATE, _LLAMA3)


def template_without_the_markers(model: EditableModel) -> None:
    """Plain headings, in a vocabulary that has ChatML's tokens."""
    model.put(_TEMPLATE, _PLAIN)


def template_that_never_ends(model: EditableModel) -> None:
    model.put(_TEMPLATE, model.get(_TEMPLATE).replace("<|im_end|>", ""))


SIZES: dict[str, tuple[str, tuple[int, int, int, int]]] = {
    "Llama 3 8B": ("llama", (32, 4096, 14336, 128256)),
    "TinyLlama": ("llama", (22, 2048, 5632, 32000)),
    "Qwen 2.5 7B": ("qwen2", (28, 3584, 18944, 152064)),
}
"""Models of which a header is enough: architecture; layers, width, width of feed-forward blocks, tokens."""

HEADERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "RoPE base of another model": (
        "TinyLlama",
        {"context_length": 2048},
        {"context_length": 2048, "rope.freq_base": 5e5},
    ),
    "RoPE base missing": ("Llama 3 8B", {"rope.freq_base": 5e5}, {}),
    "context length without a scaling": ("TinyLlama", {"context_length": 2048}, {"context_length": 65536}),
    "output matrix missing": (
        "TinyLlama",
        {"context_length": 2048},
        {"context_length": 2048, "without": "output.weight"},
    ),
    "YaRN without the original context": (
        "Qwen 2.5 7B",
        {"rope.freq_base": 1e6, "context_length": 131072},
        {"rope.freq_base": 1e6, "context_length": 131072, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    ),
}
"""By a fault: the model, settings of it when it is whole, and when it is not."""
