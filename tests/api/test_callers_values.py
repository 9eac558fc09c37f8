"""What a caller passes is read once: changing it afterwards changes no answer, and nothing that is kept."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.sampling.sampler import SamplingParams
from localinfer.engine.speculation.costs import VerificationCosts
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.generation.options import JsonSchema
from localinfer.llm import LLM
from localinfer.models.decoder.block_config import Pooling
from tests.engine.fakes import FakeModel, FakeProgram, FakeTemplate, fake_model, hashed_logits

IDS = list(range(40, 64))
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
Values = dict[str, Any]


@dataclass
class PooledModel(FakeModel):
    """A fake model whose hidden states are its logits."""

    pooling: Pooling = Pooling.MEAN
    has_dense: bool = False
    file = SimpleNamespace(metadata={})

    def text_program(self, pooling: Pooling, max_rows: int) -> FakeProgram:
        return FakeProgram(self.program.vocab_size, self.program.logits_of, 5, 3)


class Meddler:
    """A model during whose passes, from the first on, somebody may change what was passed."""

    def __init__(self) -> None:
        self.change: Callable[[], None] = lambda: None

    def logits(self, history: NDArray[np.int32], vocab_size: int) -> NDArray[np.float32]:
        self.change()
        return hashed_logits(history, vocab_size)

    def llm(self) -> LLM:
        made = fake_model(self.logits, context_length=1024, max_batch_rows=16, max_output_rows=8)
        model = PooledModel(made.program, made.config, chat_template=FakeTemplate())
        speculation = Speculation(VerificationCosts([1.0] * 8), ngram=NgramDrafter(), model=None, clock=lambda: 0.0)
        return LLM(model, speculation=speculation)  # type: ignore[arg-type]


def spoil(value: Any) -> None:
    """Change a value, and all that it holds, in place."""
    if isinstance(value, np.ndarray):
        value[...] = 9
    elif isinstance(value, dict | list):
        for inner in list(value.values() if isinstance(value, dict) else value):
            spoil(inner)
        value.clear()
        if isinstance(value, list):
            value.extend([9, 9])


def ids(dtype: Any) -> Any:
    return IDS.copy() if dtype is list else np.array(IDS, dtype)


def messages() -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "yes"},
    ]


def tools() -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": copy.deepcopy(PARAMETERS)}}]


def told(found: Any) -> Any:
    """What is compared of a result."""
    if hasattr(found, "result"):
        found = found.result()
    if isinstance(found, list) and found and hasattr(found[0], "stats"):
        return [(one.text, one.token_ids) for one in found]
    if hasattr(found, "tool_calls"):
        calls = [(call.name, call.arguments) for call in found.tool_calls]
        return found.text, found.token_ids, found.logprobs, found.reasoning, calls
    return found.tolist() if isinstance(found, np.ndarray) else found


OPTIONS: dict[str, Callable[[], Any]] = {
    "stop": lambda: ["zz", "q"],
    "logit_bias": lambda: {65: 3.0, 70: 100.0},
    "dry_breaker_ids": lambda: [65, 66],
    "dry_sequence_breakers": lambda: ["a", "b"],
    "prediction": lambda: np.array(IDS, np.int32),
}
USES: dict[str, tuple[Callable[[], Values], Callable[[LLM, Values], Any]]] = {}
for _dtype in (np.int32, np.int64, np.uint8, list):
    _name = _dtype.__name__
    USES |= {
        f"stream {_name}": (
            lambda dtype=_dtype: {"prompt": ids(dtype)},
            lambda llm, values: llm.stream(**values, temperature=0, max_tokens=12),
        ),
        f"prediction {_name}": (
            lambda dtype=_dtype: {"prediction": ids(dtype)},
            lambda llm, values: llm.stream(IDS, **values, temperature=0, max_tokens=12),
        ),
        f"complete_many {_name}": (
            lambda dtype=_dtype: {"prompt": ids(dtype)},
            lambda llm, values: llm.complete_many(**values, n=3, best_of=4, seed=1, max_tokens=5),
        ),
        f"beam_search {_name}": (
            lambda dtype=_dtype: {"prompt": ids(dtype)},
            lambda llm, values: llm.beam_search(**values, num_beams=3, max_tokens=4),
        ),
        f"score {_name}": (
            lambda dtype=_dtype: {"token_ids": ids(dtype)},
            lambda llm, values: llm.score(**values, top=2),
        ),
        f"embed {_name}": (lambda dtype=_dtype: {"prompt": ids(dtype)}, lambda llm, values: llm.embed(**values)),
        f"logits {_name}": (lambda dtype=_dtype: {"token_ids": ids(dtype)}, lambda llm, values: llm.logits(**values)),
    }
for _option, _make in OPTIONS.items():
    USES[f"option {_option}"] = (
        lambda option=_option, make=_make: {option: make()},
        lambda llm, values: llm.stream(
            IDS, **{"dry_multiplier": 2.0, "temperature": 1.0, "seed": 4, "max_tokens": 20, **values}
        ),
    )
    USES[f"many with {_option}"] = (
        lambda option=_option, make=_make: {option: make()},
        lambda llm, values: llm.complete_many(
            IDS, n=3, **{"dry_multiplier": 2.0, "temperature": 1.0, "seed": 4, "max_tokens": 9, **values}
        ),
    )
USES |= {
    "messages": (
        lambda: {"messages": messages()},
        lambda llm, values: llm.stream_chat(**values, temperature=0, max_tokens=9),
    ),
    "messages of many": (
        lambda: {"messages": messages()},
        lambda llm, values: llm.chat_many(**values, n=3, seed=5, max_tokens=9),
    ),
    "tools": (
        lambda: {"tools": tools()},
        lambda llm, values: llm.stream_chat(messages(), **values, tool_choice="required", seed=5, max_tokens=60),
    ),
    "tools of many": (
        lambda: {"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "f"}}},
        lambda llm, values: llm.chat_many(messages(), n=2, **values, seed=5, max_tokens=60),
    ),
    "template_variables": (
        lambda: {"template_variables": {"names": ["a"]}},
        lambda llm, values: llm.chat_many(messages(), n=2, **values, seed=5, max_tokens=9),
    ),
}


@pytest.mark.parametrize("use", USES)
def test_changing_what_was_passed_changes_no_answer(use: str) -> None:
    make, call = USES[use]
    quiet = Meddler().llm()
    wanted = told(call(quiet, make()))
    spoiled = make()
    spoil(spoiled)
    meddler = Meddler()
    llm = meddler.llm()
    values = make()
    meddler.change = lambda: [spoil(value) for value in values.values()] and None
    assert told(call(llm, values)) == wanted
    assert repr(values) == repr({name: values[name] for name in make()}) != repr(make()), "it was changed"
    # Nor does what is kept of it: neither the text that was meant nor the one that was made of it is mistaken.
    meddler.change = lambda: None
    assert told(call(llm, make())) == wanted
    for prompt in (IDS, [9] * len(IDS), [9, 9]):
        options: Any = {"temperature": 0, "max_tokens": 12}
        assert told(llm.stream(prompt, **options)) == told(quiet.stream(prompt, **options))


def test_a_stream_that_has_begun_does_not_follow_its_prompt_array() -> None:
    meddler = Meddler()
    llm, prompt = meddler.llm(), np.array(IDS, np.int32)
    stream = llm.stream(prompt, temperature=0, max_tokens=30)
    events = [next(stream)]
    prompt[:] = 9
    events += list(stream)
    fresh = Meddler().llm()
    assert [event.token_id for event in events] == fresh.complete(IDS, temperature=0, max_tokens=30).token_ids
    assert llm.logits([9] * 24).tolist() == fresh.logits([9] * 24).tolist()
    other = llm.complete([9] * 24, temperature=0, max_tokens=8)
    assert other.token_ids == fresh.complete([9] * 24, temperature=0, max_tokens=8).token_ids


@pytest.mark.parametrize("form", ["mapping", "text"])
def test_a_schema_is_what_it_was_when_the_constraint_was_made(form: str) -> None:
    schema: Any = copy.deepcopy(PARAMETERS)
    constraint = JsonSchema(schema if form == "mapping" else json.dumps(schema))
    spoil(schema)
    llm = Meddler().llm()
    text = llm.complete("x", constraint=constraint, seed=1, max_tokens=40).text
    assert json.loads(text)["a"] in ("x", "y")


def test_sampling_parameters_are_what_they_were_when_they_were_made() -> None:
    bias, breakers = {65: 1.0}, [65]
    params = SamplingParams(logit_bias=bias, dry_breaker_ids=breakers)
    bias[66], breakers[0] = 2.0, 3
    assert (params.logit_bias, params.dry_breaker_ids) == ({65: 1.0}, frozenset({65}))


def test_results_are_the_callers_own() -> None:
    llm = Meddler().llm()
    first = llm.complete(IDS, temperature=0, max_tokens=8, logprobs=2)
    wanted, logits = copy.deepcopy(first), llm.logits(IDS).copy()
    spoil(first.token_ids)
    spoil(first.logprobs)
    spoil(llm.logits(IDS))
    again = llm.complete(IDS, temperature=0, max_tokens=8, logprobs=2)
    assert (again.token_ids, again.logprobs) == (wanted.token_ids, wanted.logprobs)
    assert llm.logits(IDS).tolist() == logits.tolist()
