"""Drafts of a model that reads its target's cache begin where the target is, and change speed and nothing else."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.params import SamplingParams
from localinfer.engine.speculation.costs import DraftFloor, VerificationCosts
from localinfer.engine.speculation.mtp import AssistantDrafter, DraftHead
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.errors import BackendUnavailableError, CorruptFileError, RequestError, UnsupportedFormatError
from localinfer.generation.options import Regex
from localinfer.llm import LLM
from localinfer.models.load.loader import Model, load_model
from localinfer.types import FloatArray, TokenIds
from tests.models.arch_models import DATA, build_model, normalized_error, skeletons, write_skeleton
from tests.models.gemma4_texts import DRAFT, TARGET, write_draft_folder, write_gemma4
from tests.support.inside import engine_of

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 4, "top_k": 0, "repetition_penalty": 1.2},
]
PLAIN: dict[str, Any] = {"speculation": None, "disk_cache": False}
ROWS = 8


class Scripted(AssistantDrafter):
    """Computes every draft, keeps its first logits by position, and then drafts the script, some tokens of it wrong."""

    script: Sequence[int] = ()
    wrong_every = 4

    def __init__(self, model: Model) -> None:
        self.first_logits: dict[int, FloatArray] = {}
        super().__init__(model)

    def draft_token(
        self, sequence: SequenceCache, index: int, token_id: int, hidden: NDArray[np.float32] | None, head: DraftHead
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        logits, shown = super().draft_token(sequence, index, token_id, hidden, head)
        if index == 0:
            self.first_logits[sequence.length] = logits.copy()
        place = sequence.length + index + 1
        scripted = np.full_like(logits, -1e9)
        token = self.script[place] if place < len(self.script) else 0
        scripted[(token + (place % self.wrong_every == 0)) % scripted.size] = 1e9
        return scripted, shown


class Hesitant(DraftFloor):
    """Takes a plain step now and then."""

    num_asked = 0

    def in_backoff(self) -> bool:
        self.num_asked += 1
        return self.num_asked % 5 == 0


def eager(drafter: AssistantDrafter, *, has_ngram: bool = False) -> Speculation:
    # Rows that cost nothing more, on a clock that never says otherwise, so that every draft is tried.
    costs = VerificationCosts([1.0] * ROWS)
    floor = Hesitant(costs, most_credit=math.inf)
    ngram = NgramDrafter() if has_ngram else None
    return Speculation(costs, ngram=ngram, model=drafter, floor=floor, clock=lambda: 0.0)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target's file and the draft model's, with text for tokens."""
    folder = tmp_path_factory.mktemp("gemma4")
    return write_gemma4(folder, TARGET), write_gemma4(folder, DRAFT)


@pytest.fixture(scope="module")
def plain(paths: tuple[Path, Path]) -> Iterator[LLM]:
    with localinfer.load(paths[0], threads=1, **PLAIN) as llm:
        yield llm


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """Makes `localinfer.load` draft as often as it may, from a script."""

    def make(option: str, model: Model, draft: Model | None, **_: Any) -> Speculation:
        assert draft is None and model.assistant is not None
        return eager(Scripted(model), has_ngram=option == "auto")

    monkeypatch.setattr("localinfer.loading.drafters.make_speculation", make)
    return Scripted


def prompt_ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 330, count).tolist()
    return found


def answers(llm: LLM, prompt: Sequence[int], count: int = 30, **options: Any) -> tuple[list[int], Any]:
    reply = llm.complete(list(prompt), max_tokens=count, ignore_eos=True, logprobs=2, **options)
    return reply.token_ids, reply.logprobs


def check(plain: LLM, llm: LLM, prompt: Sequence[int], cached: int | None, **options: Any) -> list[int]:
    """The same ids and log probabilities as cold and without drafts, of which some were accepted and some not."""
    plain.clear_cache()
    wanted = answers(plain, prompt, **options)
    made = engine_of(llm)._speculation
    assert made is not None and isinstance(made.model, Scripted)
    made.model.script = [*prompt, *wanted[0]]
    reply = llm.complete(list(prompt), max_tokens=30, ignore_eos=True, logprobs=2, **options)
    assert (reply.token_ids, reply.logprobs) == wanted
    assert cached is None or reply.stats.cached_tokens == cached
    assert reply.stats.drafted_tokens >= reply.stats.accepted_tokens > 8
    assert made.ngram is not None or reply.stats.drafted_by.keys() == {"assistant"}
    return reply.token_ids


