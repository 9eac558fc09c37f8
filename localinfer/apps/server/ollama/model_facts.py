"""What Ollama's clients ask of a model, read from its file, whether it is loaded or not."""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from localinfer.apps.server.router.model_folder import ModelSource
from localinfer.apps.server.router.served_model import ServedModel
from localinfer.errors import LocalinferError
from localinfer.models.text.fill_in import FILL_IN_ROLES
from localinfer.storage.hub.variants import quant_of

_MOST_MODELS = 256
_BLOB = re.compile(r"(?:sha256-)?(?P<digest>[0-9a-f]{64})")
"""The name of a file that is stored under its SHA-256, as the hub's cache and Ollama's do."""
_FILL_IN_KEYS = tuple(f"tokenizer.ggml.{role}_token_id" for role in FILL_IN_ROLES)
_TEMPLATE = "tokenizer.chat_template"
_LEFT_OUT = ("general.name", _TEMPLATE)
_THINKING = re.compile(r"enable_thinking|<think>|reasoning_content|<\|channel\|>|\bthinking\b")
"""What templates hold whose models reason."""
_ARRAY = re.compile(r"array of \d+ ")
"""How `describe_file` writes an array that is long."""


@dataclass(frozen=True)
class OllamaModelFacts:
    """A model's file. digest: 64 hexadecimal digits that change with the file. template: "" without one.

    model_info: its metadata under GGUF's keys, None for long arrays. tensors: name, type and shape of each.
    """

    digest: str
    num_bytes: int
    format: str
    family: str
    num_parameters: int
    quantization: str
    context_length: int | None
    embedding_length: int | None
    template: str
    license: str
    model_info: Mapping[str, Any]
    tensors: tuple[Mapping[str, Any], ...]
    problem: str = ""

    def details(self) -> dict[str, Any]:
        """What Ollama lists of a model."""
        lengths = {"context_length": self.context_length, "embedding_length": self.embedding_length}
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family] if self.family else None,
            "parameter_size": human_count(self.num_parameters) if self.num_parameters else "",
            "quantization_level": self.quantization,
            **{name: length for name, length in lengths.items() if length},
        }


def facts_of(source: ModelSource) -> OllamaModelFacts:
    """The facts of a model; of a file that cannot be read, its name and size alone. Not on the event loop."""
    try:
        status = source.path.stat()
    except OSError:
        return _unread(source, 0, "the file is missing")
    try:
        return _read(source.path, source.id, status.st_mtime_ns, status.st_size)
    except LocalinferError as error:
        return _unread(source, status.st_size, str(error))


def capabilities_of(model: ServedModel, facts: OllamaModelFacts) -> list[str]:
    """What a model can be asked for, in Ollama's words; of one that is not loaded, as its file lets expect.

    Not on the event loop: the template of one that was just loaded is looked at first.
    """
    if "completion" not in model.capabilities:
        return ["embedding"] if "embeddings" in model.capabilities else []
    told = {
        "insert": any(key in facts.model_info for key in _FILL_IN_KEYS),
        "tools": "tools" in facts.template,
        "thinking": bool(_THINKING.search(facts.template)),
    }
    if (llm := model.llm) is not None:
        # It may be unloaded meanwhile, have no tokenizer, or its file have been cut.
        with suppress(LocalinferError):
            told["insert"] = llm.tokenizer.fill_in_tokens is not None
            told |= {"tools": llm.info.supports_tools, "thinking": llm.info.supports_thinking}
    return ["completion", *(name for name, is_there in told.items() if is_there)]


def human_count(count: int) -> str:
    """A number of weights as Ollama writes it: 135M, 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            amount = count / size
            return f"{amount:.0f}{unit}" if unit != "B" and amount >= 10 else f"{amount:.1f}{unit}"
    return str(count)


@lru_cache(maxsize=_MOST_MODELS)
def _read(path: Path, model_id: str, changed: int, size: int) -> OllamaModelFacts:
    """The facts of a file, kept while it is the same. Raises: ModelFileError."""
    from localinfer.apps.show.describe import describe_file

    described = describe_file(str(path))
    info = {
        key: None if isinstance(value, str) and _ARRAY.match(value) else value
        for key, value in described.metadata.items()
    }
    template, license_name = info.get(_TEMPLATE), info.get("general.license")
    info = {key: value for key, value in info.items() if key not in _LEFT_OUT}
    # Clients show the one, and count on the other.
    info.setdefault("general.basename", model_id.rpartition("/")[2])
    info.setdefault("general.parameter_count", described.num_parameters)
    blob = _BLOB.fullmatch(path.resolve().name)
    return OllamaModelFacts(
        digest=blob["digest"] if blob is not None else _made_digest(model_id, changed, described.num_bytes),
        num_bytes=described.num_bytes,
        format="gguf" if described.gguf_version is not None else "safetensors",
        family=described.architecture,
        num_parameters=described.num_parameters,
        quantization=quant_of(path.name) or quant_of(model_id) or (described.types[0].type if described.types else ""),
        context_length=described.sizes.get("context_length"),
        embedding_length=described.sizes.get("hidden_size"),
        template=template if isinstance(template, str) else "",
        license=license_name if isinstance(license_name, str) else "",
        model_info=info,
        tensors=tuple({name: one[name] for name in ("name", "type", "shape")} for one in described.tensors),
    )


def _unread(source: ModelSource, num_bytes: int, problem: str) -> OllamaModelFacts:
    digest = _made_digest(source.id, source.created, num_bytes)
    return OllamaModelFacts(digest, num_bytes, "", "", 0, "", None, None, "", "", {}, (), problem)


def _made_digest(*facts: object) -> str:
    """A digest of a file's name, time and size: its contents may be many gigabytes."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()
