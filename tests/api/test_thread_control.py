"""Another number of threads, or another priority, in the midst of a text: the same text, bit for bit."""

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.errors import ClosedError, RequestError
from localinfer.llm import LLM
from tests.support.inside import model_of

PROMPT = "Once upon a time there was a little dog. " * 12


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        # More than some machines that run this have: threads are the system's to place.
        patch.setattr(os, "cpu_count", lambda: 4)
        with localinfer.load(device="cpu", threads=2) as loaded:
            yield loaded


@pytest.fixture(autouse=True)
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def text(llm: LLM, **options: Any) -> list[int]:
    llm.clear_cache()
    return llm.complete(PROMPT, max_tokens=40, temperature=0.8, seed=5, ignore_eos=True, **options).token_ids


def test_a_text_does_not_depend_on_changes_while_it_is_generated(llm: LLM) -> None:
    wanted = text(llm)
    llm.clear_cache()
    changes = [lambda n=n: llm.set_threads(n) for n in (1, 4, 2, 3, None)]
    changes += [lambda p=p: llm.set_priority(p) for p in ("background", "normal", "background", "normal")]
    found = []
    with llm.stream(PROMPT, max_tokens=40, temperature=0.8, seed=5, ignore_eos=True) as stream:
        for count, event in enumerate(stream):
            found.append(event.token_id)
            changes[count % len(changes)]()
    llm.set_threads(None)
    llm.set_priority("normal")
    assert found == wanted


def test_logits_have_the_same_bits_with_any_number_of_threads_of_any_priority(llm: LLM) -> None:
    token_ids = llm.tokenizer.encode(PROMPT)
    wanted, pool = llm.logits(token_ids), model_of(llm).pool
    for threads in (1, 4, 3, None):
        for priority in ("background", "normal"):
            llm.set_threads(threads)
            llm.set_priority(priority)
            np.testing.assert_array_equal(llm.logits(token_ids), wanted)
            assert (pool.num_threads, pool.priority) == (threads or 2, priority)


def test_other_threads_change_them_while_a_prompt_and_texts_are_computed(llm: LLM) -> None:
    wanted, is_over = text(llm), threading.Event()

    def change() -> None:
        while not is_over.wait(0.002):
            llm.set_threads(1)
            llm.set_priority("background")
            llm.set_threads(4)
            llm.set_priority("normal")

    changing = threading.Thread(target=change)
    changing.start()
    try:
        found: list[list[int]] = []
        readers = [threading.Thread(target=lambda: found.append(text(llm))) for _ in range(3)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    finally:
        is_over.set()
        changing.join()
    llm.set_threads(None)
    llm.set_priority("normal")
    assert found == [wanted] * 3 and text(llm) == wanted


def test_what_was_asked_for_counts_for_decoding_too(llm: LLM) -> None:
    program = model_of(llm).program
    program.decode_threads = 1
    llm.set_threads(2)
    text(llm)
    assert program._last_threads == 2
    llm.set_threads(None)
    text(llm)
    assert program._last_threads == 1


def test_whether_slow_cores_help_with_prompts_is_measured_where_there_are_some(llm: LLM) -> None:
    program = model_of(llm).program
    wanted = text(llm)
    pool = model_of(llm).pool
    long = 2
    assert program._choices[long].is_sure
    pool.performance_cores = 1
    try:
        assert text(llm) == wanted
        assert program.performance_cores == 1 and not program._choices[long].is_sure
        llm.set_threads(2)
        assert text(llm) == wanted
        assert program._choices[long].is_sure
    finally:
        pool.performance_cores = 0
        llm.set_threads(None)


@pytest.mark.parametrize("threads", [0, -1, 5, 1.5, "2", True])
def test_a_number_of_threads_that_the_machine_does_not_run_is_refused(llm: LLM, threads: Any) -> None:
    with pytest.raises(RequestError, match="threads is"):
        llm.set_threads(threads)


@pytest.mark.parametrize("priority", ["low", "", None, 3])
def test_an_unknown_priority_is_refused(llm: LLM, priority: Any) -> None:
    with pytest.raises(RequestError, match="give 'normal' or 'background'"):
        llm.set_priority(priority)
    with pytest.raises(RequestError, match="give 'normal' or 'background'"):
        localinfer.load("/nowhere", priority=priority)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no nice value per thread")
def test_a_model_loaded_in_the_background_leaves_the_hosts_threads_as_they_are() -> None:
    def values() -> dict[int, tuple[str, int]]:
        ids = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}
        return {number: (name, os.getpriority(os.PRIO_PROCESS, number)) for number, name in ids.items()}

    before = values()
    own = before[threading.get_native_id()][1]
    with localinfer.load(device="cpu", threads=2, priority="background", speculation=None) as loaded:
        wanted = loaded.complete("Once", max_tokens=3, temperature=0).token_ids
        found = values()
        new = [found[number] for number in found.keys() - before.keys()]
        assert sorted(new) == [("localinfer-0", max(own, 10)), ("localinfer-1", max(own, 10))]
        assert {number: found[number] for number in before} == before
        loaded.set_priority("normal")
        assert loaded.complete("Once", max_tokens=3, temperature=0).token_ids == wanted
        found = values()
        assert [found[number] for number in found.keys() - before.keys()] == [("localinfer-1", own)]
    with pytest.raises(ClosedError):
        loaded.set_priority("normal")
    with pytest.raises(ClosedError):
        loaded.set_threads(1)