@pytest.mark.parametrize(("kv_type", "error"), [("f32", 1e-6), ("f16", 1e-5), ("q8_0", 1e-3), ("q8_0/q4_0", 0.1)])
def test_every_draft_begins_with_the_states_of_the_last_position(kv_type: str, error: float, tmp_path: Path) -> None:
    target = build_model(tmp_path, TARGET).path
    write_skeleton(skeletons()[DRAFT], tmp_path / "draft.gguf")
    with np.load(DATA / "logits.npz") as found:
        ids, wanted = found[f"{DRAFT}.tokens"], found[f"{DRAFT}.draft_logits"]
    model = load_model(target, threads=1, kv_type=kv_type, assistant=tmp_path / "draft.gguf")
    drafter = Scripted(model)
    drafter.script = ids.tolist()
    engine = Engine(model, speculation=eager(drafter))

    def forced(history: TokenIds) -> NDArray[np.bool_]:
        return np.arange(engine.vocab_size) == ids[min(history.size, ids.size - 1)]

    # Cold, on from the end, from inside, and again from a cached prefix.
    for start, count, wrong_every in ((1, 12, 2), (13, 9, 100), (9, 26, 4), (5, 20, 100)):
        drafter.first_logits.clear()
        drafter.wrong_every = wrong_every
        plan = engine.plan(SamplingParams(temperature=0.0), forced)
        stream = engine.generate(ids[:start], plan, max_tokens=count)
        assert [event.token_id for event in stream] == ids[start : start + count].tolist()
        assert drafter.first_logits
        for position, logits in drafter.first_logits.items():
            assert normalized_error(logits[None], wanted[position - 1 : position]) <= error
    engine.close()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("options", SAMPLING, ids=["greedy", "sampled"])
def test_texts_are_those_without_drafts_cold_warm_edited_and_restarted(
    options: dict[str, Any],
    num_threads: int,
    paths: tuple[Path, Path],
    plain: LLM,
    scripted: type[Scripted],
    tmp_path: Path,
) -> None:
    # With two threads beside drafts from former text.
    option = "draft" if num_threads == 1 else "auto"
    first, kept = prompt_ids(150), {"draft": paths[1], "threads": num_threads, "speculation": option}
    disk = {"disk_cache": True, "disk_cache_folder": tmp_path / "disk"}
    with localinfer.load(paths[0], **kept, **disk) as llm:
        second = [*first, *check(plain, llm, first, 0, **options), *prompt_ids(9, 1)]
        check(plain, llm, first, 149, **options)
        check(plain, llm, second, 179, **options)
        check(plain, llm, [*first[:80], 5, 6], None, **options)
        llm.save_session(tmp_path / "session")
    with localinfer.load(paths[0], **kept, **disk) as llm:
        check(plain, llm, [*second, 7], len(second), **options)
    with localinfer.load(paths[0], **kept, disk_cache=False) as llm:
        llm.load_session(tmp_path / "session")
        check(plain, llm, [*first[:80], 5, 6, 7], 82, **options)
    # What was written with drafts is read without them.
    with localinfer.load(paths[0], threads=1, speculation=None, **disk) as llm:
        plain.clear_cache()
        reply = llm.complete(second, max_tokens=30, ignore_eos=True, logprobs=2, **options)
        assert (reply.token_ids, reply.logprobs) == answers(plain, second, **options)
        assert reply.stats.cached_tokens > 170 and reply.stats.drafted_by == {}


def test_texts_are_those_without_drafts_where_memory_is_short(
    paths: tuple[Path, Path], plain: LLM, scripted: type[Scripted]
) -> None:
    memory = 6 * (engine_of(plain).pool.page_bytes + engine_of(plain).pool.windowed_bytes)
    options = {"threads": 1, "speculation": "draft", "disk_cache": False}
    with localinfer.load(paths[0], draft=paths[1], kv_memory=memory, **options) as llm:  # type: ignore[arg-type]
        for seed in (0, 1, 2, 0):
            check(plain, llm, prompt_ids(180, seed), None, **SAMPLING[1])


def test_texts_beside_seven_others_are_those_alone(
    paths: tuple[Path, Path], plain: LLM, scripted: type[Scripted]
) -> None:
    prompts = [prompt_ids(20 + 7 * number, number) for number in range(8)]
    wanted = [answers(plain, prompt, **SAMPLING[1]) for prompt in prompts]
    with localinfer.load(paths[0], draft=paths[1], threads=2, disk_cache=False) as llm:
        drafter = engine_of(llm)._speculation.model  # type: ignore[union-attr]
        drafter.script = [*prompts[3], *wanted[3][0]]  # type: ignore[union-attr]
        streams = [llm.stream(prompt, max_tokens=30, ignore_eos=True, logprobs=2, **SAMPLING[1]) for prompt in prompts]
        for _ in range(4):
            for stream in streams:
                next(stream)
        whole = [stream.result() for stream in streams]
        for reply, (token_ids, logprobs) in zip(whole, wanted, strict=True):
            assert (reply.token_ids, reply.logprobs) == (token_ids, logprobs)
        assert whole[3].stats.drafted_by["assistant"][1] > 0


