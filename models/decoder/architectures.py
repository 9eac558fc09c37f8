"""The supported architectures: GGUF's name of each, and its record.

An architecture whose record depends on the model's sizes has a function from `ModelConfig` to the record. The tables
are in files by family: an entry belongs in `hybrid_architectures.py` if it has recurrent layers, experts or latent
attention, and in `dense_architectures.py` otherwise; encoders are in `encoder_architectures.py`.

Others are refused with the reason where their kind is known, else with the nearest names: GGUF's
`general.architecture` and config.json's `model_type` in the same words. `localinfer list --architectures` prints both.
"""

from collections.abc import Callable, Collection, Mapping
from difflib import SequenceMatcher

from localinfer.errors import UnsupportedFormatError
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.dense_architectures import GPT_FAMILY, LLAMA_FAMILY, WINDOWED
from localinfer.models.decoder.encoder_architectures import DECODERS_OF_THEIR_KIND, ENCODERS
from localinfer.models.decoder.hybrid_architectures import (
    LATENT,
    MIXTURES,
    RECURRENT_ARCHITECTURES,
    STATE_SPACE_ARCHITECTURES,
)

NUM_NEAREST = 3
WHERE_ALL_ARE = "`localinfer list --architectures` has all"
_TOO_FAR = 0.3
"""Share of letters in common below which a name says nothing."""

CROSS_ATTENTION = "whose layers also attend to images (cross attention)"
DIFFUSION = "a model that writes by diffusion, not token after token"
ENCODER_DECODER = "an encoder and a decoder that attends to it (cross attention)"
HEARS = "a model that turns speech into text"
SPEAKS = "a model that makes sound"
SEES = "a model that reads images"
COMPARES = "a model that compares images, sounds or videos with texts by their vectors"
RETRIEVES = "a model that gives a vector per token of a page or a query, for retrieval"
OWN_TEXT = "a model that sees or hears around a text model of a kind of its own"
DRAFTS = "a model that drafts from the hidden states of another one"
REPEATED = "whose layers run several times"
HYPER_CONNECTIONS = "whose layers are joined by hyper-connections of several streams"
COMPRESSED = "whose attention reads compressed stretches of keys, in layers joined by hyper-connections"
BLOCK_RESIDUALS = "whose layers attend to the results of former layers"
GROUPED_EXPERTS = "whose experts share smaller experts in groups"
EARLIER_RWKV = "with recurrent layers of an earlier kind (RWKV 6)"
SPARSE_DELTA = "with n-gram embeddings, and an indexer beside its delta nets"


def named(reasons: Mapping[str, str]) -> dict[str, str]:
    """Reasons by name, of the names that each reason has, in one text."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


NOT_RUN = named(
    {
        DIFFUSION: "diffusion-gemma dream llada llada-moe rnd1",
        DRAFTS: "dflash eagle3",
        SPEAKS: "pockettts qwen3tts wavtokenizer-dec",
        SEES: "clip",
        ENCODER_DECODER: "t5 t5encoder",
        REPEATED: "hrm_text",
        HYPER_CONNECTIONS: "glm5-next hy_v4",
        COMPRESSED: "deepseek4 deepseek4v",
        BLOCK_RESIDUALS: "kimi-k3",
        SPARSE_DELTA: "qwen4exp",
        "with recurrent layers in the place of another model's attention": "arwkv7 rwkv6qwen2",
        EARLIER_RWKV: "rwkv6",
        GROUPED_EXPERTS: "grovemoe",
    }
)
"""Architectures of GGUF files that do not run, and why: what follows their names in a sentence."""


def spelling(name: str) -> str:
    """A name's letters and digits alone: kinds are spelled with dashes, underscores and capitals, or without."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def nearest_names(name: str, known: Collection[str]) -> list[str]:
    """Up to three of the known names that are spelled most like one, the likest first."""
    wanted = spelling(name)

    def likeness(other: str) -> float:
        letters = spelling(other)
        common = next((n for n, (a, b) in enumerate(zip(wanted, letters, strict=False)) if a != b), None)
        start = (min(len(wanted), len(letters)) if common is None else common) / max(len(wanted), len(letters), 1)
        matcher = SequenceMatcher(None, wanted, letters, autojunk=False)
        # A name of a file may have megabytes: letters of one that is far too long are not compared.
        is_near = matcher.real_quick_ratio() + start >= 2 * _TOO_FAR
        # Names of a family begin alike, and differ in a generation or a size.
        return ((matcher.ratio() if is_near else 0.0) + start) / 2

    # Of names that are as like, the later in the alphabet has the higher number.
    found = sorted(((likeness(other), other) for other in known), reverse=True)[:NUM_NEAREST]
    return [other for score, other in found if score >= _TOO_FAR]


def refuse_kind(where: str, name: object, known: Collection[str], reason: str | None, way_out: str) -> Exception:
    """The error for a kind of model that does not run. where: what names it; reason: what follows its name, if known;
    way_out: what to do instead, as a sentence."""
    if reason is not None:
        return UnsupportedFormatError(f"{where} is {name!r:.60}, {reason}, which this version does not run. {way_out}")
    nearest = nearest_names(name, known) if isinstance(name, str) else []
    near = f", the nearest of them {_joined([repr(other) for other in nearest])}" if nearest else ""
    return UnsupportedFormatError(
        f"{where} is {name!r:.60}, not one of the {len(known)} that this version runs{near} ({WHERE_ALL_ARE}). "
        f"{way_out}"
    )


def _joined(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    **LLAMA_FAMILY,
    **GPT_FAMILY,
    **WINDOWED,
    **MIXTURES,
    **LATENT,
    **RECURRENT_ARCHITECTURES,
    **STATE_SPACE_ARCHITECTURES,
    **ENCODERS,
    **DECODERS_OF_THEIR_KIND,
}


def check_architecture(name: str) -> None:
    """Raise UnsupportedFormatError, with the reason or the nearest names, unless this version runs it."""
    if name in OF_ANOTHER_CACHE:
        raise UnsupportedFormatError(
            f"general.architecture is {name!r}, a draft model without keys and values: it attends to those of the "
            f"{OF_ANOTHER_CACHE[name]!r} model that it drafts for, and runs beside that only. Load that model, and "
            "give this file as its draft (--draft)."
        )
    if name not in ARCHITECTURES:
        way_out = "Update localinfer or choose another model."
        raise refuse_kind("general.architecture", name, ARCHITECTURES, NOT_RUN.get(name), way_out)


def find_architecture(config: ModelConfig) -> Architecture:
    """Describe a model. Raises: as `check_architecture`."""
    check_architecture(config.architecture)
    found = ARCHITECTURES[config.architecture]
    return found if isinstance(found, Architecture) else found(config)
