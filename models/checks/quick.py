"""Checks of every load: files that are no models are refused, and what some milliseconds find is reported.

Hyperparameters are compared with what is plausible, and with published models of the same sizes: `known_models.json`
lists them, each with the page of its config.json or of a listing of its metadata as `source`. Models that were trained
further keep their sizes.
"""

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field
from pathlib import Path

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checks import Finding
from localinfer.models.checks.tensor_samples import check_conversion, check_samples
from localinfer.models.checks.text_checks import check_beginning, check_template_source, check_vocabulary
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.types import Record

_PART_NAME = re.compile(r"[-_.](?P<number>\d{1,5})-?of-?(?P<count>\d{1,5})(?=\.|$)")
_TABLES = ("token_embd.weight", "tok_embeddings.weight")
_MOST_SHOWN = 80
_TEMPLATE_KEY = "tokenizer.chat_template"


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


def check_settings(file: ModelFile, config: ModelConfig, tokenizer: Tokenizer | None) -> Iterator[Finding]:
    """Yield what a model's metadata tells. config: with the file's context length."""
    yield from check_hyperparameters(file, config)
    if tokenizer is not None:
        yield from check_text_settings(file, tokenizer, chats=not config.is_encoder)


def check_text_settings(file: ModelFile, tokenizer: Tokenizer, *, chats: bool = True) -> Iterator[Finding]:
    """Yield what a vocabulary and a chat template tell; of a template that the user gives nothing: it is theirs."""
    source = file.metadata.get(_TEMPLATE_KEY) if chats else None
    template = source if isinstance(source, str) else None
    yield from check_vocabulary(tokenizer)
    yield from check_beginning(file, tokenizer, template)
    if template is not None and _TEMPLATE_KEY not in getattr(file.metadata, "replaced_keys", ()):
        yield from check_template_source(template, tokenizer)


