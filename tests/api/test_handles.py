"""What a program holds is not pickled or copied by mistake: what can be is equal, and what cannot says what to do."""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import localinfer
from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.loading import imports

COPIES: list[Callable[[Any], Any]] = [lambda one: pickle.loads(pickle.dumps(one)), copy.copy, copy.deepcopy]


@pytest.fixture(scope="module")
def llm() -> Iterator[localinfer.LLM]:
    with localinfer.load(threads=1, may_measure=False) as loaded:
        yield loaded


@pytest.mark.parametrize("made", COPIES, ids=["pickle", "copy", "deepcopy"])
def test_handles_say_what_to_do_in_place_of_a_copy(llm: localinfer.LLM, made: Callable[[Any], Any]) -> None:
    with llm.session() as session, llm.stream("x", max_tokens=1) as stream:
        for handle, way_out in ((llm, "load the model from its path"), (session, "fork()"), (stream, "result()")):
            with pytest.raises(RequestError, match="cannot be pickled or copied") as caught:
                made(handle)
            assert way_out in str(caught.value) and type(handle).__name__ in str(caught.value)
        assert session.ask("Hi", max_tokens=1).token_ids and stream.result().token_ids


@pytest.mark.parametrize("made", COPIES, ids=["pickle", "copy", "deepcopy"])
def test_records_and_the_tokenizer_are_copied_whole(llm: localinfer.LLM, made: Callable[[Any], Any]) -> None:
    completion = llm.complete("Once", max_tokens=2, logprobs=1)
    assert made(completion) == completion and made(llm.info) == llm.info
    found = localinfer.availability()
    assert made(found) == found
    tokenizer = made(llm.tokenizer)
    assert tokenizer.encode("Once upon a time") == llm.tokenizer.encode("Once upon a time")


def test_a_subinterpreter_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told that memory was missing: threads cannot be started there."""

    class Interpreters:
        get_current, get_main = staticmethod(lambda: 1), staticmethod(lambda: 0)

    monkeypatch.setattr(imports, "import_module", lambda _: Interpreters)
    for call in (localinfer.load, localinfer.availability, localinfer.warm_up, localinfer.load_tokenizer):
        with pytest.raises(BackendUnavailableError, match="a subinterpreter"):
            call()


def test_an_empty_session_has_nothing_to_edit_or_drop(llm: localinfer.LLM) -> None:
    with llm.session() as session:
        with pytest.raises(RequestError, match="no messages, so none can be edited"):
            session.edit(0, "x")
        with pytest.raises(RequestError, match="no user messages"):
            session.drop()


@pytest.mark.parametrize("answer_type", [dict, list, tuple, set])
def test_a_type_that_says_nothing_of_its_parts_is_refused(llm: localinfer.LLM, answer_type: type) -> None:
    with llm.session() as session, pytest.raises(RequestError, match="says nothing of what is in it"):
        session.ask("x", type=answer_type)


def test_roles_that_the_template_does_not_know_are_refused(llm: localinfer.LLM) -> None:
    asked = {"role": "user", "content": "y"}
    for messages in ([{"role": "x", "content": "y"}], [asked, {"role": "User", "content": ""}]):
        for call in (llm.chat, llm.render_chat, llm.count_chat_tokens):
            with pytest.raises(localinfer.errors.MessageError, match="template does not know") as caught:
                call(messages)
            assert caught.value.path == f"messages[{len(messages) - 1}].role"


def test_what_a_notebook_shows_says_the_model_and_the_text(llm: localinfer.LLM) -> None:
    assert repr(llm) == "<LLM demo-f16.gguf: llama on cpu, 1024 tokens of context>"
    session = llm.session()
    assert "0 messages" in repr(session) and "demo" in repr(session)
    completion = llm.complete("Once", max_tokens=2)
    assert repr(completion) == f"Completion(text={completion.text!r}, finish_reason='length', 2 tokens)"
    session.close()
    assert "closed" in repr(session)
