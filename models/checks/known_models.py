"""Published models that are known by their sizes, and what they were trained with.

`known_models.json` lists them, each with the page of its config.json or of a listing of its metadata as `source`.
Models that were trained further keep their sizes.
"""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path

from localinfer.models.decoder.config import ModelConfig

KNOWN_MODELS_FILE = Path(__file__).with_name("known_models.json")
_TOLERANCE = 0.005
"""Share by which a vocabulary may differ: further training adds tokens, conversion pads. DeepSeek Coder 6.7B has the
sizes of Llama 2 7B and 0.8 % more tokens, and another base."""


@dataclass(frozen=True, kw_only=True)
class KnownModel:
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
    """Of the norms."""
    has_output: bool | None = None
    """Whether it has an output matrix of its own; None where some have and some have not."""
    has_factors: bool = False
    """Whether longer contexts come with a divisor for each frequency (`rope_freqs.weight`)."""
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
