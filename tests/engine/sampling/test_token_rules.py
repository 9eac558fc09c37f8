"""Rules about single tokens: what they forbid, beside a grammar and drafts."""

from collections.abc import Iterator

import numpy as np
import pytest

import localinfer
from localinfer.engine.sampling.mask import GuidingMask, rules_mask
from localinfer.engine.sampling.params import TokenRules
from localinfer.errors import RequestError
from localinfer.llm import LLM

SIZE, END = 12, 11
PROMPT = [1, 2, 3]


class Grammar:
    """Allows even tokens and the end, or the end alone behind a token 8."""

    def __call__(self, history):
        allowed = np.zeros(SIZE, np.bool_)
        allowed[END] = True
        if history[-1] != 8:
            allowed[::2] = True
        return allowed

    def forced(self, history, most):
        return [4][:most]

    def prepare(self, history, position):
        pass

    def count_allowed(self, history, draft):
        return len(draft)


def allowed(rules, ids, mask=None):
    made = rules_mask(rules, mask, start=len(PROMPT), vocab_size=SIZE, end_ids={END})
    return np.flatnonzero(made(np.array([*PROMPT, *ids], np.int32))).tolist()


def test_rules_forbid_what_they_say():
    everything = list(range(SIZE))
    assert allowed(TokenRules(), []) == everything and TokenRules().is_empty
    assert allowed(TokenRules(allowed_ids=[5, 7, 5]), []) == [5, 7, END]
    assert allowed(TokenRules(min_tokens=2), [4]) == everything[:-1]
    assert allowed(TokenRules(min_tokens=2), [4, 5]) == everything
    rules = TokenRules(bad_sequences=[[9], [2, 3, 4], [3, 5], [6, 6]])
    # The prompt counts too: what was begun there is not ended.
    assert allowed(rules, []) == [0, 1, 2, 3, 6, 7, 8, 10, 11]
    assert allowed(rules, [6]) == [0, 1, 2, 3, 4, 5, 7, 8, 10, 11]
    assert allowed(rules, [3]) == [0, 1, 2, 3, 4, 6, 7, 8, 10, 11]


def test_rules_hold_beside_a_grammar_which_may_end():
    both = TokenRules(allowed_ids=[2, 3, 8], min_tokens=3)
    assert allowed(both, [], Grammar()) == [2, 8]
    assert allowed(both, [8], Grammar()) == [END], "nothing else could follow"
    mask = rules_mask(both, Grammar(), start=3, vocab_size=SIZE, end_ids={END})
    assert isinstance(mask, GuidingMask) and mask.forced(np.array(PROMPT, np.int32), 4) == [4]
    assert mask.count_allowed(np.array(PROMPT, np.int32), [2, 2, 4, 2]) == 2


@pytest.mark.parametrize(
    ("rules", "field"),
    [
        (TokenRules(allowed_ids=[SIZE]), "allowed_token_ids"),
        (TokenRules(allowed_ids=[]), "allowed_token_ids"),
        (TokenRules(bad_sequences=[[1] * 65]), "bad_words"),
    ],
)
def test_what_cannot_be_a_rule_is_refused(rules, field):
    with pytest.raises(RequestError) as refused:
        allowed(rules, [])
    assert refused.value.field == field


@pytest.fixture(scope="module")
def models() -> Iterator[list[LLM]]:
    with (
        localinfer.load(speculation=None, threads=1) as plain,
        localinfer.load(speculation="ngram", threads=1) as drafting,
    ):
        yield [plain, drafting]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(models, temperature):
    story = "Once upon a time there was a cat. Once upon a time there was a cat. Once upon"
    options = {"max_tokens": 60, "temperature": temperature, "seed": 3, "prediction": " a time there was a cat. Once"}
    rules = {"bad_words": ["time", "was"], "min_tokens": 50, "ignore_eos": False}
    plain, drafted = (model.complete(story, **options, **rules) for model in models)  # type: ignore[arg-type]
    assert plain.token_ids == drafted.token_ids and "time" not in plain.text
    assert len(plain.token_ids) >= 50
    free, again = (model.complete(story, **options) for model in models)  # type: ignore[arg-type]
    assert free.token_ids == again.token_ids


@pytest.mark.parametrize(
    "wrong", [{"min_tokens": -1}, {"stop_token_ids": "a"}, {"allowed_token_ids": [1.5]}, {"bad_words": [""]}]
)
def test_wrong_values_are_refused(models, wrong):
    with pytest.raises(RequestError):
        models[0].complete("a", max_tokens=1, **wrong)
