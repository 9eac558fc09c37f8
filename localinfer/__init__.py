"""localinfer: a quantized LLM runtime for one person on their own machine."""

from __future__ import annotations

import os

# As in `typing`, which is not imported: a command that is interrupted before its first line shows a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from localinfer import errors
    from localinfer.async_api import aload
    from localinfer.chat.constraints import Grammar, JsonObject, JsonSchema, Regex
    from localinfer.completion import Completion, Stats, StreamEvent
    from localinfer.generation_options import GenerationOptions
    from localinfer.llm import LLM
    from localinfer.loading import load, load_tokenizer
    from localinfer.models.decoder.rope import RopeOptions
    from localinfer.stream import TextStream

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CHECKOUT = os.path.dirname(_FOLDER)
if not os.path.isdir(os.path.join(_FOLDER, "kernels")) and os.path.isfile(os.path.join(_CHECKOUT, "kernels", "ops.py")):
    # Python run in a checkout finds this folder before any installed copy; the floors below lie beside it there.
    __path__.append(_CHECKOUT)

__all__ = [
    "LLM",
    "Completion",
    "GenerationOptions",
    "Grammar",
    "JsonObject",
    "JsonSchema",
    "Regex",
    "RopeOptions",
    "Stats",
    "StreamEvent",
    "TextStream",
    "aload",
    "errors",
    "load",
    "load_tokenizer",
]

_MODULE_OF = {
    "LLM": "localinfer.llm",
    "Completion": "localinfer.completion",
    "GenerationOptions": "localinfer.generation_options",
    "Grammar": "localinfer.chat.constraints",
    "JsonObject": "localinfer.chat.constraints",
    "JsonSchema": "localinfer.chat.constraints",
    "Regex": "localinfer.chat.constraints",
    "RopeOptions": "localinfer.models.decoder.rope",
    "Stats": "localinfer.completion",
    "StreamEvent": "localinfer.completion",
    "TextStream": "localinfer.stream",
    "aload": "localinfer.async_api",
    "load": "localinfer.loading",
    "load_tokenizer": "localinfer.loading",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that importing the package costs nothing."""
    from importlib import import_module

    if name == "errors":
        return import_module("localinfer.errors")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'localinfer' has no attribute {name!r}")
    if module not in ("localinfer.async_api", "localinfer.chat.constraints"):
        import_module("localinfer.kernels.address_space").require_libraries()
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
