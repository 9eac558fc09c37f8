"""The supported architectures: GGUF's name of each, and its record.

An architecture whose record depends on the model's sizes has a function from `ModelConfig` to the record. The tables
are in files by family: an entry belongs in `latent_architectures.py` if it has latent attention, else in
`mixture_architectures.py` if it has experts, else in `windowed_architectures.py` if its layers differ, else in
`gpt_architectures.py` if it has layer norms, and in `llama_architectures.py` otherwise. Gemma's kin, whatever their
layers, are in the windowed one.
"""

from collections.abc import Callable

from localinfer.errors import UnsupportedFormatError
from localinfer.models.decoder.architecture import Architecture
from localinfer.models.decoder.block_sizes import OF_ANOTHER_CACHE
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.encoder_architectures import DECODERS_OF_THEIR_KIND, ENCODERS
from localinfer.models.decoder.gpt_architectures import GPT_KIN
from localinfer.models.decoder.latent_architectures import LATENT
from localinfer.models.decoder.llama_architectures import LLAMA_KIN
from localinfer.models.decoder.mixture_architectures import MIXTURES
from localinfer.models.decoder.recurrent_architectures import RECURRENT_ARCHITECTURES
from localinfer.models.decoder.refusals import NOT_RUN, refuse_kind
from localinfer.models.decoder.state_space_architectures import STATE_SPACE_ARCHITECTURES
from localinfer.models.decoder.windowed_architectures import WINDOWED

ARCHITECTURES: dict[str, Architecture | Callable[[ModelConfig], Architecture]] = {
    **LLAMA_KIN,
    **GPT_KIN,
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
