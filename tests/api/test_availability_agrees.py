"""`availability` and `load` say the same of draft layers, draft models, windows and GPUs: memory, context, refusals."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import localinfer
from localinfer.engine.speculation.draft_model import DraftModel
from localinfer.kernels.cuda.device import FoundDevice
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.loading import drafters
from localinfer.loading.memory.plan import plan_file, plan_memory
from localinfer.loading.options import model_path
from localinfer.models.load import assistant, devices
from localinfer.models.load.loader import open_model_file
from localinfer.models.load.placement import MARGIN_BYTES
from localinfer.models.load.weights import CpuWeights
from localinfer.system import machine_limits
from localinfer.system.machine_limits import MemoryLimits
from tests.api.packed_bytes import packed_bytes
from tests.models.arch_models import build_model, build_text_model
from tests.models.gemma4_texts import DRAFT, TARGET, write_gemma4
from tests.models.talking_models import build_talking_model
from tests.support.inside import engine_of, model_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Paths of models by name; each is made once."""
    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name in ("target", "assistant"):
            return write_gemma4(folder, TARGET if name == "target" else DRAFT)
        if name == "encoder":
            return build_text_model(folder, "bert-encoder").path
        if name == "demo":
            return model_path(None)
        talking = {"glm4moe-mtp": "glm4moe-mtp", "qwen35-talking": "qwen35-hybrid"}
        return build_talking_model(folder, talking[name]) if name in talking else build_model(folder, name).path

    def path_of(name: str) -> Path:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return path_of


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drafts cost is beside the point."""
    monkeypatch.setattr(drafters, "_verification_seconds", lambda *_: [1.0, 1.0, 1.0])


def draft_bytes(path: Path, llm: localinfer.LLM, options: dict[str, Any]) -> int:
    """What `LLM.info` leaves out: what the draft model takes, or adds to its target on the CPU."""
    draft, length = options.get("draft"), llm.context_length
    if draft is None or (assistant.is_assistant(draft) and llm.info.device != "cpu"):
        return 0
    kv_type = options.get("kv_type", "f16")
    if not assistant.is_assistant(draft):
        plan = plan_file(draft, kv_type=kv_type)
        return plan.total_bytes(min(length, plan.config.context_length))
    with closing(open_model_file(path)) as file:
        alone, both = (plan_memory(file, kv_type=kv_type, assistant=one) for one in (None, draft))
    return both.total_bytes(length) - alone.total_bytes(length)


def kernels_asked_for(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, set[str]]:
    """What `work` returns, and the kernels of which it asked whether they are compiled."""
    names: set[str] = set()
    is_cached = Kernel.is_cached.fget  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "is_cached", property(lambda kernel: names.add(kernel.name) or is_cached(kernel)))
        return work(), names


def check(path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Compare what is said with what is loaded; returns the reason if it is refused."""
    found, planned = kernels_asked_for(lambda: localinfer.availability(path, threads=1, **options), monkeypatch)
    if found.error is not None:
        with pytest.raises(type(found.error)) as raised:
            localinfer.load(path, threads=1, **options)
        assert str(raised.value) == found.reason
        return str(found.reason)
    llm, loaded = kernels_asked_for(lambda: localinfer.load(path, threads=1, **options), monkeypatch)
    with llm:
        assert found.supported and found.context_length == llm.context_length
        assert found.memory_bytes == llm.info.memory_bytes + draft_bytes(path, llm, options)
        assert planned == loaded
    return None


