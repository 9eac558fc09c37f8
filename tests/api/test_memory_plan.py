"""What a model takes in memory is known from its header, and what cannot fit is refused before its weights are read."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.engine.cache.block_pool import context_bytes, default_kv_memory
from localinfer.engine.media import DEFAULT_EMBEDDING_BYTES
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu.lower import MAX_BATCH_ROWS
from localinfer.loading.media import plan_media
from localinfer.loading.memory.plan import KV_SHARE, MemoryPlan, check_fits, choose_context, plan_file, plan_memory
from localinfer.loading.memory.report import describe_memory, memory_lines
from localinfer.models import demo
from localinfer.models.load.loader import Model, load_model, open_model_file, read_config
from localinfer.models.load.programs import batch_rows_of
from localinfer.models.load.weights import CpuWeights
from localinfer.system import machine_limits
from localinfer.system.machine_limits import MemoryLimits
from tests.api.packed_bytes import packed_bytes
from tests.kernels.subprocesses import environment
from tests.models.arch_models import build_model, build_text_model, one_of_each, text_models
from tests.models.small_models import write_small_llama
from tests.support.checkpoint_files import LLAMA_CONFIG, MODULES, llama_weights, tokenizer_document, write_folder
from tests.support.limits import seconds
from tests.support.quantized_checkpoints import gptq_tensors, in_module, random_codes
from tests.support.seeing_model import seeing_demo

DEMO = Path(demo.__file__).parent / "demo-f16.gguf"
MB = 10**6


def weight_bytes(model: Model) -> int:
    assert isinstance(model.weights, CpuWeights)
    return packed_bytes(model.weights)


@pytest.mark.parametrize(("index", "name"), list(enumerate([*one_of_each(), *text_models()])))
def test_plan_is_what_the_loaded_model_has(index: int, name: str, tmp_path: Path) -> None:
    """Every other one keeps bytes in a shorter context."""
    path = (build_text_model if name in text_models() else build_model)(tmp_path, name).path
    plan = plan_file(path, draft_layers=True)
    trained = plan.config.context_length
    kv_type, context = ("q8_0", max(40, trained // 3)) if index % 2 else ("f16", trained)
    model = load_model(path, threads=1, draft_layers=True, context_length=context, kv_type=kv_type)
    try:
        assert plan.kv_layout(context, kv_type) == model.kv_layout
        assert plan.kv_bytes(context, kv_type) == context_bytes(model.kv_layout, context, MAX_BATCH_ROWS)
        assert plan.weight_bytes == weight_bytes(model)
    finally:
        model.close()


@pytest.mark.parametrize("is_act_order", [False, True])
def test_codes_of_a_checkpoint_are_counted_as_kernels_hold_them(is_act_order: bool, tmp_path: Path) -> None:
    rng, module = np.random.default_rng(1), "model.layers.0.self_attn.q_proj"
    codes = random_codes(rng, MODULES["self_attn.q_proj"], is_symmetric=False, is_act_order=is_act_order)
    weights = {**llama_weights(), **in_module(module, gptq_tensors(codes))}
    del weights[f"{module}.weight"]
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": is_act_order}
    config = {**LLAMA_CONFIG, "quantization_config": settings}
    folder = write_folder(tmp_path / "tiny", weights, config, tokenizer=tokenizer_document())
    model = load_model(folder, threads=1)
    try:
        assert plan_file(folder).weight_bytes == weight_bytes(model)
    finally:
        model.close()


RESIDENT = """
import sys
import localinfer
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024
path, length = sys.argv[1], int(sys.argv[2])
localinfer.load().close()
before = resident()
llm = localinfer.load(path, device="cpu", threads=1, context_length=length, speculation=None)
llm.complete([1 + i % 30 for i in range(length - 8)], max_tokens=4)
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_plan_is_what_the_process_takes(tmp_path: Path) -> None:
    import gguf

    path, hidden, wide, layers, length = tmp_path / "m.gguf", 512, 2048, 12, 1024
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(layers)
    writer.add_context_length(length)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(wide)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(64)
    square, up = np.zeros((hidden, hidden), np.float32), np.zeros((wide, hidden), np.float32)
    tensors = {"token_embd": up[:64], "output": up[:64], "output_norm": np.ones(hidden, np.float32)}
    for layer in range(layers):
        one = {f"attn_{part}": square for part in ("q", "k", "v", "output")} | {"ffn_gate": up, "ffn_up": up}
        one |= {"ffn_down": up.T.copy(), "attn_norm": tensors["output_norm"], "ffn_norm": tensors["output_norm"]}
        tensors |= {f"blk.{layer}.{part}": values for part, values in one.items()}
    for part, values in tensors.items():
        writer.add_tensor(f"{part}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = [sys.executable, "-c", RESIDENT, str(path), str(length)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=seconds(60), check=True)
    plan, taken = plan_file(path), int(done.stdout)
    assert plan.weight_bytes > 200 * MB and plan.kv_bytes(length) > 20 * MB
    assert plan.weight_bytes + plan.kv_bytes(length - 8) <= taken <= plan.total_bytes(length)
    assert plan.total_bytes(length) - taken < 60 * MB


def plan_of(tmp_path: Path, trained: int = 100_000) -> MemoryPlan:
    """Of a small llama: 128 bytes of keys and values per token, and sizes that are easy to see through."""
    plan = plan_file(write_small_llama(tmp_path / "m.gguf"))
    config = replace(plan.config, context_length=trained)
    return replace(plan, config=config, weight_bytes=100 * MB, scratch_bytes=10 * MB, bits_per_weight=8.0)


def limits(free: int, **more: object) -> MemoryLimits:
    return MemoryLimits(64_000 * MB, free, **more)  # type: ignore[arg-type]


def test_the_largest_context_is_the_last_that_fits(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    for room in (200_000, 1_000_000, 12_345_678):
        found = plan.largest_context(room)
        assert found % 32 == 0 and plan.kv_bytes(found) <= room < plan.kv_bytes(found + 32)
    assert plan.largest_context(1 << 40) == 100_000
    assert plan.largest_context(100) == 0


def test_a_context_that_cannot_fit_is_refused_with_the_figures_and_the_ways_out(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    memory = limits(115 * MB, limited_by="the cgroup")
    fits, with_q8 = plan.largest_loadable(memory), plan.largest_loadable(memory, "q8_0")
    assert 512 < fits < with_q8 < 100_000
    with pytest.raises(OutOfMemoryError) as refused:
        check_fits(plan, 100_000, memory)
    message = str(refused.value)
    assert "123 MB" in message and "100 MB for weights" in message and "13 MB for keys and values as f16" in message
    assert "115 MB of 64.0 GB that the cgroup allows are free" in message
    assert f"context_length {fits}" in message and f"{with_q8} with kv_type q8_0" in message
    check_fits(plan, fits, memory)
    with pytest.raises(OutOfMemoryError):
        check_fits(plan, fits + 1024, memory)
    check_fits(plan, 100_000, memory, kv_bytes=1 * MB)


def test_weights_that_cannot_fit_name_the_quantization_that_would(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    with pytest.raises(OutOfMemoryError, match=r"it has 8\.0 bits per weight, and 5\.\d would fit"):
        check_fits(plan, 4096, limits(80 * MB))
    with pytest.raises(OutOfMemoryError, match="take a smaller model"):
        check_fits(plan, 4096, limits(30 * MB))


def test_swap_is_for_what_was_asked_for(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    memory = limits(112 * MB, swap_bytes=200 * MB)
    assert choose_context(plan, 100_000, memory) == 100_000
    assert choose_context(plan, None, memory) < 10_000


def test_a_default_context_is_reduced_to_what_fits_with_one_notice(tmp_path: Path, caplog) -> None:
    plan = plan_of(tmp_path)
    memory = limits(130 * MB)
    with caplog.at_level(logging.WARNING):
        found = choose_context(plan, None, memory)
    assert found % 1024 == 0 and plan.kv_bytes(found) <= 10 * MB < plan.kv_bytes(found + 1024)
    (record,) = caplog.records
    most = plan.largest_loadable(memory)
    assert f"{found} tokens, not the 100000" in record.getMessage() and f"up to {most}" in record.getMessage()
    caplog.clear()
    assert choose_context(plan, None, limits(1000 * MB)) == 100_000
    assert choose_context(plan, None, memory, kv_memory=1 * MB) == 100_000
    assert choose_context(replace(plan, kv_tokens=4096), None, memory) == 100_000
    assert not caplog.records
    with pytest.raises(OutOfMemoryError, match="512 tokens"):
        choose_context(plan, None, limits(110 * MB))


def test_a_draft_model_counts_too(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    both = replace(plan, beside=plan)
    assert both.total_bytes(1024) == 2 * plan.total_bytes(1024)
    assert plan.largest_loadable(limits(222 * MB)) > 2 * both.largest_loadable(limits(222 * MB)) > 0


def free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Let the machine have so much."""
    found = MemoryLimits(num_bytes, num_bytes)
    monkeypatch.setattr(machine_limits, "memory_limits", lambda: found)
    monkeypatch.setattr("localinfer.engine.cache.block_pool.memory_limits", lambda: found)


def test_load_refuses_before_it_reads_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(monkeypatch, 45 * MB)
    read = []
    monkeypatch.setattr(CpuWeights, "linear", lambda self, name, rows=None: read.append(name))
    with pytest.raises(OutOfMemoryError, match="demo-f16.gguf needs"):
        localinfer.load(threads=1)
    assert not read


def test_load_reduces_the_context_and_its_cache_holds_all_of_it(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    plan = plan_file(DEMO)
    room = 2 * plan.kv_bytes(608)
    free_memory(monkeypatch, plan.fixed_bytes + room)
    with localinfer.load(threads=1, speculation=None) as llm:
        # Less than a conversation needs by default, so all that can be requested.
        assert llm.context_length == plan.largest_context(int(KV_SHARE * room)) == 1024
    free_memory(monkeypatch, plan.fixed_bytes + plan.kv_bytes(800))
    with localinfer.load(threads=1, speculation=None) as llm:
        assert 512 < llm.context_length < 800
        assert "not the 1024 it was trained for" in caplog.text
        free_memory(monkeypatch, plan.kv_bytes(800))
        assert default_kv_memory(llm._model.kv_layout, llm.context_length, MAX_BATCH_ROWS) >= plan.kv_bytes(
            llm.context_length
        )


def test_report_has_every_context_and_what_fits() -> None:
    plan = plan_file(DEMO)
    found = describe_memory(DEMO, limits(16_000 * MB))
    assert [row["context_length"] for row in found["contexts"]] == [1024]
    assert found["contexts"][0]["kv_bytes"] == {"f16": plan.kv_bytes(1024), "q8_0": plan.kv_bytes(1024, "q8_0")}
    assert found["contexts"][0]["total_bytes"]["f16"] == plan.total_bytes(1024)
    assert "the whole context fits here, where 16.0 GB of 64.0 GB are free" in "\n".join(memory_lines(found))
    small = describe_memory(DEMO, limits(plan.fixed_bytes + plan.kv_bytes(700)))
    assert small["largest_context"]["f16"] < 700 < small["largest_context"]["q8_0"]
    assert f"{small['largest_context']['f16']} tokens as f16, 1024 tokens as q8_0" in "\n".join(memory_lines(small))
    assert "does not fit here" in "\n".join(memory_lines(describe_memory(DEMO, limits(MB))))


def test_report_says_why_a_model_is_not_known(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "unheard-of")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = describe_memory(tmp_path / "m.gguf")
    assert "unheard-of" in found["unknown"]
    assert list(memory_lines(found)) == [f"  not known: {found['unknown']}"]


def test_embeddings_of_pictures_count_for_models_that_take_some() -> None:
    file = open_model_file(DEMO)
    config = read_config(file)
    words, pictures = (plan_memory(file, replace(config, takes_media=takes)) for takes in (False, True))
    file.close()
    assert pictures.growth_bytes(1024) - words.growth_bytes(1024) == DEFAULT_EMBEDDING_BYTES
    assert pictures.fixed_bytes == words.fixed_bytes


def test_encoders_and_the_buffers_of_the_largest_picture_count(tmp_path: Path, caplog) -> None:
    words = plan_of(tmp_path)
    pictures = words.with_media(20 * MB, 40 * MB)
    assert pictures.fixed_bytes == words.fixed_bytes + 60 * MB
    memory = limits(words.fixed_bytes + 68 * MB)
    # A context that was not asked for is made smaller; one that was, and fits beside words only, is refused in words.
    with caplog.at_level(logging.WARNING):
        whole, reduced = choose_context(words, None, memory), choose_context(pictures, None, memory)
    assert 0 < reduced < whole
    asked = words.largest_loadable(memory)
    check_fits(words, asked, memory)
    with pytest.raises(OutOfMemoryError, match=r'60 MB of it for pictures.*mmproj "off", with which it .* fits'):
        check_fits(pictures, asked, memory)
    for plan, parts in ((pictures, (True, False)), (words, (False, False))):
        with pytest.raises(OutOfMemoryError) as caught:
            check_fits(plan, 100_000, limits(words.fixed_bytes))
        assert tuple(part in str(caught.value) for part in ("for pictures", "mmproj")) == parts


def test_availability_and_report_count_encoders(tmp_path: Path) -> None:
    path = seeing_demo(tmp_path)
    plan = plan_media(tmp_path / "mmproj-demo-f16.gguf")
    assert plan.kinds == ("image",) and plan.weight_bytes > 0 and plan.buffer_bytes > 0
    found = [localinfer.availability(path, mmproj=mmproj).memory_bytes for mmproj in ("auto", "off")]
    assert None not in found and found[0] - found[1] >= plan.weight_bytes + plan.buffer_bytes  # type: ignore[operator]
    seen, blind = describe_memory(path, limits(16_000 * MB), plan), describe_memory(path, limits(16_000 * MB))
    assert seen["encoder_bytes"] == {"weights": plan.weight_bytes, "buffers": plan.buffer_bytes}
    totals = [one["contexts"][0]["total_bytes"]["f16"] for one in (seen, blind)]
    assert totals[0] - totals[1] == plan.weight_bytes + plan.buffer_bytes
    assert "for the largest picture" in "\n".join(memory_lines(seen))
    assert "picture" not in "\n".join(memory_lines(blind))
    damaged = tmp_path / "mmproj-damaged.gguf"
    damaged.write_bytes(b"GGUF")
    refused = localinfer.availability(path, mmproj=damaged)
    assert not refused.supported and "mmproj-damaged.gguf" in str(refused.reason)


def test_a_batch_holds_the_largest_picture_whose_rows_see_each_other(tmp_path: Path) -> None:
    path = build_model(tmp_path, "gemma4-dense").path
    file = open_model_file(path)
    config = read_config(file)
    words, pictures = (plan_memory(file, replace(config, takes_media=takes)) for takes in (False, True))
    file.close()
    assert batch_rows_of(words.config) == MAX_BATCH_ROWS < batch_rows_of(pictures.config) == 1120
    assert pictures.scratch_bytes > words.scratch_bytes
    model = load_model(path, threads=1, takes_media=True)
    assert model.program.max_batch_rows == 1120
    model.close()
