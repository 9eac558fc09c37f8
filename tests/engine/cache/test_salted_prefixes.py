"""Texts of different salts have nothing of each other: pages, reasons of misses, ids of replies, drafts, files."""

import threading
from pathlib import Path

import numpy as np
import pytest

from localinfer.engine.cache.block_hashes import NO_SALT, salt_of
from localinfer.engine.cache.prefix_cache import CacheHints
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.sampler import SamplingParams
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.errors import RequestError, SessionFileError
from localinfer.generation.chat_model import ChatHistory, SystemPromptDrift
from localinfer.llm import LLM
from localinfer.storage.chats import StoredChats
from localinfer.storage.prompt_cache import DiskOptions
from tests.engine.fakes import fake_model
from tests.engine.generations import Gate, wide_model
from tests.engine.speculation.test_failing_drafters import draft_model
from tests.engine.test_scheduler import RecordingProgram
from tests.generation.chat.test_history import ask, odd_ids
from tests.storage.test_prompt_cache import FakeIdentity
from tests.storage.test_stored_chats import TEMPLATE, TOKENIZER
from tests.support.limits import seconds, wait_until

GREEDY = SamplingParams(temperature=0)
ONE, TWO = salt_of("one"), salt_of("two")


def numbers(count: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 250, count).tolist()
    return ids


def cached(engine: Engine, prompt: list[int], salt: bytes) -> tuple[int, str | None]:
    """How much of a prompt was found, and the whole reason why not more."""
    generation = engine.generate(prompt, GREEDY, max_tokens=3, cache_hints=CacheHints(salt=salt))
    assert len(list(generation)) == 3
    miss = generation.record.miss
    return generation.record.cached_tokens, None if miss is None else miss.describe(None)


def test_prompt_of_another_salt_is_not_found_and_explains_nothing():
    engine = Engine(fake_model())
    assert cached(engine, numbers(20), ONE) == (0, "nothing was cached yet")
    assert cached(engine, numbers(20), TWO) == (0, "nothing was cached yet")
    assert cached(engine, numbers(20), NO_SALT) == (0, "nothing was cached yet")
    assert [cached(engine, numbers(20), salt) for salt in (ONE, TWO, NO_SALT)] == [(19, None)] * 3
    found, reason = cached(engine, [*numbers(9), 1, 2, 3], TWO)
    assert found == 9 and reason is not None and str(numbers(17)[9:]) in reason
    with engine.exclusive_cache() as cache:
        cache.clear()
        assert len(list(cache.tree.roots)) == 1, "the root of a salt without texts was kept"


def test_eviction_is_told_to_those_whose_text_it_was():
    engine = Engine(fake_model())
    for salt in (ONE, TWO):
        cached(engine, numbers(20), salt)
    with engine.exclusive_cache() as cache:
        whole = next(path.token_ids for path in cache.tree.paths() if path.salt == ONE)
        assert cache.forget(whole, ONE) == whole.size == 22
        assert cache.tree.evicted_length(np.array(numbers(20), np.int32), ONE) == 20
        assert cache.tree.evicted_length(np.array(numbers(20), np.int32), TWO) == 0
    assert cached(engine, numbers(20), TWO)[0] == 19
    assert cached(engine, numbers(20), ONE) == (
        0,
        "from token 0 on it was cached once and was evicted for lack of memory",
    )


@pytest.mark.parametrize(("salts", "begins"), [((ONE, ONE), [0]), ((ONE, TWO), [0, 0])])
def test_prompts_of_one_step_wait_for_those_of_their_salt_only(salts: tuple[bytes, bytes], begins: list[int]):
    model = wide_model(context_length=600)
    model.program = program = RecordingProgram(260, max_batch_rows=16, max_output_rows=4)
    engine, gate = Engine(model), Gate(2)
    program.logits_of = gate
    texts: list[list[int]] = []

    def read(prompt: list[int], salt: bytes) -> None:
        generation = engine.generate(prompt, GREEDY, max_tokens=1, cache_hints=CacheHints(salt=salt))
        texts.append([event.token_id for event in generation])

    blocker = threading.Thread(target=read, args=([1, 2], NO_SALT))
    blocker.start()
    assert gate.reached.wait(seconds(10))
    readers = [threading.Thread(target=read, args=(numbers(150), salt)) for salt in salts]
    for thread in readers:
        thread.start()
    assert wait_until(lambda: len(engine.scheduler.running) >= 3)
    gate.may_pass.set()
    for thread in [blocker, *readers]:
        thread.join(seconds(15))
    starts = [start for segments in program.segments[1:] for start, _ in segments]
    assert [start for start in starts if start == 0] == begins and starts[: len(begins)] == begins
    assert texts[1] == texts[2]


