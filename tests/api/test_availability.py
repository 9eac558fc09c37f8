"""Whether a model can be loaded, and what that takes, is said as `load` then finds it."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer import errors
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.loading.memory.plan import plan_file
from localinfer.loading.options import model_path
from localinfer.models.load.loader import load_model, open_model_file
from localinfer.models.load.needed_kernels import kernels_of_file
from localinfer.system import machine_limits
from localinfer.system.machine_limits import MemoryLimits
from tests.kernels.subprocesses import run
from tests.models.arch_models import architectures, build_model, build_text_model, text_models
from tests.support.checkpoint_files import LLAMA_CONFIG, MODULES, llama_weights, tokenizer_document, write_folder
from tests.support.quantized_checkpoints import gptq_tensors, in_module, random_codes

MB = 10**6


def free_memory(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(machine_limits, "memory_limits", lambda: MemoryLimits(num_bytes, num_bytes))


def test_a_model_that_can_be_loaded(tmp_path: Path) -> None:
    demo, plan = model_path(None), plan_file(model_path(None))
    found = localinfer.availability()
    assert found == localinfer.availability(demo) and found.supported
    assert (found.reason, found.error, found.context_length) == (None, None, 1024)
    assert found.memory_bytes == plan.total_bytes(1024)
    assert localinfer.availability(context_length=512).memory_bytes == plan.total_bytes(512)
    with_draft = localinfer.availability(context_length=512, kv_type="q8_0", draft=demo)
    assert with_draft.memory_bytes == 2 * plan.total_bytes(512, "q8_0")


def test_a_folder_and_an_encoder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "folder", llama_weights(), tokenizer=tokenizer_document())
    with localinfer.load(folder, threads=1) as llm:
        found = localinfer.availability(folder)
        assert (found.supported, found.context_length) == (True, llm.context_length)
        assert found.memory_bytes == llm.info.memory_bytes and found.is_compiled
    encoder = localinfer.availability(build_text_model(tmp_path, "bert-encoder").path)
    assert encoder.supported and encoder.memory_bytes and encoder.context_length


@pytest.mark.parametrize("kind", ["missing", "corrupt", "not a model", "unsupported", "broken folder"])
def test_a_file_that_cannot_be_loaded(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    wanted: type[errors.LocalinferError] = errors.CorruptFileError
    if kind == "missing":
        wanted = errors.ModelFileError
    elif kind == "corrupt":
        path.write_bytes(model_path(None).read_bytes()[:-4096])
    elif kind == "not a model":
        path.write_bytes(b"PK\3\4" + bytes(100))
    elif kind == "unsupported":
        import gguf

        writer = gguf.GGUFWriter(str(path), "unheard-of")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        wanted = errors.UnsupportedFormatError
    else:
        path = write_folder(tmp_path / "folder", llama_weights())
        (path / "model.safetensors").unlink()
        wanted = errors.ModelFileError
    found = localinfer.availability(path)
    assert (found.supported, found.memory_bytes, found.context_length, found.is_compiled) == (False, None, 0, None)
    assert isinstance(found.error, wanted) and str(found.error) == found.reason
    assert found.error.__traceback__ is None
    with pytest.raises(type(found.error)) as raised:
        localinfer.load(path)
    assert str(raised.value) == found.reason


def test_a_model_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_file(model_path(None))
    free_memory(monkeypatch, 30 * MB)
    found = localinfer.availability()
    assert not found.supported and isinstance(found.error, errors.OutOfMemoryError)
    assert found.memory_bytes == plan.total_bytes(512)
    free_memory(monkeypatch, plan.fixed_bytes + plan.kv_bytes(800))
    assert 512 < localinfer.availability().context_length < 800
    wanted = localinfer.availability(context_length=1024)
    assert (wanted.supported, wanted.memory_bytes) == (False, plan.total_bytes(1024))


def test_a_memory_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_file(model_path(None))
    limit = plan.total_bytes(700) + plan.growth_bytes(1024)
    assert localinfer.availability(memory_limit=limit).context_length == 704
    assert "memory_limit is" in (localinfer.availability(memory_limit=30 * MB).reason or "")


def test_what_no_model_takes_is_an_error() -> None:
    for options in (
        {"context_length": 0},
        {"kv_type": "f8"},
        {"memory_limit": -1},
        {"speculation": "draft"},
        {"gpu_layers": -1},
        {"device": "cpu", "gpu_layers": 1},
        {"tensor_split": [0, 0]},
        {"cpu_moe": -1},
    ):
        with pytest.raises(errors.RequestError):
            localinfer.availability(**options)  # type: ignore[arg-type]
    rope = localinfer.RopeOptions(base=1e5)
    assert localinfer.availability(rope=rope).supported


def test_it_takes_every_option_of_load_that_decides_whether_a_model_fits() -> None:
    others = {
        *("disk_cache", "disk_cache_folder", "limits", "priority", "measure_again", "may_measure", "verify"),
        *("kv_events", "progress", "cancel"),
    }
    asked, loaded = (inspect.signature(one).parameters for one in (localinfer.availability, localinfer.load))
    assert set(loaded) - set(asked) == others
    assert {name: parameter.default for name, parameter in asked.items()} == {
        name: parameter.default for name, parameter in loaded.items() if name not in others
    }


def test_missing_kernels_are_counted_and_none_is_compiled(tmp_path: Path) -> None:
    code = """
import json, sys
import localinfer
found = localinfer.availability()
print(json.dumps([found.is_compiled, found.compile_seconds, "numba" in sys.modules]))
"""
    is_compiled, seconds, has_numba = json.loads(run(code, XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path))[0])
    assert not is_compiled and seconds > 4 and not has_numba
    assert not list(tmp_path.rglob("*.o"))
    with localinfer.load(threads=1):
        compiled = localinfer.availability()
    assert compiled.is_compiled and compiled.compile_seconds == 0


def loaded_kernels(path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What a load makes sure of."""
    names: set[str] = set()
    is_cached = Kernel.is_cached.fget  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "is_cached", property(lambda kernel: names.add(kernel.name) or is_cached(kernel)))
        load_model(path, threads=1, draft_layers=True).close()
    return names


@pytest.mark.parametrize("name", [*architectures()[::4], *text_models()[::3], "glm4moe-mtp", "qwen35-mtp"])
def test_kernels_are_those_that_loading_makes_sure_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = (build_text_model if name in text_models() else build_model)(tmp_path, name).path
    assert planned_kernels(path, monkeypatch) == loaded_kernels(path, monkeypatch)


def test_kernels_of_a_quantized_folder_in_group_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, module = np.random.default_rng(1), "model.layers.0.self_attn.q_proj"
    codes = random_codes(rng, MODULES["self_attn.q_proj"], is_symmetric=False, is_act_order=True)
    weights = {**llama_weights(), **in_module(module, gptq_tensors(codes))}
    del weights[f"{module}.weight"]
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    folder = write_folder(tmp_path / "folder", weights, {**LLAMA_CONFIG, "quantization_config": settings})
    assert planned_kernels(folder, monkeypatch) == loaded_kernels(folder, monkeypatch)


def planned_kernels(path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is known from the header; no weight is read for it."""
    plan = plan_file(path, draft_layers=True)
    file = open_model_file(path)
    try:
        length = plan.config.context_length
        return {kernel.name for kernel in kernels_of_file(file, plan.config, plan.kv_layout(length))}
    finally:
        file.close()
