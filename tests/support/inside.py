"""What a loaded model is made of, for tests of what lies below: the one place that looks inside of an LLM."""

from localinfer.engine.engine import Engine
from localinfer.llm import LLM
from localinfer.models.load.loader import Model


def engine_of(llm: LLM) -> Engine:
    """Its engine, with the memory of keys and values."""
    return llm._engine


def model_of(llm: LLM) -> Model:
    """The model that its engine runs."""
    return llm._model
