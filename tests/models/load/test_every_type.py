"""Every tensor type a file can have, loaded and run: wherever it stands, and however the file is cut."""

import re
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import localinfer
from localinfer.apps.quantize import quantize
from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.kernels.cpu.compiled import blocks
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.layouts import CUDA_LAYOUTS, GGUF_LAYOUTS, Layout
from localinfer.loading.memory.plan import CountedWeights
from localinfer.models.load.weights import CpuWeights, CudaWeights
from localinfer.quant.formats.reference_encoders import ENCODABLE_TYPES
from localinfer.quant.formats.types import TensorType, bits_per_weight, block_bytes, block_dtype, block_size, row_bytes
from localinfer.quant.gguf.reader import GGUFFile, read_gguf
from localinfer.quant.methods.presets import PRESETS
from localinfer.quant.pipeline import conversion
from localinfer.quant.pipeline.conversion import layout_of, runs_directly
from tests.conftest import REPOSITORY
from tests.support.typed_models import (
    ACTIVATION_TYPES,
    TOKEN_IDS,
    WEIGHT_TYPES,
    Weight,
    check_model,
    make_model,
    read_model,
)

ONE_OF_EACH_PRODUCT = [
    *(TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0, TensorType.Q4_K, TensorType.Q6_K),
    *(TensorType.Q2_K, TensorType.IQ3_XXS, TensorType.Q2_0, TensorType.IQ4_NL, TensorType.MXFP4, TensorType.NVFP4),
]
"""The kernels of experts multiply by the functions of other matrices: types that share one differ in nothing there."""
CONVERTED = [type for type in WEIGHT_TYPES if not runs_directly(type)]
CONVERTED_ON_GPU = [type for type in WEIGHT_TYPES if not runs_directly(type, CUDA_LAYOUTS)]


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda type: type.name)
def test_model_in_any_type_runs_as_its_weights_say(type: TensorType, tmp_path: Path) -> None:
    """Of its table, its matrices and, for one type of each product, its experts. Files are whole or split in turn."""
    num_parts = 1 + WEIGHT_TYPES.index(type) % 3
    num_experts = 3 if type in ONE_OF_EACH_PRODUCT or type in CONVERTED else 0
    check_model(make_model(type, num_experts=num_experts, is_tied=num_parts == 2), tmp_path, num_parts)


def test_experts_are_run_of_each_function_of_products() -> None:
    functions = {blocks.BODIES.get(Layout[type.name], type) for type in ONE_OF_EACH_PRODUCT}
    assert functions == {blocks.BODIES.get(layout, TensorType[layout.name]) for layout in GGUF_LAYOUTS}


@pytest.mark.parametrize(
    "type",
    [type for type in CONVERTED + ONE_OF_EACH_PRODUCT if type not in ENCODABLE_TYPES],
    ids=lambda type: type.name,
)
def test_dense_model_in_any_type_runs_as_its_weights_say(type: TensorType, tmp_path: Path) -> None:
    """`test_weight_types.py` has those of the types with an encoder."""
    check_model(make_model(type), tmp_path)


@pytest.mark.parametrize("type", CONVERTED, ids=lambda type: type.name)
def test_table_and_head_in_any_type_run_beside_layers_of_another(type: TensorType, tmp_path: Path) -> None:
    other = CONVERTED[CONVERTED.index(type) - 1]
    check_model(make_model(TensorType.Q8_0, embedding=type, output=other, is_tied=False), tmp_path, num_parts=2)


