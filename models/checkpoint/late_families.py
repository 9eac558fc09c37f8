"""Models of many vectors for a text or a picture, which are compared late: ColPali and ColQwen2 (arXiv 2407.01449).

They are models that see, without an output matrix: every row's last state goes through a matrix, and is of length 1.
The prompts that they were trained on are their processor's, and metadata here (`prompt_metadata`). GGUF has no such
models; names and keys are ours.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localinfer.errors import CorruptFileError
from localinfer.models.checkpoint.dense_families import DENSE
from localinfer.models.checkpoint.family import Family, Metadata
from localinfer.models.checkpoint.settings import Settings

_HEADS = {"dense_2": ("embedding_proj_layer", "custom_text_proj")}
_SEEN = "embedding_dim projection_dim use_bidirectional_attention image_token_index image_token_id video_token_id"
_NUM_AUGMENTING = 10
"""Padding tokens behind a query, in whose rows the model may note more than it was asked."""
_IN_FULL = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"


def _late(base: Family, architecture: str, text_type: str) -> Family:
    """The family over a text model."""

    def metadata(settings: Settings) -> Metadata:
        found = settings.get("model_type")
        if found != text_type:
            raise settings.unsupported("model_type", f"{architecture} models over {text_type}")
        return {**base.metadata(settings), "late_interaction": True}

    return replace(
        base,
        architecture=architecture,
        heads=_HEADS,
        unused=r"(.*\.)?lm_head\..*",
        seen=f"{base.seen} {_SEEN}".strip(),
        metadata=metadata,
    )


LATE: dict[str, Family] = {
    "colpali": _late(DENSE["gemma"], "colpali", "gemma"),
    "colqwen2": _late(DENSE["qwen2_vl"], "colqwen2", "qwen2_vl_text"),
}
"""By the outer `model_type`."""


def prompt_metadata(
    metadata: Mapping[str, object], processor: Mapping[str, Any], tokenizer: Mapping[str, Any]
) -> dict[str, object]:
    """Metadata of the texts around a query and around a picture; empty for other models.

    metadata: of the model. processor: processor_config.json. tokenizer: tokenizer_config.json.
    Raises: CorruptFileError for a prompt of a picture that has no place for it.
    """
    prefix = metadata.get("general.architecture")
    if metadata.get(f"{prefix}.late_interaction") is not True:
        return {}
    is_colpali = prefix == "colpali"

    def text(source: Mapping[str, Any], key: str, default: str) -> str:
        value = source.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else default

    beginning = text(tokenizer, "bos_token", "<bos>") if is_colpali else ""
    image = text(tokenizer, "image_token", "<image>" if is_colpali else "<|image_pad|>")
    padding = text(tokenizer, "pad_token", "<pad>" if is_colpali else "<|endoftext|>") * _NUM_AUGMENTING
    query = text(processor, "query_prefix", "Question: " if is_colpali else "Query: ")
    shown = text(processor, "visual_prompt_prefix", "Describe the image." if is_colpali else _IN_FULL)
    before, place, behind = f"{image}{beginning}{shown}\n".partition(image) if is_colpali else shown.partition(image)
    if not place:
        raise CorruptFileError(
            f"processor_config.json: visual_prompt_prefix is {shown[:60]!r}; wanted a text with {image}, the picture's "
            "place. Download the folder again or choose another model."
        )
    texts = {"query_before": beginning + query, "query_behind": f"{padding}\n"}
    texts |= {"picture_before": before, "picture_behind": behind}
    return {f"{prefix}.{key}": value for key, value in texts.items()}
