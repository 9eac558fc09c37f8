"""Files by which transformers 5.24 keeps a model's way to decide, as metadata: the prompt as text, the rest as JSON.

Nothing is judged here: a folder whose decisions are not run still generates and embeds. `generation.decision_folders`
reads the metadata. Names and keys are ours. Source: transformers' `decision` package and its model `jev`.
"""

import json
from dataclasses import replace
from typing import Any

from localinfer.quant.checkpoint.folder import CheckpointFolder

JEV = "jev"
"""`model_type` of a text model with a linear head."""
_SETTINGS, _TEMPLATE = "decision.json", "decision_template.jinja"
_OTHER_FORMS = ("judge_config.json", "decision_config.json")
"""Of heads that lie beside the weights, in files of their own."""
_ADAPTER = "adapter_config.json"
_OF_HEAD = ("offsets", "softcap", "num_verbalizers")


def is_jev(config: dict[str, Any]) -> bool:
    """Return whether config.json is that of a text model with such a head."""
    return config.get("model_type") == JEV


def name_head(folder: CheckpointFolder) -> None:
    """Name the matrix of such a head as the model does; transformers saves it as `weight`."""
    stored = folder.tensors.pop("weight", None) if is_jev(folder.config) else None
    if stored is not None:
        folder.tensors["proj.weight"] = replace(stored, name="proj.weight")


def decision_metadata(folder: CheckpointFolder, architecture: str) -> dict[str, object]:
    """Metadata of how a folder decides, empty where no file says so. Raises: CorruptFileError for a damaged file."""
    template, other = folder.text(_TEMPLATE), [name for name in _OTHER_FORMS if (folder.path / name).exists()]
    settings = folder.json(_SETTINGS)
    if template is None and settings is None and not other and not is_jev(folder.config):
        return {}
    text = folder.config.get("text_config")
    found = {
        "settings": settings or {},
        "other_files": [*other, *([_ADAPTER] if (folder.path / _ADAPTER).exists() else [])],
        "is_causal": not isinstance(text, dict) or text.get("is_causal") is not False,
        "head": {name: folder.config[name] for name in _OF_HEAD if name in folder.config},
    }
    prefix = f"{architecture}.decision"
    metadata: dict[str, object] = {
        f"{prefix}.type": "transformers-jev" if is_jev(folder.config) else "transformers",
        f"{prefix}.settings": json.dumps(found, sort_keys=True),
    }
    return metadata if template is None else metadata | {"tokenizer.chat_template.systemone": template}