def test_grammars_bind_drafts(paths: tuple[Path, Path], plain: LLM, scripted: type[Scripted]) -> None:
    options = {"constraint": Regex("(the|cat|hello|[a-z ]){40,}"), "max_tokens": 40, **SAMPLING[1]}
    wanted = plain.complete("the", **options)
    with localinfer.load(paths[0], draft=paths[1], threads=1, speculation="draft", disk_cache=False) as llm:
        drafter = engine_of(llm)._speculation.model  # type: ignore[union-attr]
        drafter.script = [*plain.tokenizer.encode("the"), *wanted.token_ids]  # type: ignore[union-attr]
        found = llm.complete("the", **options)
        assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
        assert found.stats.drafted_by["assistant"][1] > 5


def test_options_choose_it_and_errors_name_both_files(paths: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = paths
    for option, has_ngram in (("auto", True), ("draft", False)):
        with localinfer.load(target, draft=draft, speculation=option, threads=1, disk_cache=False) as llm:
            made = engine_of(llm)._speculation
            assert made is not None and (made.ngram is not None) == has_ngram
            assert isinstance(made.model, AssistantDrafter)
            reply = llm.complete("the cat", max_tokens=60, temperature=0.0, ignore_eos=True)
            assert set(reply.stats.drafted_by) <= {"assistant", "ngram"}
    for option in ("ngram", "mtp", None):
        with pytest.raises(RequestError, match="draft model was given"):
            localinfer.load(target, draft=draft, speculation=option)
    with pytest.raises(RequestError, match="kv_window"):
        localinfer.load(target, draft=draft, kv_window=256)
    with pytest.raises(BackendUnavailableError, match="on the CPU only"):
        localinfer.load(target, draft=draft, device="cuda")
    other = build_model(tmp_path, "gemma4-dense").path
    with pytest.raises(RequestError, match=rf"{draft.name} is no draft model for gemma4-dense.gguf: it has 336 tokens"):
        localinfer.load(other, draft=draft)
    with pytest.raises(RequestError, match="drafts for 'gemma4' models, and its target is of the architecture 'llama'"):
        localinfer.load(build_model(tmp_path, "llama-gqa").path, draft=draft)


def test_other_tokens_and_damaged_files_are_refused_and_centroids_are_noted(
    paths: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, draft = paths
    renamed = write_gemma4(tmp_path, DRAFT, renamed={"hello": "hallo"})
    with pytest.raises(RequestError, match="has the token 'hallo' with the id .*, where its target has 'hello'"):
        localinfer.load(target, draft=renamed)
    renamed.write_bytes(draft.read_bytes()[:-64])
    with pytest.raises(CorruptFileError, match=renamed.name):
        localinfer.load(target, draft=renamed)
    write_gemma4(tmp_path, DRAFT, further=[("masked_embd_centroids.weight", [16, 32]), ("masked_embd_ordering", [336])])
    with localinfer.load(target, draft=renamed, threads=1, disk_cache=False) as llm:
        assert llm.complete("the", max_tokens=3, ignore_eos=True).token_ids
    assert "its centroids (masked_embd_centroids.weight)" in caplog.text


def test_folders_draft_as_the_files_that_they_convert_to(
    paths: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_draft_folder(tmp_path / "folder", paths[1], with_centroids=True)
    drafted = []
    for draft in (paths[1], folder):
        model = load_model(paths[0], threads=1, assistant=draft)
        drafter = Scripted(model)
        engine = Engine(model, speculation=eager(drafter))
        list(engine.generate(prompt_ids(20), SamplingParams(temperature=0.0), max_tokens=20))
        drafted.append(drafter.first_logits)
        engine.close()
    shared = drafted[0].keys() & drafted[1].keys()
    assert shared and all((drafted[0][place] == drafted[1][place]).all() for place in shared)
    assert "folder: its centroids" in caplog.text
    with localinfer.load(paths[0], draft=folder, threads=1, disk_cache=False) as llm:
        assert isinstance(engine_of(llm)._speculation.model, AssistantDrafter)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedFormatError, match="a draft model without keys and values"):
        localinfer.load(folder)
