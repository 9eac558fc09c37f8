"""Published vocabularies that are known by their merges or their special tokens, and how their models use them.

Sources: the vocabularies and the list of tokenizers of llama.cpp's converter (MIT), and the tokenizer_config.json of
each model. Models that were trained further may have more tokens, and have the same merges and special tokens.
"""

import hashlib
from collections.abc import Container, Sequence

from localinfer.types import Record

_SAMPLES = 64


class KnownVocabulary(Record, kw_only=True):
    """The tokenizer settings that models with one published vocabulary were trained with."""

    owner: str
    """Name of its models' family, in the genitive."""
    pre_tokenizer: str
    """The word splitting, by its name in `tokenizer.ggml.pre`."""
    digest: str = ""
    """`merges_digest` of its merges; empty for one that is known by its special tokens."""
    special_tokens: tuple[str, ...] = ()
    """Tokens that it has all of, and no other vocabulary of `sizes` has."""
    sizes: range = range(0)
    """Numbers of tokens of vocabularies with these special tokens."""
    bos: str = ""
    """The token that texts begin with, empty where nothing is added or models differ."""
    ends: tuple[str, ...] = ()
    """Tokens that end a generation."""


KNOWN_VOCABULARIES = (
    KnownVocabulary(owner="GPT-2's", pre_tokenizer="gpt-2", digest="9c3a10e256187b0c", ends=("<|endoftext|>",)),
    KnownVocabulary(
        owner="Llama 3's",
        pre_tokenizer="llama-bpe",
        digest="89e1fd564c1bbc34",
        bos="<|begin_of_text|>",
        ends=("<|end_of_text|>", "<|eot_id|>"),
    ),
    KnownVocabulary(
        owner="Qwen 2's", pre_tokenizer="qwen2", digest="716b0ab21afb32de", ends=("<|endoftext|>", "<|im_end|>")
    ),
    KnownVocabulary(
        owner="Command R's",
        pre_tokenizer="command-r",
        digest="f2121b66e99d0e2f",
        bos="<BOS_TOKEN>",
        ends=("<|END_OF_TURN_TOKEN|>", "<EOS_TOKEN>"),
    ),
    KnownVocabulary(
        owner="DeepSeek LLM's",
        pre_tokenizer="deepseek-llm",
        digest="6388e602ac5ac8f6",
        bos="<｜begin▁of▁sentence｜>",
        ends=("<｜end▁of▁sentence｜>",),
    ),
    KnownVocabulary(
        owner="DeepSeek Coder's",
        pre_tokenizer="deepseek-coder",
        digest="8ab255e56818895a",
        bos="<｜begin▁of▁sentence｜>",
        ends=("<｜end▁of▁sentence｜>", "<|EOT|>"),
    ),
    KnownVocabulary(owner="Falcon's", pre_tokenizer="falcon", digest="f39eb061644fc572", ends=("<|endoftext|>",)),
    KnownVocabulary(
        owner="MPT's and GPT-NeoX's", pre_tokenizer="mpt", digest="bd706516d2e93725", ends=("<|endoftext|>",)
    ),
    KnownVocabulary(owner="Refact's", pre_tokenizer="refact", digest="07ac0e5adb069f5c", ends=("<|endoftext|>",)),
    KnownVocabulary(
        owner="StarCoder 2's", pre_tokenizer="starcoder", digest="1f0d7ca2e8eadae7", ends=("<|endoftext|>",)
    ),
    KnownVocabulary(
        owner="DeepSeek V3's",
        pre_tokenizer="deepseek-v3",
        special_tokens=("<｜begin▁of▁sentence｜>", "<｜User｜>"),
        sizes=range(128500, 130000),
        bos="<｜begin▁of▁sentence｜>",
        ends=("<｜end▁of▁sentence｜>",),
    ),
    KnownVocabulary(
        owner="Qwen 3.5's",
        pre_tokenizer="qwen35",
        special_tokens=("<|im_start|>", "<|object_ref_start|>"),
        sizes=range(248000, 249000),
        ends=("<|im_end|>", "<|endoftext|>"),
    ),
    KnownVocabulary(
        owner="LFM2's",
        pre_tokenizer="lfm2",
        special_tokens=("<|startoftext|>", "<|tool_list_start|>"),
        sizes=range(64000, 66000),
        bos="<|startoftext|>",
        ends=("<|im_end|>",),
    ),
    KnownVocabulary(
        owner="GLM 4's",
        pre_tokenizer="glm4",
        special_tokens=("[gMASK]", "<sop>", "<|observation|>"),
        sizes=range(151000, 156000),
        ends=("<|endoftext|>", "<|user|>"),
    ),
    KnownVocabulary(
        owner="Kimi K2's",
        pre_tokenizer="kimi-k2",
        special_tokens=("<|im_middle|>", "<|im_user|>"),
        sizes=range(163000, 165000),
        ends=("<|im_end|>", "[EOS]"),
    ),
    KnownVocabulary(
        owner="Llama 4's",
        pre_tokenizer="llama4",
        special_tokens=("<|header_start|>", "<|eot|>"),
        sizes=range(200000, 203000),
        bos="<|begin_of_text|>",
        ends=("<|eot|>", "<|end_of_text|>"),
    ),
    KnownVocabulary(
        owner="gpt-oss's",
        pre_tokenizer="gpt-4o",
        special_tokens=("<|channel|>", "<|constrain|>"),
        sizes=range(199000, 202000),
        ends=("<|return|>", "<|endoftext|>"),
    ),
    KnownVocabulary(
        owner="Llama 2's",
        pre_tokenizer="default",
        special_tokens=("<unk>", "<s>", "</s>", "▁the"),
        sizes=range(32000, 32017),
        bos="<s>",
        ends=("</s>",),
    ),
    KnownVocabulary(
        owner="MiniMax M2's",
        pre_tokenizer="minimax-m2",
        special_tokens=("]~b]", "[e~["),
        sizes=range(200000, 201000),
        ends=("[e~[",),
    ),
)
_BY_DIGEST = {known.digest: known for known in KNOWN_VOCABULARIES if known.digest}
_BY_TOKENS = tuple(known for known in KNOWN_VOCABULARIES if known.special_tokens)


def merges_digest(merges: Sequence[str]) -> str:
    """A digest of the number of merges and of some of them, spread over all: 16 hexadecimal digits."""
    count = len(merges)
    samples = [merges[index * count // _SAMPLES] for index in range(_SAMPLES if count else 0)]
    text = "\n".join([str(count), *samples])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def known_vocabulary(
    merges: Sequence[str], num_tokens: int = 0, special_tokens: Container[str] = ()
) -> KnownVocabulary | None:
    """Return the published vocabulary that has these merges, or else these special tokens; None for an unknown one."""
    known = _BY_DIGEST.get(merges_digest(merges))
    if known is not None:
        return known
    return next(
        (
            known
            for known in _BY_TOKENS
            if num_tokens in known.sizes and all(text in special_tokens for text in known.special_tokens)
        ),
        None,
    )
