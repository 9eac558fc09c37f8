"""Real models on prompts with pictures and sounds: the bits are those of a cold run at once, whatever came between."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localinfer.engine.admission import EngineLimits
from localinfer.engine.cache.sequence import KVEviction
from localinfer.engine.engine import Engine
from localinfer.engine.media import Check, MediaRun, join_pieces, media_content, media_ids
from localinfer.engine.speculation.mtp import MTPDrafter
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.generation.stream import Completion
from localinfer.generation.text_generation import EncodedPrompt
from localinfer.llm import LLM
from localinfer.models.load.loader import load_model
from localinfer.storage.fingerprint import ModelIdentity
from localinfer.storage.prompt_cache import DiskOptions
from localinfer.types import FloatArray
from tests.engine.generations import in_threads
from tests.engine.speculation.test_speculation import speculation
from tests.kernels.cpu.tape_runs import assert_same_bits
from tests.models.arch_models import skeletons, write_skeleton
from tests.support.inside import engine_of

# Sliding windows, sight within pictures, inputs of layers, shared keys, deepstack, positions on axes, recurrent layers.
NAMES = {"gemma3-gqa": "f16", "gemma4-e2b": "q8_0", "qwen3vl-gqa": "f32", "qwen2vl-gqa": "q4_0", "qwen35-mtp": "f16"}
CONTEXT = 512
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 2, "max_tokens": 6}


@dataclass
class Family:
    """A model file, and prompts that it takes."""

    name: str
    path: Path

    @property
    def sees_itself(self) -> bool:
        return self.name.startswith("gemma")

    @property
    def kv_type(self) -> str:
        return NAMES[self.name]

    @property
    def width(self) -> int:
        setting = {key.partition(".")[2]: value for key, _, _, value in skeletons()[self.name]["kv"]}
        return int(setting["embedding_length"]) * (1 + int(setting.get("n_deepstack_layers", 0)))

    def picture(self, seed: int, rows: int = 4, columns: int = 5) -> MediaRun:
        def embed(check: Check) -> FloatArray:
            return np.random.default_rng(seed).standard_normal((rows * columns, self.width), np.float32)

        grid, taken = (None, rows * columns) if self.sees_itself else ((rows, columns), max(rows, columns))
        named = self.name.encode(), bytes([seed, rows, columns])
        ids, content = media_ids(*named, rows * columns), media_content(*named)
        return MediaRun(ids, embed, grid, taken, self.sees_itself, f"picture {seed}", content=content)

    def sound(self, seed: int, rows: int) -> MediaRun:
        def embed(check: Check) -> FloatArray:
            return np.random.default_rng(seed).standard_normal((rows, self.width), np.float32)

        ids, content = media_ids(b"ear", bytes([seed, rows]), rows), media_content(b"ear", bytes([seed, rows]))
        return MediaRun(ids, embed, None, rows, False, f"sound {seed}", content=content)

    def load(self, *, threads: int = 1, disk: Path | None = None, drafts: str | None = None, **options: Any) -> LLM:
        model = load_model(
            self.path, threads=threads, kv_type=self.kv_type, takes_media=True, draft_layers=drafts == "mtp", **options
        )
        made: Speculation | None = None
        if drafts == "ngram":
            made = speculation(NgramDrafter())
        elif drafts == "mtp":
            made = speculation(None, MTPDrafter(model))  # type: ignore[arg-type]
        options_of_disk = None if disk is None else DiskOptions(disk)
        identity = ModelIdentity(model.file, model.kv_layout, model.config, None)
        limits = EngineLimits(max_running=8)
        return LLM(model, identity=identity, disk=options_of_disk, speculation=made, limits=limits)


def blind(run: MediaRun) -> MediaRun:
    """A picture that was cached, so that its encoder may not run."""

    def fail(check: Check) -> FloatArray:
        raise AssertionError("the encoder runs for what is cached")

    return replace(run, embed=fail)


def words(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, 90, count).tolist()
    return found


def prompt(family: Family, *edits: str) -> EncodedPrompt:
    """Words, two pictures side by side, a sound, a small picture and a short sound. edits: parts that differ."""
    pieces = {
        "first": words(9, 11 if "first" in edits else 1),
        "one": family.picture(1),
        "two": family.picture(12 if "two" in edits else 2, 3, 7),
        "middle": words(14, 13 if "middle" in edits else 3),
        "sound": family.sound(3, 18),
        "last": words(5, 14 if "last" in edits else 4),
        "three": family.picture(4, 1, 3),
        "four": family.sound(5, 2),
        "end": words(7, 15 if "end" in edits else 5),
    }
    ids, runs = join_pieces(list(pieces.values()))
    return EncodedPrompt(ids, media=runs)


@pytest.fixture(scope="module", params=list(NAMES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    skeleton = deepcopy(skeletons()[request.param])
    for setting in skeleton["kv"]:
        if setting[0].endswith("context_length"):
            setting[3] = CONTEXT
    path = tmp_path_factory.mktemp("media") / f"{request.param}.gguf"
    write_skeleton(skeleton, path)
    return Family(request.param, path)


@pytest.fixture(scope="module")
def cold(family: Family) -> Iterator[LLM]:
    with family.load() as llm:
        yield llm


def answer(llm: LLM, text: EncodedPrompt, **options: Any) -> Completion:
    return llm.complete(text, **{**OPTIONS, **options})  # type: ignore[arg-type]


def check(cold: LLM, llm: LLM, text: EncodedPrompt, cached: int | None = None, **options: Any) -> Completion:
    """An answer as cold as it can be, to the last bit of every log probability."""
    cold.clear_cache()
    wanted, found = answer(cold, text, **options), answer(llm, text, **options)
    assert wanted.stats.cached_tokens == 0
    assert found.token_ids == wanted.token_ids and found.logprobs == wanted.logprobs
    assert cached in (None, found.stats.cached_tokens)
    return found


def test_a_prompt_in_chunks_of_any_size_on_any_threads_has_the_bits_of_one_batch(family: Family, cold: LLM) -> None:
    text = prompt(family)
    wanted = engine_of(cold).logits(text.token_ids, text.media)
    assert len(np.unique(wanted[:, 0])) > 90
    for threads, rows in ((1, 21 if family.sees_itself else 1), (2, 34), (2, 512)):
        model = load_model(family.path, threads=threads, kv_type=family.kv_type, takes_media=True, batch_rows=rows)
        engine = Engine(model)
        assert_same_bits(engine.logits(text.token_ids, text.media), wanted)
        engine.close()


def test_bits_warm_are_those_of_a_cold_run(family: Family, cold: LLM, tmp_path: Path) -> None:
    first = prompt(family)
    size = len(first.token_ids)
    with family.load(threads=2, disk=tmp_path / "disk", batch_rows=40) as llm:
        reply = check(cold, llm, first, 0)
        check(cold, llm, first, size - 1)
        longer = EncodedPrompt(
            [*map(int, first.token_ids), *reply.token_ids, *words(6, 7), *map(int, family.picture(9, 2, 2).ids), 5],
            media=[*first.media, family.picture(9, 2, 2)],
        )
        check(cold, llm, longer)
        for edit in ("end", "last", "middle", "two", "first"):
            miss = check(cold, llm, prompt(family, edit)).stats.cache_miss
            # What sliding windows or recurrent layers lack comes first, and no other picture is named.
            is_told = edit == "two" and "layers" not in str(miss) and "states" not in str(miss)
            assert miss is not None and ("picture 12 has changed" in miss) == is_told and "picture 1 has" not in miss
        changed = check(cold, llm, prompt(family, "two", "end"))
        assert changed.stats.cached_tokens > 20
        salted = answer(llm, first, cache_salt="another's")
        assert salted.stats.cached_tokens == 0 and salted.logprobs == answer(cold, first).logprobs
        check(cold, llm, longer)
        llm.save_session(tmp_path / "session", longer.token_ids)
    with family.load(disk=tmp_path / "disk") as llm:
        found = answer(llm, EncodedPrompt(longer.token_ids, media=[blind(run) for run in longer.media]))
        cold.clear_cache()
        assert found.logprobs == answer(cold, longer).logprobs
        assert found.stats.cached_tokens == len(longer.token_ids) - 1
        check(cold, llm, prompt(family, "end"))
    with family.load() as llm:
        llm.load_session(tmp_path / "session")
        assert check(cold, llm, longer).stats.cached_tokens == len(longer.token_ids) - 1


def test_seven_neighbours_change_no_bit(family: Family, cold: LLM) -> None:
    texts = [prompt(family, *edits) for edits in ((), ("end",), ("middle",), ("two",))]
    texts += [EncodedPrompt(words(30 + seed, seed)) for seed in range(3)] + [prompt(family, "first")]
    wanted = []
    for text in texts:
        cold.clear_cache()
        wanted.append(answer(cold, text))
    found: dict[int, Completion] = {}
    with family.load(threads=2, batch_rows=64) as llm:

        def read(index: int) -> None:
            found[index] = answer(llm, texts[index])

        in_threads([lambda index=index: read(index) for index in range(8)])  # type: ignore[misc]
    for index, one in enumerate(wanted):
        assert found[index].token_ids == one.token_ids and found[index].logprobs == one.logprobs


def test_drafts_change_no_bit(family: Family, cold: LLM) -> None:
    text = prompt(family)
    for drafts in ("ngram", *(("mtp",) if family.name.endswith("mtp") else ())):
        with family.load(drafts=drafts, batch_rows=48) as llm:
            for _ in range(2):
                found = check(cold, llm, text, max_tokens=24)
                assert found.stats.drafted_tokens > 0
            check(cold, llm, prompt(family, "end"), max_tokens=24, temperature=1.0, seed=7)


def test_what_one_process_prefills_another_finds(family: Family, cold: LLM, tmp_path: Path) -> None:
    text = prompt(family)
    with family.load(disk=tmp_path) as llm:
        assert llm.prefill(text).stored_tokens == len(text.token_ids) - 1  # type: ignore[arg-type]
    with family.load(disk=tmp_path) as llm:
        found = answer(llm, EncodedPrompt(text.token_ids, media=[blind(run) for run in text.media]))
    cold.clear_cache()
    assert found.logprobs == answer(cold, text).logprobs
    assert found.stats.cached_tokens == len(text.token_ids) - 1


def test_a_bounded_window_of_keys_and_values_reads_pictures(family: Family) -> None:
    if family.sees_itself or family.name.startswith("qwen35"):
        # Sliding windows and recurrent layers bound what is held themselves.
        return
    text = prompt(family)
    model = load_model(family.path, threads=1, kv_type=family.kv_type, takes_media=True, batch_rows=32, kv_window=128)
    with LLM(model, kv_window=KVEviction(128, model.kv_layout.page_tokens, 32)) as llm:
        first = answer(llm, text, max_tokens=90)
        llm.clear_cache()
        assert answer(llm, text, max_tokens=90).logprobs == first.logprobs
    with family.load() as llm:
        # What is behind the window is left out of later steps only.
        assert answer(llm, text, max_tokens=2).token_ids[:1] == first.token_ids[:1]


def test_words_are_computed_as_by_a_program_of_words_alone(family: Family, cold: LLM) -> None:
    ids = words(120, 3)
    engine = Engine(load_model(family.path, threads=1, kv_type=family.kv_type))
    assert_same_bits(engine_of(cold).logits(ids), engine.logits(ids))
    engine.close()
