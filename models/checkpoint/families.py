"""The model types of config.json that run here, and which of them a file is.

A family is a table; the tables are in files by kin.
"""

from collections.abc import Mapping, Sequence

from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.bert_kin_families import BERT_KIN
from localinfer.models.checkpoint.delta_families import DELTA
from localinfer.models.checkpoint.dense_families import DENSE
from localinfer.models.checkpoint.encoder_families import ENCODERS
from localinfer.models.checkpoint.family import Family
from localinfer.models.checkpoint.gemma_families import GEMMA4
from localinfer.models.checkpoint.gpt_families import GPT
from localinfer.models.checkpoint.latent_families import LATENT
from localinfer.models.checkpoint.minimax_families import MINIMAX
from localinfer.models.checkpoint.mixture_families import MIXTURES
from localinfer.models.checkpoint.state_space_families import STATE_SPACE
from localinfer.models.checkpoint.uneven_families import UNEVEN
from localinfer.models.checkpoint.unsupported_types import NOT_RUN_TYPES
from localinfer.models.checkpoint.wrappers import read_text_config
from localinfer.models.decoder.architectures import ARCHITECTURES
from localinfer.models.decoder.refusals import refuse_kind, spelling

FAMILIES: dict[str, Family] = {
    **DENSE,
    **DELTA,
    **STATE_SPACE,
    **GPT,
    **MIXTURES,
    **MINIMAX,
    **LATENT,
    **UNEVEN,
    **GEMMA4,
    **ENCODERS,
    **BERT_KIN,
}
"""By `model_type`."""


def find_family(config: Mapping[str, object]) -> Family:
    """Return the family of a config.json: that of its text model where the whole, which also sees or hears, has none.

    Raises: UnsupportedFormatError for any other, with the reason or the nearest types.
    """
    text = read_text_config(config, FAMILIES)
    if isinstance(text.model_type, str) and text.model_type in FAMILIES:
        return FAMILIES[text.model_type]
    raise _refusal([(f"config.json: {where}", kind) for where, kind in text.types.items()])


def _refusal(kinds: Sequence[tuple[str, object]]) -> Exception:
    """The error for types that are not in the table, of the whole and of its text model: the first whose reason, or
    whose way out, is known."""
    gguf_names = {spelling(name): name for name in ARCHITECTURES}
    for where, name in kinds:
        if not isinstance(name, str):
            continue
        if name in NOT_RUN_TYPES:
            reason = NOT_RUN_TYPES[name]
            return refuse_kind(where, name, FAMILIES, reason, "Update localinfer or choose another model.")
        if spelling(name) in gguf_names:
            return UnsupportedFormatError(
                f"{where} is {name!r:.60}, which this version runs from GGUF files (as "
                f"{gguf_names[spelling(name)]!r}) and not from folders. Use a GGUF file of the model."
            )
    way_out = "Use a GGUF file of the model, update localinfer, or choose another model."
    return refuse_kind(*kinds[0], FAMILIES, None, way_out)
