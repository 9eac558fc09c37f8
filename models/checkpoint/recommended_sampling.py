"""How a Hugging Face folder says its model should be sampled, under the keys that GGUF has for it."""

from localinfer.models.decoder.metadata_keys import SAMPLING_PREFIX
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.types import is_finite_number

_KEYS = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "penalty_repeat",
}
"""Setting of generation_config.json -> key."""
_OF_ANY_CHOICE = "repetition_penalty"
"""What holds without sampling too."""


def read_sampling(folder: CheckpointFolder) -> dict[str, object]:
    """The metadata of the numbers in generation_config.json, without those that its `do_sample` switches off.

    Raises: CorruptFileError if the file is damaged.
    """
    settings = folder.json("generation_config.json") or {}
    samples = settings.get("do_sample") is not False
    return {
        f"{SAMPLING_PREFIX}{key}": value
        for name, key in _KEYS.items()
        if (samples or name == _OF_ANY_CHOICE) and is_finite_number(value := settings.get(name))
    }