@pytest.mark.parametrize(
    ("name", "options", "refusal"),
    [
        ("demo", {"speculation": None}, None),
        ("demo", {"speculation": "ngram", "kv_type": "q8_0/q4_0"}, None),
        ("demo", {"speculation": "mtp"}, "brings no layers"),
        ("demo", {"draft": "demo"}, None),
        ("demo", {"draft": "demo", "speculation": "draft", "context_length": 2000}, None),
        ("demo", {"draft": "glm4moe-mtp", "kv_type": "q8_0"}, None),
        ("demo", {"draft": "target"}, "does not give the same ids"),
        ("demo", {"draft": "llama-gqa"}, "without a tokenizer in both files"),
        ("demo", {"draft": "assistant"}, "no draft model for"),
        ("demo", {"kv_window": 128}, None),
        ("demo", {"kv_window": 128, "speculation": "mtp"}, "no kv_window"),
        ("demo", {"kv_window": 1000, "kv_type": "q4_0"}, None),
        ("demo", {"kv_window": 1024}, None),
        ("demo", {"kv_window": 127}, "must be at least 128"),
        ("demo", {"kv_window": 160, "context_length": 4001}, None),
        ("glm4moe-mtp", {}, None),
        ("glm4moe-mtp", {"speculation": "mtp", "context_length": 777, "kv_type": "q8_0"}, None),
        ("glm4moe-mtp", {"speculation": "ngram"}, None),
        ("glm4moe-mtp", {"draft": "demo"}, None),
        ("glm4moe-mtp", {"kv_window": 300}, None),
        ("glm4moe-mtp", {"kv_window": 300, "speculation": "mtp"}, "no kv_window"),
        ("glm4moe-mtp", {"kv_window": 4096}, None),
        ("qwen35-mtp", {}, None),
        ("qwen35-mtp", {"kv_window": 128, "context_length": 1500}, None),
        ("target", {}, None),
        ("target", {"draft": "assistant"}, None),
        ("target", {"draft": "assistant", "speculation": "draft", "kv_type": "q8_0", "context_length": 333}, None),
        ("target", {"draft": "demo"}, "does not give the same ids"),
        ("gemma3-gqa", {"kv_window": 128, "context_length": 999}, None),
        ("llama4-moe", {"kv_window": 128, "context_length": 999}, "chunks of fixed positions"),
        ("deepseek32-mtp", {"speculation": "mtp"}, None),
        ("deepseek32-sparse", {"kv_window": 128, "context_length": 999}, "itself chooses"),
        ("mamba-recurrent", {"kv_window": 128, "context_length": 999}, None),
        ("encoder", {}, None),
        ("encoder", {"kv_window": 1}, "an encoder keeps nothing"),
        ("encoder", {"speculation": "ngram"}, "nothing is drafted"),
        ("encoder", {"draft": "demo"}, "nothing is drafted"),
    ],
)
def test_drafts_and_windows_on_the_cpu(
    name: str,
    options: dict[str, Any],
    refusal: str | None,
    models: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {**options, **({"draft": models(options["draft"])} if "draft" in options else {})}
    reason = check(models(name), {"device": "cpu", **given}, monkeypatch)
    assert (reason is None) == (refusal is None) and (refusal or "") in (reason or "")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """Makes an emulated GPU of so many bytes, less of which are free once a model is loaded; gives those opened."""
    pytest.importorskip("numba_cuda", reason="CUDA kernels are written with numba-cuda, which is not installed")
    from tests.models.emulated_gpu import emulate_gpus

    monkeypatch.setattr(DraftModel, "_measure", lambda self, told: 1e-3)

    def make(num_bytes: int) -> list[Any]:
        opened = emulate_gpus(monkeypatch, [num_bytes])
        taken: list[int] = []
        open_devices = devices.open_devices

        def find_devices(most: int | None = None, *, among: Sequence[int] | None = None) -> list[FoundDevice]:
            return [FoundDevice("emulator", num_bytes - sum(taken), 0)]

        def counted(*asked: Any, **more: Any) -> Any:
            found = open_devices(*asked, **more)
            if found is not None:
                taken.append(sum(share.num_bytes - share.cache_bytes for share in found[1].gpus))
            return found

        monkeypatch.setattr(devices, "find_devices", find_devices)
        monkeypatch.setattr(devices, "open_devices", counted)
        return opened

    return make


@pytest.mark.parametrize(
    ("name", "options", "refusal", "num_opened"),
    [
        ("demo", {}, None, 1),
        ("demo", {"draft": "demo"}, None, 2),
        ("demo", {"draft": "demo", "device": "cuda", "speculation": "draft", "context_length": 2000}, None, 2),
        ("demo", {"draft": "demo", "device": "cuda:0", "kv_type": "q8_0"}, None, 2),
        ("demo", {"draft": "qwen35-talking", "device": "cuda:0"}, None, 1),
        ("demo", {"draft": "target"}, "does not give the same ids", 2),
        ("demo", {"speculation": "mtp"}, "brings no layers", 1),
        ("demo", {"kv_window": 128}, None, 1),
        ("demo", {"kv_window": 128, "device": "cuda"}, None, 1),
        ("demo", {"kv_window": 128, "device": "cuda", "gpu_layers": 1}, "kv_window evicts by", 1),
        ("demo", {"kv_window": 128, "gpu_layers": 1}, None, 1),
        ("demo", {"kv_window": 1024, "device": "cuda"}, None, 1),
        ("glm4moe-mtp", {}, None, 1),
        ("glm4moe-mtp", {"speculation": "mtp"}, "cannot be used", 1),
        ("glm4moe-mtp", {"speculation": "mtp", "gpu_layers": 0}, None, 0),
        ("qwen35-mtp", {}, None, 0),
        ("mamba-recurrent", {"kv_window": 128, "context_length": 999, "device": "cuda"}, "recurrent layers", 0),
        ("target", {"draft": "assistant"}, None, 1),
        ("target", {"draft": "assistant", "speculation": "draft"}, "drafts on the CPU only", 1),
        ("target", {"draft": "assistant", "device": "cuda"}, "runs on the CPU only", 0),
    ],
)
def test_drafts_and_windows_on_a_gpu(
    name: str,
    options: dict[str, Any],
    refusal: str | None,
    num_opened: int,
    models: Callable[[str], Path],
    gpu: Callable[[int], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = gpu(64 << 30)
    given = {**options, **({"draft": models(options["draft"])} if "draft" in options else {})}
    reason = check(models(name), given, monkeypatch)
    assert (reason is None) == (refusal is None) and (refusal or "") in (reason or "")
    assert len(opened) == num_opened


def test_a_draft_model_without_room_on_the_gpu_takes_main_memory(
    models: Callable[[str], Path], gpu: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    demo, options = models("demo"), {"draft": models("demo"), "context_length": 300}
    gpu(64 << 30)
    with localinfer.load(demo, context_length=300, speculation=None) as llm:
        placement = model_of(llm).placement
    assert placement is not None and placement.is_whole
    plan, room = plan_file(demo), placement.num_bytes + MARGIN_BYTES + (1 << 20)
    needed = plan.total_bytes(300) + plan.scratch_bytes
    opened = gpu(room)
    assert check(demo, options, monkeypatch) is None
    assert len(opened) == 1
    gpu(room)
    assert check(demo, {**options, "memory_limit": needed}, monkeypatch) is None
    gpu(room)
    reason = check(demo, {**options, "memory_limit": needed - 1}, monkeypatch)
    assert reason is not None and "for the draft model" in reason
    monkeypatch.setattr(machine_limits, "memory_limits", lambda: MemoryLimits(needed - 1, needed - 1))
    gpu(room)
    reason = check(demo, options, monkeypatch)
    assert reason is not None and "leave the draft model out, put more of it on GPUs" in reason


def test_the_plan_counts_what_a_draft_model_of_the_same_cache_loads(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CpuWeights] = []

    class Watched(CpuWeights):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

    monkeypatch.setattr(assistant, "CpuWeights", Watched)
    with (
        localinfer.load(models("target"), device="cpu", threads=1, draft=models("assistant")) as llm,
        closing(open_model_file(models("target"))) as file,
    ):
        own = model_of(llm).weights
        assert isinstance(own, CpuWeights) and len(made) == 1
        plan = plan_memory(file, assistant=models("assistant"))
        assert plan.weight_bytes == packed_bytes(own) + packed_bytes(made[0])


@pytest.mark.parametrize("window", [128, 256, 512])
def test_a_text_past_its_window_holds_no_more_than_is_said(window: int, models: Callable[[str], Path]) -> None:
    options: dict[str, Any] = {"threads": 1, "context_length": 2400, "kv_window": window, "kv_type": "q8_0"}
    whole = localinfer.availability(models("demo"), device="cpu", **{**options, "kv_window": None})
    said = localinfer.availability(models("demo"), device="cpu", **options)
    assert said.memory_bytes is not None and whole.memory_bytes is not None
    plan = plan_file(models("demo"), kv_type="q8_0", context_length=2400)
    assert whole.memory_bytes == plan.total_bytes(2400) > said.memory_bytes
    kept = {**options, "kv_memory": said.memory_bytes - plan.fixed_bytes}
    with localinfer.load(models("demo"), device="cpu", speculation=None, **kept) as llm:
        found = llm.complete([5 + index % 400 for index in range(2300)], max_tokens=9, ignore_eos=True)
        assert len(found.token_ids) == 9
        assert engine_of(llm).pool.allocated_bytes <= kept["kv_memory"]


def test_a_text_ends_for_a_draft_model_where_its_own_context_does(models: Callable[[str], Path]) -> None:
    long, short = plan_file(models("glm4moe-mtp")), plan_file(models("demo"))
    both = replace(long, beside=short)
    for length in (512, 1024, 4096):
        expected = long.kv_bytes(length) + short.kv_bytes(min(length, 1024))
        assert both.kv_bytes(length) == expected
        assert both.growth_bytes(length) == long.growth_bytes(length) + short.growth_bytes(min(length, 1024))
    found = localinfer.availability(models("glm4moe-mtp"), device="cpu", draft=models("demo"))
    assert found.memory_bytes == both.total_bytes(4096)