@pytest.mark.parametrize(
    "type", [type for type in CONVERTED_ON_GPU if type not in CONVERTED], ids=lambda type: type.name
)
def test_type_that_only_a_gpu_converts_runs_converted(
    type: TensorType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU multiplies, multiplied by the CPU: its kernels for the same layouts are tested beside it."""
    monkeypatch.setattr(CpuWeights, "_layouts", CUDA_LAYOUTS)
    check_model(make_model(type, num_experts=3, is_tied=False), tmp_path, layouts=CUDA_LAYOUTS)


@pytest.mark.parametrize("layouts", [GGUF_LAYOUTS, CUDA_LAYOUTS], ids=["cpu", "gpu"])
def test_scales_of_mxfp4_that_float16_cannot_hold_run_as_they_are(
    layouts: tuple[Layout, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuWeights, "_layouts", layouts)
    model = make_model(TensorType.MXFP4, num_experts=2)
    for weight in model.weights.values():
        if weight.type is TensorType.MXFP4:
            blocks = weight.blocks.view(block_dtype(weight.type))
            blocks["e"][::7] = 90
    wide = {weight.type for weight in model.as_converted(CUDA_LAYOUTS).weights.values()}
    assert wide == {TensorType.BF16, TensorType.F32}
    check_model(model, tmp_path, layouts=layouts)


class FakeDevice:
    """Memory of a GPU, of which nothing is read back."""

    def allocate(self, num_bytes: int) -> int:
        return 1 << 40

    def write(self, address: int, data: object) -> None:
        pass


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda type: type.name)
def test_weights_of_any_type_are_uploaded_in_a_layout_that_a_gpu_reads(type: TensorType, tmp_path: Path) -> None:
    pool = ThreadPool(1)
    with read_gguf(make_model(type, num_experts=3).write(tmp_path / "model.gguf")) as file:
        weights = CudaWeights(file, pool, cast(CudaDevice, FakeDevice()))
        loaded = [weights.linear(name) for name in ("blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight")]
        loaded.append(weights.embedding("token_embd.weight"))
        assert {one.packed.layout for one in loaded} == {layout_of(type, CUDA_LAYOUTS)}
        assert layout_of(type, CUDA_LAYOUTS) in CUDA_LAYOUTS
        assert set(weights.notes) == ({type} & set(CONVERTED_ON_GPU))
    pool.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_converted_model_has_the_same_bits_in_any_batch(tmp_path: Path, threads: int) -> None:
    path = make_model(TensorType.IQ1_S).write(tmp_path / "model.gguf")
    with localinfer.load(path, threads=threads, device="cpu") as llm:
        whole = llm.logits(TOKEN_IDS)
        for length in (1, 4, 8):
            np.testing.assert_array_equal(llm.logits(TOKEN_IDS[:length]), whole[:length])


@pytest.mark.parametrize(
    ("preset", "unit"),
    [
        ("Q4_K_M", 1),
        *((preset, 32) for preset in PRESETS),
        *((preset, 256) for preset in PRESETS if block_size(PRESETS[preset].default) == 256),
    ],
)
def test_model_that_quantize_has_just_written_loads_and_runs(preset: str, unit: int, tmp_path: Path) -> None:
    num_experts = 2 if preset == "MXFP4_MOE" or unit == 1 else 0
    source = make_model(TensorType.F32, unit=unit, num_experts=num_experts).write(tmp_path / "source.gguf")
    quantize(source, tmp_path / "small.gguf", type=preset, method="rtn", threads=1)
    with read_gguf(tmp_path / "small.gguf") as file:
        small = read_model(file)
    check_model(small, tmp_path)
    types = {weight.type for name, weight in small.weights.items() if name.startswith("blk.")}
    assert (PRESETS[preset].default in types) == (unit == 256 or unit >= block_size(PRESETS[preset].default))


@pytest.mark.parametrize("type", CONVERTED, ids=lambda type: type.name)
def test_quantize_reads_any_type(type: TensorType, tmp_path: Path) -> None:
    source = make_model(type)
    quantize(source.write(tmp_path / "source.gguf"), tmp_path / "small.gguf", type="Q8_0", method="rtn", threads=1)
    with read_gguf(tmp_path / "small.gguf") as file:
        small = read_model(file)
    check_model(small, tmp_path, wanted=source)


def test_formats_that_are_documented_are_all_that_run() -> None:
    """The tables of the readme: block sizes, bytes, and what each type runs as."""
    text = (REPOSITORY / "quant" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| ([\d.]+) \| [^|]+ \| (yes|) +\|$", text, re.MULTILINE)
    plain = {"F64", "I8", "I16", "I32", "I64"}
    assert {name for name, *_ in rows} | plain == {type.name for type in WEIGHT_TYPES}
    for name, columns, num_bytes, bits, encoder in rows:
        type = TensorType[name]
        assert (block_size(type), block_bytes(type)) == (int(columns), int(num_bytes))
        assert float(bits) == bits_per_weight(type)
        assert (encoder == "yes") == (type in ENCODABLE_TYPES)
    runs_as = re.findall(r"^\| ([A-Z][\w, ]+) \| ([A-Z]\w+) \| ([\d.]+) \| ", text, re.MULTILINE)
    documented: dict[TensorType, str] = {}
    for names, layout, bits in runs_as:
        assert float(bits) == bits_per_weight(TensorType[layout])
        for name in re.split(", | to ", names):
            documented |= dict.fromkeys(_family(name), layout)
    documented |= dict.fromkeys((TensorType.I16, TensorType.I32), "F32")
    assert documented == {type: layout_of(type, CUDA_LAYOUTS).name for type in CONVERTED_ON_GPU}
    (on_cpu,) = re.findall(r"The CPU converts ([^.]+)\.", text)
    named = {type for name in re.split(r",\s+|\s+and\s+", on_cpu) for type in _family(name)}
    assert named | {TensorType[name] for name in plain} == set(CONVERTED)
    others = {type.name: layout_of(type).name for type in CONVERTED if layout_of(type) not in CUDA_LAYOUTS}
    assert others == dict(re.findall(r"(\w+) becomes (\w+) there", text))


def _family(name: str) -> list[TensorType]:
    return [type for type in CONVERTED_ON_GPU if type.name == name or type.name.startswith(f"{name}_")]


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda type: type.name)
def test_memory_is_counted_as_it_is_taken(type: TensorType, tmp_path: Path) -> None:
    pool = ThreadPool(1)
    with read_gguf(make_model(type, unit=max(16, block_size(type))).write(tmp_path / "model.gguf")) as file:
        weights, counted, added, taken = CpuWeights(file, pool), CountedWeights(file), 0, 0
        for name, tensor in file.tensors.items():
            if len(tensor.shape) > 1:
                packed = weights.linear(name).packed
                counted.linear(name)
                rows = tensor.shape[0]
                assert packed.data.size % -(-rows // 16) == 0
                added += packed.tile_bytes // 16 * rows - tensor.num_bytes
                taken += packed.data.size
        assert counted.num_bytes() == taken
        assert (added == 0) == (bits_per_weight(type) == bits_per_weight(TensorType[layout_of(type).name]))
    pool.close()


class CountingFile:
    """A `ModelFile` that remembers what it was told to forget."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.forgotten: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def forget(self, name: str, first: int, end: int) -> None:
        self.forgotten.append((name, first, end))
        self._file.forget(name, first, end)


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=lambda type: type.name)
def test_every_byte_of_a_tensor_is_forgotten_once(
    type: TensorType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stretches one after the other, whatever the bytes that are packed in their place."""
    monkeypatch.setattr(conversion, "WEIGHTS_PER_CHUNK", 1024)
    told: list[tuple[str, int, int]] = []
    pool = ThreadPool(1)
    with read_gguf(make_model(type, num_experts=3).write(tmp_path / "model.gguf")) as opened:
        file = CountingFile(opened)
        weights = CpuWeights(file, pool, lambda *words: told.append(words))
        matrices = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"]
        weights.embedding("token_embd.weight")
        for name in matrices:
            weights.linear(name)
        for name in matrices:
            stretches = [(first, end) for found, first, end in file.forgotten if found == name]
            firsts, ends = [first for first, _ in stretches], [end for _, end in stretches]
            assert [0, *ends] == [*firsts, file.tensor(name).num_bytes]
            assert len(stretches) > 1 or runs_directly(type)
        file.forgotten.clear()
        # The other rows have not been read.
        weights.linear("blk.0.ffn_up_exps.weight", slice(1, 9))
        assert not file.forgotten
    pool.close()
    stage = "loading weights (MB)" if runs_directly(type) else f"converting {type.name} weights (MB)"
    assert {words[0] for words in told} == {stage}
    assert all(done <= total for _, done, total in told)


@pytest.mark.parametrize("type", CONVERTED, ids=lambda type: type.name)
def test_some_rows_of_a_matrix_are_those_rows_converted(type: TensorType, tmp_path: Path) -> None:
    model = make_model(type, num_experts=3)
    matrices = ["blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"]
    pool = ThreadPool(1)
    packed = []
    for number, one in enumerate((model, model.as_converted())):
        with read_gguf(one.write(tmp_path / f"{number}.gguf")) as file:
            weights = CpuWeights(file, pool)
            packed.append([weights.linear(name, slice(3, 19)).packed.data.copy() for name in matrices])
    pool.close()
    for found, wanted in zip(*packed, strict=True):
        np.testing.assert_array_equal(found, wanted)


class Stop(Exception):
    """What a progress callback raises to end a load."""


def test_conversion_ends_where_its_progress_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "WEIGHTS_PER_CHUNK", 1024)
    path = make_model(TensorType.IQ1_S).write(tmp_path / "model.gguf")
    num_threads, told = threading.active_count(), []

    def stop(stage: str, done: int, total: int) -> None:
        told.append(stage)
        if told.count("converting IQ1_S weights (MB)") == 3:
            raise Stop

    with pytest.raises(Stop):
        localinfer.load(path, threads=2, device="cpu", progress=stop)
    assert told.count("converting IQ1_S weights (MB)") == 3
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up_exps.weight", "output_norm.weight"])
@pytest.mark.parametrize("type", ACTIVATION_TYPES, ids=lambda type: type.name)
def test_tensor_of_a_type_for_activations_is_refused_by_its_name(type: TensorType, name: str, tmp_path: Path) -> None:
    model = make_model(TensorType.F16, unit=256, num_experts=2)
    shape = model.weights[name].shape
    num_bytes = int(np.prod(shape[:-1], dtype=int)) * row_bytes(type, shape[-1])
    model.weights[name] = Weight(type, shape, np.zeros(num_bytes, np.uint8))
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedFormatError, match=f"^{name}: {type.name} only ever holds activations"):
        localinfer.load(path, threads=1, device="cpu")


def test_weights_that_cannot_be_converted_are_refused_by_their_name(tmp_path: Path) -> None:
    model = make_model(TensorType.IQ1_S)
    blocks = model.weights["blk.0.ffn_up.weight"].blocks.view(block_dtype(TensorType.IQ1_S))
    blocks["d"][5] = np.inf
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(CorruptFileError, match="^blk.0.ffn_up.weight: a IQ1_S tensor holds weights that are infinite"):
        localinfer.load(path, threads=1, device="cpu")
