"""localinfer: a quantized LLM runtime for one person on their own machine."""

from __future__ import annotations

import os

# As in `typing`, which is not imported: a command that is interrupted before its first line shows a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from localinfer import errors
    from localinfer.engine.admission import EngineLimits
    from localinfer.engine.cache.block_hashes import block_hashes
    from localinfer.engine.cache.stats import SnapshotStats
    from localinfer.generation.decision_calibration import DecisionCalibration, DecisionOptions
    from localinfer.generation.options import (
        ChatOptions,
        Constraint,
        GenerationOptions,
        Grammar,
        JsonObject,
        JsonSchema,
        Regex,
        ReplyOptions,
        StructuralTag,
        ToolChoice,
    )
    from localinfer.generation.questions import (
        Choice,
        ChoiceAnswer,
        Decisions,
        Score,
        ScoreAnswer,
        YesNo,
        YesNoAnswer,
    )
    from localinfer.generation.session.prompts import SessionOptions
    from localinfer.generation.session.python_tools import CallOutcome, RequestedCall, Tool
    from localinfer.generation.session.session import Session
    from localinfer.generation.stream import (
        CompactionStats,
        Completion,
        Stats,
        StreamEvent,
        TextStream,
        ToolCall,
        ToolCallDelta,
    )
    from localinfer.llm import LLM, Prompt
    from localinfer.loading.availability import Availability, availability
    from localinfer.loading.load import aload, load, load_tokenizer
    from localinfer.loading.warm_up import WarmUp, warm_up
    from localinfer.models.decoder.rope_options import RopeOptions
    from localinfer.models.text.tokenizer import Tokenizer
    from localinfer.storage.kv_events import KVEventPublisher, KVEventsConfig
    from localinfer.system.crash_files import report_crashes
    from localinfer.system.folders import set_cache_folder
    from localinfer.system.freezing import freeze_support
    from localinfer.types import Beam, BeamCompletion, ModelInfo, ProgressCallback, RankedDocument, TokenLogprobs

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_CHECKOUT = os.path.dirname(_FOLDER)
if not os.path.isdir(os.path.join(_FOLDER, "kernels")) and os.path.isfile(
    os.path.join(_CHECKOUT, "kernels", "program.py")
):
    # Python run in a checkout finds this folder before any installed copy; the floors below lie beside it there.
    __path__.append(_CHECKOUT)

if os.environ.get("LOCALINFER_OFFLINE"):
    from localinfer.system import offline

    if offline.is_asked():
        offline.begin()

__all__ = [
    "Availability",
    "Beam",
    "BeamCompletion",
    "CallOutcome",
    "ChatOptions",
    "Choice",
    "ChoiceAnswer",
    "CompactionStats",
    "Completion",
    "Constraint",
    "DecisionCalibration",
    "DecisionOptions",
    "Decisions",
    "EngineLimits",
    "GenerationOptions",
    "Grammar",
    "JsonObject",
    "JsonSchema",
    "KVEventPublisher",
    "KVEventsConfig",
    "LLM",
    "ModelInfo",
    "ProgressCallback",
    "Prompt",
    "RankedDocument",
    "Regex",
    "ReplyOptions",
    "RequestedCall",
    "RopeOptions",
    "Score",
    "ScoreAnswer",
    "Session",
    "SessionOptions",
    "SnapshotStats",
    "Stats",
    "StreamEvent",
    "StructuralTag",
    "TextStream",
    "TokenLogprobs",
    "Tokenizer",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "WarmUp",
    "YesNo",
    "YesNoAnswer",
    "aload",
    "availability",
    "block_hashes",
    "errors",
    "freeze_support",
    "load",
    "load_tokenizer",
    "report_crashes",
    "set_cache_folder",
    "warm_up",
]

_MODULE_OF = {
    "Availability": "localinfer.loading.availability",
    "Beam": "localinfer.types",
    "BeamCompletion": "localinfer.types",
    "CallOutcome": "localinfer.generation.session.python_tools",
    "ChatOptions": "localinfer.generation.options",
    "Choice": "localinfer.generation.questions",
    "ChoiceAnswer": "localinfer.generation.questions",
    "CompactionStats": "localinfer.generation.stream",
    "Completion": "localinfer.generation.stream",
    "Constraint": "localinfer.generation.options",
    "DecisionCalibration": "localinfer.generation.decision_calibration",
    "DecisionOptions": "localinfer.generation.decision_calibration",
    "Decisions": "localinfer.generation.questions",
    "EngineLimits": "localinfer.engine.admission",
    "GenerationOptions": "localinfer.generation.options",
    "Grammar": "localinfer.generation.options",
    "JsonObject": "localinfer.generation.options",
    "JsonSchema": "localinfer.generation.options",
    "KVEventPublisher": "localinfer.storage.kv_events",
    "KVEventsConfig": "localinfer.storage.kv_events",
    "LLM": "localinfer.llm",
    "ModelInfo": "localinfer.types",
    "ProgressCallback": "localinfer.types",
    "Prompt": "localinfer.llm",
    "RankedDocument": "localinfer.types",
    "Regex": "localinfer.generation.options",
    "ReplyOptions": "localinfer.generation.options",
    "RequestedCall": "localinfer.generation.session.python_tools",
    "RopeOptions": "localinfer.models.decoder.rope_options",
    "Score": "localinfer.generation.questions",
    "ScoreAnswer": "localinfer.generation.questions",
    "Session": "localinfer.generation.session.session",
    "SessionOptions": "localinfer.generation.session.prompts",
    "SnapshotStats": "localinfer.engine.cache.stats",
    "Stats": "localinfer.generation.stream",
    "StreamEvent": "localinfer.generation.stream",
    "StructuralTag": "localinfer.generation.options",
    "TextStream": "localinfer.generation.stream",
    "TokenLogprobs": "localinfer.types",
    "Tokenizer": "localinfer.models.text.tokenizer",
    "Tool": "localinfer.generation.session.python_tools",
    "ToolCall": "localinfer.generation.stream",
    "ToolCallDelta": "localinfer.generation.stream",
    "ToolChoice": "localinfer.generation.options",
    "WarmUp": "localinfer.loading.warm_up",
    "YesNo": "localinfer.generation.questions",
    "YesNoAnswer": "localinfer.generation.questions",
    "aload": "localinfer.loading.load",
    "availability": "localinfer.loading.availability",
    "block_hashes": "localinfer.engine.cache.block_hashes",
    "freeze_support": "localinfer.system.freezing",
    "load": "localinfer.loading.load",
    "load_tokenizer": "localinfer.loading.load",
    "report_crashes": "localinfer.system.crash_files",
    "set_cache_folder": "localinfer.system.folders",
    "warm_up": "localinfer.loading.warm_up",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are first used, so that importing the package costs nothing.

    Their modules import neither NumPy nor LLVM, so that an event loop or a window may name them; `load` does, in the
    thread that calls it.
    """
    from importlib import import_module

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
