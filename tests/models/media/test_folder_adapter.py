"""Granite Speech's adapter: texts with sound run with it, others without, in one model, one batch and one cache."""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.engine import Engine
from localinfer.engine.media import MediaRun, join_pieces, media_ids
from localinfer.engine.sampling.params import SamplingParams
from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.program import Batch, Segment
from localinfer.models.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.decoder.decoder import write_decoder
from localinfer.models.decoder.graph_parts import cut_graph
from localinfer.models.load.loader import load_model, read_config
from localinfer.models.load.weights import CpuWeights
from localinfer.models.media.folder_media import open_folder_media
from localinfer.quant.checkpoint.folder import open_folder
from localinfer.storage.fingerprint import ModelIdentity
from localinfer.storage.sessions import load_session, save_session
from tests.kernels.cpu.device import CpuDevice
from tests.models.decoder.test_graph_parts import Pipeline, parts_of
from tests.models.media.conftest import MediaFolders
from tests.support.checkpoint_files import Stored, safetensors_bytes
from tests.support.quantized_checkpoints import gptq_tensors, in_module, random_codes

SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 6,
    "lora_alpha": 9,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
    "rank_pattern": {"o_proj": 3},
    "alpha_pattern": {"mlp.down_proj": 2},
    "bias": "none",
    "use_rslora": True,
}
WORDS = np.arange(20, 60, dtype=np.int32)
GREEDY = SamplingParams(temperature=0.0)


def _adapted(source: Path, target: Path, prefix: str = "base_model.model.language_model.model.") -> dict[str, Any]:
    """Copy a folder with a random adapter; returns its matrices by module."""
    shutil.copytree(source, target)
    random, matrices, stored = np.random.default_rng(3), {}, {}
    with open_folder(source) as folder:
        shapes = {name.removesuffix(".weight"): one.shape for name, one in folder.tensors.items()}
    for module, shape in shapes.items():
        leaf = module.rpartition(".")[2]
        if "language_model." not in module or leaf not in SETTINGS["target_modules"]:
            continue
        rank = 3 if leaf == "o_proj" else 6
        a, b = random.normal(size=(rank, shape[1])) * 0.2, random.normal(size=(shape[0], rank)) * 0.2
        alpha = 2 if leaf == "down_proj" else 9
        matrices[module] = (a.astype(np.float16), b.astype(np.float16), alpha / np.sqrt(rank))
        name = prefix + module[module.index("layers.") :]
        stored |= {f"{name}.lora_A.weight": matrices[module][0], f"{name}.lora_B.weight": matrices[module][1]}
    (target / ADAPTER_FILE).write_bytes(safetensors_bytes(stored))
    (target / ADAPTER_CONFIG).write_text(json.dumps(SETTINGS))
    return matrices


def _merged(source: Path, target: Path, matrices: Mapping[str, Any]) -> None:
    """Copy a folder with the adapter added to its weights, for every text."""
    shutil.copytree(source, target)
    with open_folder(source) as folder:
        tensors = {name: np.array(folder.array(name)) for name in folder.tensors}
    for module, (a, b, scale) in matrices.items():
        product = scale * b.astype(np.float64) @ a.astype(np.float64)
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"] + product).astype(np.float32)
    (target / "model.safetensors").write_bytes(safetensors_bytes(tensors))


