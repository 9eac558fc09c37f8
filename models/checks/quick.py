"""Checks of every load: files that are no models are refused, and what some milliseconds find is reported."""

import re
from collections.abc import Collection, Iterator, Mapping

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checks import Finding
from localinfer.models.checks.hyperparameter_checks import check_hyperparameters
from localinfer.models.checks.tensor_samples import check_conversion, check_samples
from localinfer.models.checks.text_checks import check_beginning, check_template_source, check_vocabulary
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.model_file import ModelFile

_PART_NAME = re.compile(r"[-_.](?P<number>\d{1,5})-?of-?(?P<count>\d{1,5})(?=\.|$)")
_TABLES = ("token_embd.weight", "tok_embeddings.weight")
_MOST_SHOWN = 80


def check_kind(file: ModelFile) -> None:
    """Raise UnsupportedFormatError, with the file to get instead, for one that holds no model of text."""
    found = other_kind(file.metadata, file.tensors, file.path.name)
    if found is not None:
        raise UnsupportedFormatError(f"{file.path.name} is {found}")


def other_kind(metadata: Mapping[str, object], tensors: Collection[str], name: str) -> str | None:
    """Say what a file is in place of a model, and what to get; None for one that may be a model.

    metadata, tensors: of a GGUF file, tensors by name. name: the file's own.
    """
    kind, architecture = _text(metadata, "general.type"), _text(metadata, "general.architecture")
    if kind == "adapter" or "adapter.type" in metadata or any(one.endswith((".lora_a", ".lora_b")) for one in tensors):
        base = _text(metadata, "general.base_model.0.name")
        of = f", of {base!r:.{_MOST_SHOWN}}" if base.isprintable() and base else ""
        return (
            f"an adapter (LoRA), a change to a model's weights, not a model{of}. Merge it into its base model, or get "
            "a file of the merged model"
        )
    if architecture == "controlvector" or any(one.startswith("direction.") for one in tensors):
        return "a control vector, which changes what a model computes. Choose the model that it was made for"
    if kind == "mmproj" or (architecture == "clip" and "token_embd.weight" not in tensors):
        return (
            "the projector (mmproj) of a multimodal model: it reads images or sound for it. Choose the model itself, "
            "the file beside this one without mmproj in its name; it runs here on text"
        )
    if kind == "imatrix" or "imatrix.datasets" in metadata or any(one.endswith(".in_sum2") for one in tensors):
        return (
            "an importance matrix, a measurement by which models are quantized. Choose the model; "
            "'localinfer quantize --imatrix' takes this file"
        )
    if not tensors and "tokenizer.ggml.tokens" in metadata:
        return "a vocabulary without weights, which 'localinfer tokenize' takes. Choose a model of it for anything else"
    return _part_of_model(tensors, name)


def _text(metadata: Mapping[str, object], key: str) -> str:
    """A setting that may be of any type in a hostile file; "" unless it is text."""
    value = metadata.get(key)
    return value if isinstance(value, str) else ""


def _part_of_model(tensors: Collection[str], name: str) -> str | None:
    has_first = any(one.startswith("blk.0.") for one in tensors)
    if has_first or not any(one.startswith("blk.") for one in tensors):
        return None
    if any(".nextn." in one for one in tensors):
        return (
            "the layers for next-token prediction (MTP) of a model, without the model. Choose a file that holds both, "
            "or the model alone"
        )
    found = _PART_NAME.search(name)
    if found is not None or not any(one in tensors for one in _TABLES):
        which = "" if found is None else f" ({int(found['number'])} of {int(found['count'])} by its name)"
        return (
            f"one part of a model{which}: its first layer is not in it, and it does not name the other parts. Get all "
            "parts under the names they were published with, and open the first"
        )
    return None


def check_settings(
    file: ModelFile, config: ModelConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> Iterator[Finding]:
    """Yield what a model's metadata tells. config: with the file's context length."""
    yield from check_hyperparameters(file, config)
    if tokenizer is not None:
        yield from check_text_settings(file, tokenizer, None if config.is_encoder else template)


def check_text_settings(file: ModelFile, tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[Finding]:
    """Yield what a vocabulary and a chat template tell; of a template that the user gives nothing: it is theirs."""
    yield from check_vocabulary(tokenizer)
    yield from check_beginning(file, tokenizer, template)
    is_own = "tokenizer.chat_template" not in getattr(file.metadata, "replaced_keys", ())
    if template is not None and is_own:
        yield from check_template_source(template, tokenizer)


def check_loaded(
    file: ModelFile, config: ModelConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> tuple[Finding, ...]:
    """Make all checks of a load, some milliseconds; once the weights were read, their blocks are at hand."""
    return (
        *check_settings(file, config, tokenizer, template),
        *check_samples(file),
        *check_conversion(file, config),
    )
