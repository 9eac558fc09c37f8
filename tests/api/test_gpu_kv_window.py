"""`kv_window` on an emulated GPU: the pages and the text that the CPU keeps, and models that one GPU has a part of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.engine.cache.sequence import KVEviction
from localinfer.errors import BackendUnavailableError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.decoder import kv_layer_shapes
from localinfer.models.load.device_request import GPU_BATCH_ROWS, USUAL_TOKENS, cached_tokens
from localinfer.models.load.loader import open_model_file, read_config
from localinfer.models.load.placement import memory_needs
from tests.engine.cache.test_eviction import NUM_WORDS, write_remembering_model
from tests.models.small_models import write_small_llama
from tests.support.inside import engine_of

pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")

from tests.models.emulated_gpu import emulate_gpus

Decision = tuple[NDArray[np.float32], list[int]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return emulate_gpus(monkeypatch, [64 << 30] * 2)


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """The sums of every sequence that had too many pages, and which were dropped."""
    found: list[Decision] = []
    plain = KVEviction.surplus

    def surplus(window: KVEviction, mass: NDArray[np.float32]) -> NDArray[np.int64]:
        dropped = plain(window, mass)
        if dropped.size:
            found.append((mass.copy(), dropped.tolist()))
        return dropped

    monkeypatch.setattr(KVEviction, "surplus", surplus)
    return found


@pytest.mark.parametrize("kv_type", ["f16", "q8_0/q4_0"])
def test_a_gpu_drops_the_pages_that_the_cpu_drops(
    gpus: list[Any], decisions: list[Decision], tmp_path: Path, kv_type: str
) -> None:
    path = write_remembering_model(tmp_path / "model.gguf")
    prompt = [1, 2, 3] * 15 + [NUM_WORDS + 5] + [4, 6] * 72
    texts, dropped = [], []
    for device in ("cpu", "cuda:0"):
        options: dict[str, Any] = {"device": device, "kv_type": kv_type, "threads": 1, "speculation": None}
        with localinfer.load(path, kv_window=128, kv_memory=1 << 24, **options) as llm:
            assert llm.info.device == device[:4].rstrip(":") and engine_of(llm).pool.page_tokens == 32
            texts.append(llm.complete(prompt, temperature=0, max_tokens=6).token_ids)
        dropped.append(decisions.copy())
        decisions.clear()
    # The second page has what is remembered.
    assert texts[0] == texts[1] == [5] * 6
    assert [pages for _, pages in dropped[0]] == [pages for _, pages in dropped[1]]
    assert len(dropped[0]) >= 2 and all(1 not in pages for _, pages in dropped[0])
    for (ours, _), (theirs, _) in zip(*dropped, strict=True):
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=2e-3 * ours.sum())


@pytest.mark.parametrize("options", [{"device": "cuda:0,cuda:1"}, {"device": "cuda:0", "gpu_layers": 1}])
def test_a_model_in_parts_has_no_window(
    gpus: list[Any], tmp_path: Path, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_small_llama(tmp_path / "small.gguf")
    given: dict[str, Any] = {"threads": 1, "context_length": 256, "kv_window": 128, **options}
    with pytest.raises(BackendUnavailableError, match="kv_window evicts by the attention of all layers, which one"):
        localinfer.load(path, **given)
    found = localinfer.availability(path, **{name: given[name] for name in given if name != "threads"})
    assert isinstance(found.error, BackendUnavailableError) and "kv_window evicts" in str(found.reason)
    if "gpu_layers" in options:
        with localinfer.load(path, **{**given, "device": "auto"}) as llm:
            assert llm.info.device == "cpu"
        assert "running on the CPU: kv_window evicts by the attention of all layers" in caplog.text


def test_memory_of_a_window_is_planned_and_not_that_of_the_context(tmp_path: Path) -> None:
    path = write_small_llama(tmp_path / "small.gguf", extra={"rope.freq_base": 1e4})
    file = open_model_file(path)
    config = read_config(file)
    assert cached_tokens(config, None, None) == config.context_length < USUAL_TOKENS
    assert cached_tokens(config, 64, 128) == 64
    long = type(config)(**{**vars(config), "context_length": 1 << 20})
    assert cached_tokens(long, 1 << 19, None) == 1 << 19
    kept = cached_tokens(long, 1 << 19, 4096)
    assert kept == 4096 + 2 * GPU_BATCH_ROWS
    layout = KVLayout("f16", kv_layer_shapes(config))
    window = KVEviction(4096, layout.page_tokens, GPU_BATCH_ROWS)
    assert kept >= window.max_tokens
    short, whole = (sum(memory_needs(file, config, layout, tokens).cache) for tokens in (kept, 1 << 19))
    file.close()
    assert 80 * short < whole