def _quantized(source: Path, target: Path) -> None:
    """Copy a folder with one matrix in 4 bits."""
    shutil.copytree(source, target)
    with open_folder(source) as folder:
        tensors: dict[str, Stored] = {name: np.array(folder.array(name)) for name in folder.tensors}
    module = next(name for name in tensors if name.endswith("layers.1.self_attn.q_proj.weight")).removesuffix(".weight")
    codes = random_codes(np.random.default_rng(2), np.asarray(tensors.pop(f"{module}.weight")).shape)
    tensors |= in_module(module, gptq_tensors(codes))
    (target / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    (target / "config.json").write_text(json.dumps(config))


def _engine(path: Path, **options: Any) -> Engine:
    return Engine(load_model(path, kv_type="f32", takes_media=True, verify=False, **options))


@pytest.fixture(scope="module")
def folders(media_folders: MediaFolders, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The same model without an adapter, with one, and with its sums."""
    plain, made = media_folders.path("granite_speech"), tmp_path_factory.mktemp("adapted")
    _merged(plain, made / "merged", _adapted(plain, made / "adapted"))
    return plain, made / "adapted", made / "merged"


@pytest.fixture
def adapted(folders: tuple[Path, Path, Path]) -> Iterator[Engine]:
    """An engine of the folder with an adapter."""
    engine = _engine(folders[1], threads=2)
    yield engine
    engine.close()


def _heard(width: int, seed: int = 1) -> tuple[NDArray[np.int32], list[MediaRun]]:
    """A prompt of words, a sound and words; its embeddings are random ones."""
    rows = np.random.default_rng(seed).normal(size=(15, width)).astype(np.float32)
    run = MediaRun(media_ids(b"", bytes([seed]), 15), lambda check: rows, None, 15, sees_itself=False)
    return join_pieces([WORDS, run, WORDS[::-1]])


def test_texts_with_sound_run_with_the_adapter_and_others_without(folders: tuple[Path, Path, Path]) -> None:
    found, texts = [], []
    for path in folders:
        engine = _engine(path, threads=1)
        found.append(engine.logits(*_heard(engine._model.config.hidden_size)).astype(np.float64))
        texts.append(engine.logits(WORDS))
        engine.close()
    plain, adapted, merged = found
    assert np.square(adapted - merged).sum() / np.square(merged).sum() < 1e-9
    assert np.square(adapted - plain).sum() / np.square(plain).sum() > 1e-2
    assert texts[0].tobytes() == texts[1].tobytes()


def test_matrices_in_few_bits_keep_theirs(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The adapter's own stay as they are, so that an adapter of nothing changes nothing."""
    _quantized(folders[0], tmp_path / "plain")
    _quantized(folders[1], tmp_path / "adapted")
    shutil.copytree(tmp_path / "adapted", tmp_path / "zero")
    settings = {**SETTINGS, "lora_alpha": 1e-30, "alpha_pattern": {}}
    (tmp_path / "zero" / ADAPTER_CONFIG).write_text(json.dumps(settings))
    found, texts = [], []
    for name in ("plain", "zero", "adapted"):
        engine = _engine(tmp_path / name, threads=1)
        found.append(engine.logits(*_heard(engine._model.config.hidden_size)))
        texts.append(engine.logits(WORDS).tobytes())
        engine.close()
    assert np.array_equal(found[0], found[1])
    assert np.square(found[2] - found[0]).sum() / np.square(found[0]).sum() > 1e-2
    assert len(set(texts)) == 1


def test_both_kinds_share_a_batch_and_nothing_of_the_cache(adapted: Engine, tmp_path: Path) -> None:
    """Also in a session's file, of which a part may be without any sound."""
    model = adapted._model
    prompt, runs = _heard(model.config.hidden_size)

    def generate(ids: NDArray[np.int32], media: list[MediaRun]) -> Any:
        return adapted.generate(ids, GREEDY, max_tokens=8, media=media)

    def tokens(generation: Any) -> list[int]:
        return [event.token_id for event in generation]

    wanted = [tokens(generate(prompt, runs)), tokens(generate(WORDS, []))]
    logits = adapted.logits(prompt, runs)
    # The words before the sound were computed with and without the adapter.
    again = generate(prompt, runs)
    assert tokens(again) == wanted[0]
    assert again.record.cached_tokens == prompt.size - 1
    with adapted.exclusive_cache() as cache:
        cache.clear()
    # In turns, so that steps have rows of both kinds.
    both = [generate(prompt, runs), generate(WORDS, [])]
    shared: list[list[int]] = [[], []]
    for _ in range(8):
        for index, generation in enumerate(both):
            shared[index].append(next(generation).token_id)
    assert shared == wanted
    assert [one.record.cached_tokens for one in both] == [0, 0]
    for rows in (1, 7):
        small = _engine(model.file.path, threads=1, batch_rows=rows)
        assert small.logits(prompt, runs).tobytes() == logits.tobytes()
        small.close()
    # Of a conversation that ended within its first words, a file holds rows that only such texts continue.
    identity = ModelIdentity(model.file, model.kv_layout, model.config, None)
    for given in (prompt, None):
        if given is None:
            with adapted.exclusive_cache() as cache:
                cache.last_retired = prompt[:32]
                cache.last_retired_salt, cache.last_retired_type = adapted.text_salt(prompt, b""), 1
        save_session(adapted, identity, tmp_path / "session", given)
        with adapted.exclusive_cache() as cache:
            cache.clear()
        load_session(adapted, identity, tmp_path / "session")
        again, words = generate(prompt, runs), generate(WORDS, [])
        assert (tokens(again), tokens(words)) == tuple(wanted)
        assert again.record.cached_tokens >= 32
        assert words.record.cached_tokens == 0


def test_batches_without_sound_leave_the_adapters_products_out(adapted: Engine) -> None:
    program = adapted.program
    assert isinstance(program, CpuProgram)
    model = adapted._model
    prompt, runs = _heard(model.config.hidden_size)
    counts = []
    for ids, media in ((WORDS, []), (prompt, runs)):
        adapted.logits(ids, media)
        counts.append(program._running.num_ops)
    num_matrices = 5 * model.config.num_layers
    # Three ops for each matrix, one for the types of all rows and one for those of the last layer's results.
    assert counts[1] - counts[0] == 3 * num_matrices + 2
    assert len(program.operations()) == counts[1]


def test_a_graph_cut_for_several_devices_says_what_it_says_whole(folders: tuple[Path, Path, Path]) -> None:
    """Every part has the types of rows, wherever its first adapter is."""
    device, marks = CpuDevice(1), list[int]()
    with open_checkpoint(folders[1], warns=False) as file:
        config = replace(read_config(file), takes_media=True)
        graph = write_decoder(config, CpuWeights(file, device.new_pool()), marks=marks)
        cut = cut_graph(graph, parts_of(graph, marks), [graph.kv_layers] * 2)
        whole, pages = device.program(graph, 8), [device.pages(graph.kv_layers, 32) for _ in range(2)]
        segments = [Segment(0, 3, pages[0]), Segment(0, 4, pages[1])]
        rows = np.array([2, 3, 6], np.int32)
        batch = Batch(WORDS[:7], segments, rows, np.array([1, 1, 1, 0, 0, 0, 0], np.int32))
        words = replace(batch, token_types=None)
        wanted = [whole.run(one).copy() for one in (batch, words)]
        parts = Pipeline(cut, device, 8)
        for one, other in zip(wanted, [parts.run(batch), parts.run(words)], strict=True):
            assert one.tobytes() == other.tobytes()
        assert wanted[0][1:].tobytes() == wanted[1][1:].tobytes()
        assert not np.array_equal(wanted[0][0], wanted[1][0])
        whole.close()


def test_a_model_for_words_has_no_adapter(folders: tuple[Path, Path, Path]) -> None:
    found = []
    for path in folders[:2]:
        engine = Engine(load_model(path, threads=1, kv_type="f32", verify=False))
        found.append(engine.logits(WORDS).tobytes())
        engine.close()
    assert found[0] == found[1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"use_dora": True}, "use_dora is 'True'"),
    ({"bias": "lora_only"}, "bias is 'lora_only'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    ({"r": 7}, "has rank 6; adapter_config.json says 7"),
    ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
    ({"target_modules": ["q_proj"]}, "target_modules does not name"),
    ({"rank_pattern": {".*": 6}}, r"rank_pattern has the pattern '\.\*'"),
]


def _refused(path: Path, words: str) -> None:
    """A folder's sounds are refused, and its text runs."""
    with open_folder(path) as folder:
        with pytest.raises((UnsupportedFormatError, CorruptFileError), match=words) as caught:
            open_folder_media(folder, None)
        assert "\n" not in str(caught.value)
    with open_checkpoint(path) as file:
        assert str(file.adapter_error) == str(caught.value)
        assert not file.adapter and "row_types.weight" not in file.tensors


def test_what_is_no_plain_adapter_is_refused_by_name(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(folders[1], path)
    with open_checkpoint(path) as file:
        names = set(file.tensors)
        file.leave_out_adapter()
        assert len(names) - len(file.tensors) == 3 * 15 + 1
        assert file.adapter.startswith("LoRA of rank 3, 6 on down_proj, k_proj, o_proj, q_proj, v_proj (15 matrices")
    for change, words in REFUSED:
        (path / ADAPTER_CONFIG).write_text(json.dumps(SETTINGS | change))
        _refused(path, words)
    (path / ADAPTER_CONFIG).write_text(json.dumps(SETTINGS))
    half = np.ones((6, 64), np.float16)
    other = "base_model.model.encoder.layers.0.attn.to_q.lora_"
    for tensors, words in (
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": half}, "wanted lora_A"),
        ({"base_model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": half}, "is no matrix of a plain LoRA"),
        ({f"{other}A.weight": half, f"{other}B.weight": half.T}, "encoder.layers.0.attn.to_q, which is no matrix"),
        ({}, "has no tensors"),
    ):
        (path / ADAPTER_FILE).write_bytes(safetensors_bytes(tensors))
        _refused(path, words)
    (path / ADAPTER_FILE).unlink()
    _refused(path, f"no {ADAPTER_FILE}")
