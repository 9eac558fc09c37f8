"""A model that is served is prepared for constraints behind its load, whatever it can be constrained to."""

import threading

import localinfer
from localinfer.apps.cli.options import prepare_in_background
from localinfer.generation.chat import vocabulary_trie
from localinfer.generation.options import Regex
from localinfer.llm import LLM
from tests.engine.fakes import fake_model
from tests.support.limits import seconds, wait_until


def is_preparing() -> bool:
    return any(thread.name == "localinfer-prepare-constraints" for thread in threading.enumerate())


def test_a_model_is_served_while_it_is_prepared_and_its_first_constraint_does_not_wait(monkeypatch) -> None:
    build, may_build = vocabulary_trie.build_trie, threading.Event()

    def build_later(tokenizer):
        assert may_build.wait(seconds(10))
        return build(tokenizer)

    monkeypatch.setattr(vocabulary_trie, "build_trie", build_later)
    with localinfer.load(threads=1) as llm:
        assert prepare_in_background(llm) is llm and is_preparing()
        assert llm.complete("Once", max_tokens=2, seed=1).text
        may_build.set()
        wait_until(lambda: not is_preparing())
        monkeypatch.setattr(vocabulary_trie, "build_trie", None)
        assert llm.complete("a", constraint=Regex("[0-9]{3}"), max_tokens=9).text.isdigit()


def test_a_model_that_cannot_be_constrained_is_served_all_the_same() -> None:
    model = fake_model()
    model.tokenizer = None
    assert isinstance(prepare_in_background(LLM(model)), LLM)  # type: ignore[arg-type]
    wait_until(lambda: not is_preparing())
