"""Caches whose layers share keys and values, or keep keys of an indexer: a warm answer is the cold one, to the bit."""

from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.apps.bench.measured_model import MeasuredModel
from localinfer.errors import RequestError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.decoder import kv_layer_shapes
from tests.models.arch_models import build_model, read_config
from tests.support.inside import engine_of

OPTIONS = {"temperature": 1.5, "seed": 3, "ignore_eos": True}


def answer(llm: localinfer.LLM, prompt: list[int], count: int) -> localinfer.Completion:
    return llm.complete(prompt, max_tokens=count, **OPTIONS)  # type: ignore[arg-type]


def test_layers_without_keys_take_no_memory_and_windows_lie_apart(tmp_path: Path):
    shapes = kv_layer_shapes(read_config(build_model(tmp_path, "gemma4-e2b").path), parts_windows=True)
    assert [shape.num_kv_heads for shape in shapes] == [1] * 6 + [0] * 3
    assert [shape.key_size for shape in shapes[:6]] == [16, 16, 32, 16, 16, 32]
    layout, own = KVLayout("f16", shapes), KVLayout("f16", shapes[:6])
    assert (layout.page_bytes, layout.windowed_bytes) == (own.page_bytes, own.windowed_bytes)
    assert layout.window == 12 and layout.windowed_bytes == layout.page_bytes


def test_indexers_keep_one_head_of_keys_where_a_context_has_more_than_is_chosen(tmp_path: Path):
    config = read_config(build_model(tmp_path, "glm-dsa-sparse").path)
    shapes = kv_layer_shapes(config)
    assert [(shape.num_kv_heads, shape.value_size) for shape in shapes] == [(1, 32)] * 5 + [(1, 0)] * 3
    every = read_config(build_model(tmp_path, "deepseek32-mtp").path)
    assert len(kv_layer_shapes(every)) == every.num_layers


@pytest.mark.parametrize(
    ("name", "kv_type"),
    [
        ("gemma4-e2b", "q8_0/q4_0"),
        ("gemma3n-altup", "f16"),
        ("glm-dsa-sparse", "q8_0"),
        ("minimax-m3-sparse", "f32"),
    ],
)
def test_texts_are_the_same_warm_edited_and_from_disk(name: str, kv_type: str, tmp_path: Path):
    path = build_model(tmp_path, name).path
    options = {"threads": 1, "kv_type": kv_type}
    disk = {"disk_cache": True, "disk_cache_folder": tmp_path / "disk"}
    with localinfer.load(path, speculation=None, **options) as cold:  # type: ignore[arg-type]

        def check(llm: localinfer.LLM, prompt: list[int], count: int = 6) -> localinfer.Completion:
            cold.clear_cache()
            wanted, found = answer(cold, prompt, count), answer(llm, prompt, count)
            assert found.token_ids == wanted.token_ids
            return found

        first = np.random.default_rng(0).integers(0, cold.vocab_size, 130).tolist()
        with localinfer.load(path, **options, **disk) as llm:  # type: ignore[arg-type]
            assert (engine_of(llm).pool.windowed_bytes > 0) == name.startswith("gemma")
            second = [*first, *check(llm, first, 20).token_ids, *range(5, 15)]
            assert check(llm, second).stats.cached_tokens == 149
            check(llm, [*second[:140], 7, 8])
            check(llm, [*first[:80], 9, 9])
            assert check(llm, [*first[:80], 9, 7]).stats.cached_tokens >= 80
        with localinfer.load(path, **options, **disk) as llm:  # type: ignore[arg-type]
            assert check(llm, [*second, 1, 2]).stats.cached_tokens > 120


@pytest.mark.parametrize("name", ["gemma4-e2b", "deepseek32-sparse"])
def test_logits_after_going_back_are_those_of_a_fresh_text(name: str, tmp_path: Path):
    path = build_model(tmp_path, name).path
    ids = np.random.default_rng(2).integers(0, 100, 200).tolist()
    with MeasuredModel(path, threads=1) as model:
        model.compute(0, ids)
        again = model.compute(60, ids[60:100]).copy()
        fresh = model.compute(0, ids[:100])
        np.testing.assert_array_equal(again.view(np.uint32), fresh.view(np.uint32))


def test_bounded_windows_refuse_models_that_choose_positions(tmp_path: Path):
    path = build_model(tmp_path, "glm-dsa-sparse").path
    with pytest.raises(RequestError, match="kv_window keeps .* itself chooses"):
        localinfer.load(path, threads=1, kv_window=128)
