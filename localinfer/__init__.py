"""localinfer: a quantized LLM runtime for one person on their own machine."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localinfer import errors
    from localinfer.constraint import Grammar, JsonObject, JsonSchema, Regex
    from localinfer.llm import LLM
    from localinfer.loading import load, load_tokenizer
    from localinfer.models.rope_options import RopeOptions
    from localinfer.text_stream import Completion

_CHECKOUT = Path(__file__).parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_CHECKOUT / "kernels" / "ops.py").is_file():
    # Python run in a checkout finds this folder before any installed copy; the floors below lie beside it there.
    __path__.append(str(_CHECKOUT))

__all__ = [
    "LLM",
    "Completion",
    "Grammar",
    "JsonObject",
    "JsonSchema",
    "Regex",
    "RopeOptions",
    "errors",
    "load",
    "load_tokenizer",
]

_MODULE_OF = {
    "LLM": "localinfer.llm",
    "Completion": "localinfer.text_stream",
    "Grammar": "localinfer.constraint",
    "JsonObject": "localinfer.constraint",
    "JsonSchema": "localinfer.constraint",
    "Regex": "localinfer.constraint",
    "RopeOptions": "localinfer.models.rope_options",
    "load": "localinfer.loading",
    "load_tokenizer": "localinfer.loading",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that importing the package costs nothing."""
    if name == "errors":
        return import_module("localinfer.errors")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'localinfer' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
