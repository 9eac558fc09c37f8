"""The model types of config.json that run here, and which of them a file is.

A family is a table; the tables are in files by kin.
"""

from collections.abc import Mapping

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.delta_families import DELTA
from localinfer.models.checkpoint.dense_families import DENSE
from localinfer.models.checkpoint.encoder_families import ENCODERS
from localinfer.models.checkpoint.family import Family
from localinfer.models.checkpoint.gemma_families import GEMMA4
from localinfer.models.checkpoint.gpt_families import GPT
from localinfer.models.checkpoint.latent_families import LATENT
from localinfer.models.checkpoint.mixture_families import MIXTURES
from localinfer.models.checkpoint.state_space_families import STATE_SPACE
from localinfer.models.checkpoint.uneven_families import UNEVEN

FAMILIES: dict[str, Family] = {
    **DENSE,
    **DELTA,
    **STATE_SPACE,
    **GPT,
    **MIXTURES,
    **LATENT,
    **UNEVEN,
    **GEMMA4,
    **ENCODERS,
}
"""By `model_type`."""


def find_family(config: Mapping[str, object]) -> Family:
    """Return the family of a config.json: that of its text model where the whole, which also sees or hears, has none.

    Raises: UnsupportedFormatError, listing the types known, for any other.
    """
    found = config.get("model_type")
    nested = config.get("text_config")
    types = [found, nested.get("model_type") if isinstance(nested, dict) else None]
    for name in types:
        if isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedFormatError(
        f"config.json: model_type is {found!r:.60}; this version runs folders of {', '.join(FAMILIES)}. "
        "Use a GGUF file of the model, update localinfer, or choose another model."
    )