def check_loaded(file: ModelFile, config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[Finding, ...]:
    """Make all checks of a load, some milliseconds; once the weights were read, their blocks are at hand."""
    return (
        *check_settings(file, config, tokenizer),
        *check_samples(file),
        *check_conversion(file, config),
    )


KNOWN_MODELS_FILE = Path(__file__).with_name("known_models.json")
_TOLERANCE = 0.005
"""Share by which a vocabulary may differ: further training adds tokens, conversion pads. DeepSeek Coder 6.7B has the
sizes of Llama 2 7B and 0.8 % more tokens, and another base."""


class KnownModel(Record, kw_only=True):
    """A published model: the sizes that it is known by, and the settings of models of these sizes."""

    name: str
    architecture: str
    """GGUF's name."""
    num_layers: int
    """Without layers for next-token prediction."""
    hidden_size: int
    intermediate_size: int = 0
    """Width of the feed-forward blocks, of one expert in a mixture; 0: not compared."""
    num_experts: int = 0
    """Routed experts of a layer; 0 for a dense model."""
    vocab_size: int
    num_heads: int
    """Query heads of a layer with attention."""
    num_kv_heads: int
    """Key-value heads; 0: not compared, as conversions of latent attention differ in it."""
    contexts: dict[float, int] = field(default_factory=dict)
    """The longest context, in tokens, trained for with each base of the rotary embedding without scaling; empty: not
    compared."""
    epsilon: float
    """Epsilon of the norms."""
    has_output: bool | None = None
    """It has an output matrix of its own; None where some have and some have not."""
    has_factors: bool = False
    """Longer contexts come with a divisor for each frequency (`rope_freqs.weight`)."""
    source: str


@functools.cache
def known_models() -> dict[tuple[str, int, int], tuple[KnownModel, ...]]:
    """Known models by architecture, layers and width."""
    found: dict[tuple[str, int, int], tuple[KnownModel, ...]] = {}
    for entry in json.loads(KNOWN_MODELS_FILE.read_text(encoding="utf-8")):
        contexts = {float(base): length for base, length in entry.pop("contexts", {}).items()}
        known = KnownModel(contexts=contexts, **entry)
        key = known.architecture, known.num_layers, known.hidden_size
        found[key] = (*found.get(key, ()), known)
    return found


def known_model(config: ModelConfig) -> KnownModel | None:
    """Return the published model that has these sizes, or None."""
    num_experts, width = 0, max(config.intermediate_size, default=0)
    if config.experts is not None:
        num_experts, width = config.experts.num_experts, config.experts.intermediate_size or width
    for known in known_models().get((config.architecture, config.num_main_layers, config.hidden_size), ()):
        if (
            known.num_experts == num_experts
            and known.intermediate_size in (0, width)
            and abs(config.vocab_size - known.vocab_size) <= _TOLERANCE * known.vocab_size
        ):
            return known
    return None


_LEAST_EPSILON, _LARGEST_EPSILON = 1e-13, 1.01e-3
_MOST_TIMES = 20.0
_FULL_ATTENTION = {"gemma2": (2, 1), "gemma3": (6, 5), "gpt-oss": (2, 1), "cohere2": (4, 3), "exaone4": (4, 3)}
"""Architectures whose published models have full attention in one layer of each period: the period, and which."""
_FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def check_hyperparameters(file: ModelFile, config: ModelConfig) -> Iterator[Finding]:
    """Yield settings that a model was likely not trained with; those that the user has set are theirs.

    config: with the file's context length.
    """
    replaced = getattr(file.metadata, "replaced_keys", ())
    known = known_model(config)
    yield from _check_epsilon(file, config, known)
    has_own_rope = not any(key.startswith(f"{config.architecture}.rope.") for key in replaced)
    if has_own_rope:
        yield from _check_scaling(file, config)
    yield from _check_layer_pattern(file, config)
    if known is None:
        return
    yield from _check_heads(file, config, known)
    if known.contexts and has_own_rope:
        yield from _check_rope(file, config, known)
    if known.has_output and "output.weight" not in file.tensors:
        yield Finding(
            "output matrix",
            f"output.weight is missing, so the embeddings stand in for it, but {known.name} has a matrix of its own: "
            "its answers will mean nothing; download the model again",
        )


def _check_epsilon(file: ModelFile, config: ModelConfig, known: KnownModel | None) -> Iterator[Finding]:
    key = f"{config.architecture}.attention.layer_norm_{'' if config.is_layer_norm else 'rms_'}epsilon"
    if key in getattr(file.metadata, "replaced_keys", ()):
        return
    found = config.norm_epsilon
    wanted = None
    if known is not None and not known.epsilon / _MOST_TIMES <= found <= known.epsilon * _MOST_TIMES:
        wanted = f"{known.name} was trained with {known.epsilon:g}"
    elif not _LEAST_EPSILON <= found <= _LARGEST_EPSILON:
        wanted = "models have 1e-12 to 1e-3"
    if wanted is not None:
        own = "its own" if known is None else f"{known.epsilon:g}"
        yield Finding(
            "norm epsilon",
            f"{key} is {found:g}, but {wanted}; get a current conversion, or set it to {own} (--set {key}=NUMBER)",
        )


def _check_rope(file: ModelFile, config: ModelConfig, known: KnownModel) -> Iterator[Finding]:
    key = f"{config.architecture}.rope.freq_base"
    base, context = config.rope.base, config.context_length
    bases = sorted(known.contexts)
    nearest = next((one for one in bases if abs(base - one) <= 0.01 * one), None)
    is_scaled = config.rope.scaling != "none" or any(name in file.tensors for name in _FACTOR_TENSORS)
    # A model that was trained further for a longer context has a larger base than any, and says that context.
    is_extended = base > bases[-1] and context > max(known.contexts.values())
    if nearest is None and not is_extended:
        found = f"{base:g}" if key in file.metadata else f"missing, which means {base:g}"
        usual = " or ".join(f"{one:g}" for one in bases)
        yield Finding(
            "RoPE base",
            f"{key} is {found}, but {known.name} was trained with {usual}: long texts will come out wrong; load it "
            f"with {key}={bases[0]:g} (--set), or get a current conversion",
        )
    elif nearest is not None and context > known.contexts[nearest] and not is_scaled:
        longest = known.contexts[nearest]
        lacking = (
            "the divisors of its frequencies (rope_freqs.weight)" if known.has_factors else "a scaling of positions"
        )
        yield Finding(
            "context length",
            f"{config.architecture}.context_length is {context}, but {known.name} knows {longest} tokens without "
            f"{lacking}, which is missing: longer texts will come out wrong; get a current conversion, or load it "
            f"with a context_length of {longest}",
        )


def _check_scaling(file: ModelFile, config: ModelConfig) -> Iterator[Finding]:
    """YaRN stretches positions beyond the original context, which nothing else in a file tells."""
    key = f"{config.architecture}.rope.scaling.original_context_length"
    if config.rope.scaling == "yarn" and config.rope.factor > 1 and key not in file.metadata:
        length = int(config.context_length / config.rope.factor)
        yield Finding(
            "RoPE scaling",
            f"{config.architecture}.rope.scaling.type is 'yarn' by a factor of {config.rope.factor:g}, but {key} is "
            f"missing, so {config.context_length} is taken for the length before it: texts will come out wrong; get "
            f"a current conversion, or set it (--set {key}={length}, if context_length was multiplied)",
        )


def _check_layer_pattern(file: ModelFile, config: ModelConfig) -> Iterator[Finding]:
    """A list of windowed layers in the file against the pattern that the architecture's models have."""
    key = f"{config.architecture}.attention.sliding_window_pattern"
    pattern = _FULL_ATTENTION.get(config.architecture)
    if pattern is None or not config.sliding_window or len(config.windowed_layers) < pattern[0]:
        return
    period, full = pattern
    wanted = [layer % period == full for layer in range(config.num_layers)]
    found = [not is_windowed for is_windowed in config.windowed_layers]
    if found != wanted and key not in getattr(file.metadata, "replaced_keys", ()):
        layer = next(index for index, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1])
        kinds = {True: "full attention", False: "a sliding window"}
        yield Finding(
            "attention pattern",
            f"{key} gives layer {layer} {kinds[found[layer]]}, but models of {config.architecture} have "
            f"{kinds[wanted[layer]]} there (full attention in one of {period} layers, first in layer {full}): answers "
            "will be worse; get a current conversion",
        )


def _check_heads(file: ModelFile, config: ModelConfig, known: KnownModel) -> Iterator[Finding]:
    """Heads that are cut otherwise leave the shapes of all matrices as they are."""
    replaced = getattr(file.metadata, "replaced_keys", ())
    for name, found, wanted in (
        ("head_count", max(config.num_heads, default=0), known.num_heads),
        ("head_count_kv", max(config.num_kv_heads, default=0), known.num_kv_heads),
    ):
        key = f"{config.architecture}.attention.{name}"
        if wanted and found != wanted and key not in replaced:
            yield Finding(
                "attention heads",
                f"{key} is {found}, but {known.name} has {wanted}: its answers will mean nothing; get a current "
                f"conversion, or set it (--set {key}={wanted})",
            )
            return