def test_drafts_are_made_of_texts_of_the_same_salt():
    drafter, out = NgramDrafter(max_tokens=1000), np.empty(8, np.int32)
    text = np.arange(100, 160, dtype=np.int32)
    drafter.begin(salt=ONE).draft(text, out)
    assert drafter.begin(salt=ONE).draft(text[:20], out) == 8 and drafter.begin(salt=TWO).draft(text[:20], out) == 0
    for number in range(200):
        drafter.begin(salt=salt_of(str(number))).draft(text + number, out)
        assert drafter.num_tokens <= 1000
    assert drafter.begin(salt=ONE).draft(text[:20], out) == 0, "what was used least recently is forgotten first"
    model = draft_model()
    plan = Engine(wide_model()).plan(GREEDY)
    for salt in (ONE, TWO):
        draft = model.begin(plan, salt)
        assert draft.draft(np.array(numbers(20), np.int32), out[:2]) == 2
        draft.close()
    assert model.cache.counters.hits == 0


def test_replies_keep_their_ids_for_those_of_their_salt_also_after_a_restart(tmp_path: Path):
    history = ChatHistory(TEMPLATE, TOKENIZER)
    went_on, reply = ask("Hi", "Hello there", "And then?"), odd_ids(TOKENIZER, "Hello there", 1)
    plain = history.encode(went_on).token_ids.tolist()
    answered = [history.remember(history.encode(ask("Hi"), salt=salt), reply) for salt in (ONE, TWO)]
    StoredChats(tmp_path).save([chat for chat in answered if chat is not None])
    assert len(list(tmp_path.iterdir())) == 2
    again = ChatHistory(TEMPLATE, TOKENIZER)
    again.recall(StoredChats(tmp_path).load(TOKENIZER.vocab_size)[:1])
    for known, salts in ((history, {ONE, TWO}), (again, {again._chats[0].prompt.salt})):
        for salt in (ONE, TWO, NO_SALT):
            found = known.encode(went_on, salt=salt)
            assert (found.history is not None) == (salt in salts)
            assert salt in salts or found.token_ids.tolist() == plain


def test_lines_that_vary_are_found_by_requests_of_the_same_salt():
    heads = SystemPromptDrift(moves=True)
    head = "You are a helpful assistant that writes code for people.\n" * 9
    first, second = (
        [{"role": "system", "content": f"Today is {day}.\n{head}"}, {"role": "user", "content": "Hi"}]
        for day in ("Monday", "Friday")
    )
    assert heads.observe(first, salt=ONE) == heads.observe(second, salt=TWO) == heads.observe(second) == ()
    (line,) = heads.observe(second, salt=ONE)
    moved = heads.arrange(second, [line], salt=ONE)
    went_on = [*second, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "On"}]
    assert moved != second
    assert "Friday" in heads.arrange(went_on, [line], salt=ONE)[1]["content"]
    assert "Friday" not in heads.arrange(went_on, [line], salt=TWO)[1]["content"]


def test_sessions_are_saved_and_loaded_with_their_salt(tmp_path: Path):
    with LLM(fake_model(), identity=FakeIdentity(), disk=DiskOptions(tmp_path / "cache")) as llm:  # type: ignore[arg-type]
        llm.complete(numbers(20), max_tokens=3, temperature=0, cache_salt="one")
        with pytest.raises(SessionFileError):
            llm.save_session(tmp_path / "none", numbers(20), cache_salt="two")
        # The conversation that ended last brings its salt.
        assert (
            llm.save_session(tmp_path / "file") == llm.save_session(tmp_path / "b", numbers(20), cache_salt="one") + 2
        )
        llm.clear_cache()
        llm.load_session(tmp_path / "file", cache_salt="two")
        found = [llm.complete(numbers(20), max_tokens=1, temperature=0, cache_salt=salt) for salt in ("two", None)]
        assert [one.stats.cached_tokens for one in found] == [19, 0]
        whole = llm.load_session(tmp_path / "file", cache_salt="two")
        assert llm.forget(whole, cache_salt="one") == 0 and llm.forget(whole, cache_salt="two") > 0
        for wrong in ("", 3):
            with pytest.raises(RequestError, match="cache_salt"):
                llm.complete("x", cache_salt=wrong)  # type: ignore[arg-type]
