"""What a loaded model is made of, for tests of what lies below: the one place that looks inside of an LLM."""

from dataclasses import replace

from localinfer.engine.engine import Engine
from localinfer.llm import LLM
from localinfer.models.load.loader import Model
from localinfer.models.text.chat_template import ChatTemplate


def engine_of(llm: LLM) -> Engine:
    """Its engine, with the memory of keys and values."""
    return llm._engine


def model_of(llm: LLM) -> Model:
    """The model that its engine runs."""
    return llm._model


def with_template(model: Model, template: ChatTemplate) -> Model:
    """The model with another chat template than its file's."""
    made = replace(model)
    made.__dict__["chat_template"] = template
    return made
