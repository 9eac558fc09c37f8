"""Folders in FP8, FP4, int8 and their like: the logits of the numbers they state, and what is said of them."""

import json
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.apps.quantize import quantize
from localinfer.apps.show.describe import describe_file, render_text
from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.load.loader import open_model_file
from localinfer.quant.checkpoint.folder import open_folder
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.reader import read_gguf
from tests.models.checkpoint.checkpoint_oracle import oracle_logits
from tests.models.checkpoint.family_folders import family_config
from tests.support import quantized_checkpoints, scaled_checkpoints
from tests.support.checkpoint_files import (
    LAYERS,
    LLAMA_CONFIG,
    MODULES,
    TOKEN_IDS,
    VOCAB,
    Array,
    Stored,
    llama_weights,
    write_folder,
)
from tests.support.quantized_checkpoints import in_module
from tests.support.scaled_checkpoints import Written

Writer = Callable[[Array], Written]

FP8_BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
BITSANDBYTES: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    scheme = {"weights": {"strategy": "channel", **weights}, "input_activations": {"num_bits": 8, "type": "int"}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": scheme}}


def block_fp8(values: Array) -> Written:
    return scaled_checkpoints.fp8(values, 128, 128, leaf="weight_scale_inv")


def row_int8(values: Array) -> Written:
    return scaled_checkpoints.int8(np.random.default_rng(values.size), (values.shape[0], values.shape[1]), 8)


VARIANTS: dict[str, tuple[dict[str, Any], Writer, str]] = {
    "fp8-block": (FP8_BLOCKS, block_fp8, "FP8 (E4M3), a scale per"),
    "w8a8": (compressed("int-quantized", num_bits=8, type="int"), row_int8, "8-bit integers, a scale per row"),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        scaled_checkpoints.mxfp4,
        "MXFP4, groups of 32",
    ),
    "nvfp4": (
        MODELOPT,
        lambda values: scaled_checkpoints.nvfp4(values, is_modelopt=True),
        "NVFP4, groups of 16",
    ),
    "nf4": (
        BITSANDBYTES,
        lambda values: scaled_checkpoints.bitsandbytes(values, "nf4", is_nested=True),
        "NF4, blocks of 64",
    ),
}


def write_pair(
    folder: Path, settings: dict[str, Any], write: Writer, modules: tuple[str, ...] = (), **config: Any
) -> tuple[Path, Path]:
    """Write the tiny Llama with its matrices (and further modules) quantized, and as the numbers they then are."""
    plain: dict[str, Array] = llama_weights()
    stored: dict[str, Stored] = dict(plain)
    paths = [f"model.layers.{layer}.{module}" for layer in range(LAYERS) for module in MODULES]
    for path in (*paths, *modules):
        written = write(plain[f"{path}.weight"].astype(np.float64))
        plain[f"{path}.weight"] = written.weights.astype(np.float32)
        del stored[f"{path}.weight"]
        stored.update(in_module(path, written.tensors))
    config = {**LLAMA_CONFIG, **config}
    quantized = write_folder(folder / "quantized", stored, {**config, "quantization_config": settings})
    return quantized, write_folder(folder / "plain", plain, config)


def difference(found: Array, wanted: Array) -> float:
    """Normalized squared error."""
    return float(((found - wanted) ** 2).sum() / (wanted**2).sum())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_folder_gives_the_logits_of_its_weights(name: str, tmp_path: Path) -> None:
    settings, write, stored_as = VARIANTS[name]
    quantized, plain = write_pair(tmp_path, settings, write)
    wanted = oracle_logits(plain, TOKEN_IDS)
    assert difference(oracle_logits(quantized, TOKEN_IDS), wanted) <= 1e-3
    with localinfer.load(quantized, threads=2, kv_type="f32") as llm:
        found = llm.logits(TOKEN_IDS)
        np.testing.assert_array_equal(llm.logits(TOKEN_IDS[:7]), found[:7])
    # Activations are rounded to int8 in every product of two layers.
    assert difference(found, wanted) <= 2e-3
    shown = render_text(describe_file(str(quantized)), tensors=False)
    assert f"matrices in {stored_as}" in shown


def test_folder_is_quantized_to_a_file_of_the_same_numbers(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path, FP8_BLOCKS, block_fp8)
    quantize(quantized, tmp_path / "model.gguf", type="Q8_0", method="rtn", threads=1)
    name = "blk.1.ffn_down.weight"
    with read_gguf(tmp_path / "model.gguf") as made, open_checkpoint(quantized) as folder:
        assert made.tensor(name).type is folder.tensor(name).type is TensorType.Q8_0
        np.testing.assert_array_equal(made.tensor_bytes(name), folder.tensor_bytes(name))


def test_embeddings_and_the_output_matrix_may_be_quantized(tmp_path: Path) -> None:
    for name in ("w8a8", "mxfp4"):
        settings, write, _ = VARIANTS[name]
        quantized, plain = write_pair(tmp_path / name, settings, write, ("model.embed_tokens", "lm_head"))
        wanted = oracle_logits(plain, TOKEN_IDS)
        assert difference(oracle_logits(quantized, TOKEN_IDS), wanted) <= 1e-5
        with localinfer.load(quantized, threads=1, kv_type="f32") as llm:
            assert difference(llm.logits(TOKEN_IDS), wanted) <= 2e-3


def test_integer_embeddings_that_are_tied_serve_as_output_matrix(tmp_path: Path) -> None:
    codes = quantized_checkpoints.random_codes(np.random.default_rng(2), (VOCAB, 128), group_size=64)
    scales = (codes.scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    codes = quantized_checkpoints.Codes(4, codes.codes, scales, codes.zeros, codes.groups)
    written = Written(quantized_checkpoints.packed_tensors(codes, is_symmetric=False), codes.weights)
    plain: dict[str, Array] = llama_weights()
    del plain["lm_head.weight"]
    stored: dict[str, Stored] = {**plain, **in_module("model.embed_tokens", written.tensors)}
    del stored["model.embed_tokens.weight"]
    plain["model.embed_tokens.weight"] = codes.weights32
    config = {**LLAMA_CONFIG, "tie_word_embeddings": True}
    settings = quantized_checkpoints.packed_settings(4, 64, False)
    quantized = write_folder(tmp_path / "a", stored, {**config, "quantization_config": settings})
    wanted = oracle_logits(write_folder(tmp_path / "b", plain, config), TOKEN_IDS)
    assert difference(oracle_logits(quantized, TOKEN_IDS), wanted) <= 1e-12
    with localinfer.load(quantized, threads=1, kv_type="f32") as llm:
        assert difference(llm.logits(TOKEN_IDS), wanted) <= 1e-3


def test_scales_of_activations_and_of_a_cache_are_left_aside_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def write(values: Array) -> Written:
        written = scaled_checkpoints.fp8(values, *values.shape, inner=0)
        return Written({**written.tensors, "input_scale": np.array(0.1, np.float32)}, written.weights)

    quantized, plain = write_pair(tmp_path, {**MODELOPT, "quant_algo": "FP8"}, write)
    tensors = dict(open_stored(quantized))
    for layer in range(LAYERS):
        for name in ("k_proj.k_scale", "v_proj.v_scale", "k_scale", "k_proj.output_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = np.array(0.5, np.float32)
    config = json.loads((quantized / "config.json").read_text())
    write_folder(quantized, tensors, config)
    assert difference(oracle_logits(quantized, TOKEN_IDS), oracle_logits(plain, TOKEN_IDS)) <= 1e-3
    with caplog.at_level(logging.WARNING), localinfer.load(quantized, threads=1):
        pass
    assert "14 scales of activations are left aside" in caplog.text
    assert "8 scales of a quantized KV cache are left aside" in caplog.text
    shown = render_text(describe_file(str(quantized)), tensors=False)
    assert "8 scales of a quantized KV cache" in shown


def open_stored(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder of F32 and FP8, to be written again."""
    found: dict[str, Stored] = {}
    with closing(open_folder(folder)) as opened:
        for name, tensor in opened.tensors.items():
            raw = np.array(opened.tensor_bytes(name))
            found[name] = tensor.dtype, (raw.view("<f4") if tensor.dtype == "F32" else raw).reshape(tensor.shape)
    return found


@pytest.mark.parametrize("name", ["plain", "fp8-block", "w8a8", "mxfp4", "nf4"])
def test_experts_of_mixtral_run_in_every_form(name: str, tmp_path: Path) -> None:
    base = {**family_config("mixtral"), "hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
    config: dict[str, Any] = dict(base)
    generator = np.random.default_rng(3)
    shapes = {"embed_tokens": (40, 64), "norm": (64,)}
    for layer in range(2):
        shapes |= {f"layers.{layer}.self_attn.{p}_proj": ({"q": 64, "o": 64}.get(p, 32), 64) for p in "qkvo"}
        shapes |= {f"layers.{layer}.{norm}_layernorm": (64,) for norm in ("input", "post_attention")}
        shapes[f"layers.{layer}.block_sparse_moe.gate"] = (4, 64)
        for expert in range(4):
            shapes |= {f"layers.{layer}.block_sparse_moe.experts.{expert}.w{w}": (64, 64) for w in (1, 2, 3)}
    plain = {
        f"model.{key}.weight": (generator.standard_normal(shape) / 8).astype(np.float32)
        for key, shape in shapes.items()
    }
    stored: dict[str, Stored] = dict(plain)
    if name != "plain":
        settings, write, _ = VARIANTS[name]
        config["quantization_config"] = settings
        for key in [key for key in plain if ".experts." in key]:
            written = write(plain[key].astype(np.float64))
            plain[key] = written.weights.astype(np.float32)
            del stored[key]
            stored.update(in_module(key.removesuffix(".weight"), written.tensors))
    quantized = write_folder(tmp_path / "a", stored, config)
    wanted = oracle_logits(write_folder(tmp_path / "b", plain, base), TOKEN_IDS % 40)
    assert difference(oracle_logits(quantized, TOKEN_IDS % 40), wanted) <= 1e-3
    with localinfer.load(quantized, threads=1, kv_type="f32") as llm:
        assert difference(llm.logits(TOKEN_IDS % 40), wanted) <= 1e-2


def test_stacks_of_gpt_oss_are_split_and_keep_every_code(tmp_path: Path) -> None:
    """Rows of gate and up take turns; plain stacks lie columns first."""
    config = {**family_config("gpt_oss"), "hidden_size": 64, "intermediate_size": 32, "head_dim": 32}
    generator = np.random.default_rng(8)
    plain: dict[str, Array] = {"model.embed_tokens.weight": generator.standard_normal((40, 64))}
    plain["model.norm.weight"] = np.ones(64)
    stacks: dict[str, Stored] = {}
    for layer in range(2):
        block = f"model.layers.{layer}"
        plain |= {f"{block}.{norm}_layernorm.weight": np.ones(64) for norm in ("input", "post_attention")}
        for letter, rows in {"q": 64, "k": 32, "v": 32, "o": 64}.items():
            plain[f"{block}.self_attn.{letter}_proj.weight"] = generator.standard_normal((rows, 64)) / 8
            plain[f"{block}.self_attn.{letter}_proj.bias"] = generator.standard_normal(rows) / 8
        plain[f"{block}.self_attn.sinks"] = generator.standard_normal(2)
        plain[f"{block}.mlp.router.weight"] = generator.standard_normal((4, 64)) / 8
        plain[f"{block}.mlp.router.bias"] = generator.standard_normal(4)
        for name, (rows, columns) in {"gate_up_proj": (64, 64), "down_proj": (64, 32)}.items():
            written = [scaled_checkpoints.mxfp4(generator.standard_normal((rows, columns)) / 8) for _ in range(4)]
            stack = f"{block}.mlp.experts.{name}"
            plain[f"{stack}_bias"] = generator.standard_normal((4, rows)) / 8
            plain[stack] = np.stack([one.weights.T for one in written])
            packed = np.stack([np.asarray(one.tensors["weight_packed"]) for one in written])
            stacks[f"{stack}_blocks"] = packed.reshape(4, rows, columns // 32, 16)
            stacks[f"{stack}_scales"] = np.stack([np.asarray(one.tensors["weight_scale"]) for one in written])
    numbers = {name: values.astype(np.float32) for name, values in plain.items()}
    wanted = oracle_logits(write_folder(tmp_path / "plain", numbers, config), TOKEN_IDS % 40)
    quantized: dict[str, Stored] = {name: values for name, values in numbers.items() if f"{name}_blocks" not in stacks}
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    folder = write_folder(tmp_path / "mxfp4", {**quantized, **stacks}, {**config, "quantization_config": settings})
    np.testing.assert_array_equal(oracle_logits(folder, TOKEN_IDS % 40), wanted)
    with localinfer.load(folder, threads=1, kv_type="f32") as llm:
        assert difference(llm.logits(TOKEN_IDS % 40), wanted) <= 1e-2
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for shape, words in (((3, 64, 1), "blocks has shape"), ((4, 64), "wanted U8 of 3 dimensions")):
        changed = {**quantized, **stacks, name: np.zeros(shape, np.uint8)}
        with pytest.raises(CorruptFileError, match=words):
            open_checkpoint(write_folder(tmp_path / "bad", changed, {**config, "quantization_config": settings}))


def rotated(down: Array) -> Written:
    """A matrix whose input is to be multiplied by Sylvester's matrix of 64 before it, in int8."""
    matrix = np.ones((1, 1))
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    stored = (down.reshape(-1, 64) @ (matrix / 8)).reshape(down.shape)
    scales = (np.abs(stored).max(axis=1, keepdims=True) / 127).astype(np.float32)
    codes = np.rint(stored / scales).astype(np.int8)
    back = ((codes * scales.astype(np.float64)).reshape(-1, 64) @ (matrix / 8)).reshape(down.shape)
    return Written({"weight": ("I8", codes), "weight_scale": scales}, back)


def rotation(location: str = "input", **group: Any) -> dict[str, Any]:
    use = {"targets": ["re:.*down_proj$"], "location": location}
    offline = {"targets": ["re:.*down_proj$"], "location": "weight_input", "inverse": True}
    return {"config_groups": {"R4": {"type": "hadamard", "head_dim": 64, "apply": [use, offline], **group}}}


def test_rotation_of_a_running_model_is_folded_into_the_weight(tmp_path: Path) -> None:
    def write(values: Array) -> Written:
        return rotated(values) if values.shape == MODULES["mlp.down_proj"] else row_int8(values)

    settings = {**VARIANTS["w8a8"][0], "transform_config": rotation()}
    quantized, plain = write_pair(tmp_path, settings, write)
    wanted = oracle_logits(plain, TOKEN_IDS)
    assert difference(oracle_logits(quantized, TOKEN_IDS), wanted) <= 1e-3
    with open_checkpoint(quantized) as folder:
        assert any("R4 (input)" in notice for notice in folder.notices)
        found = folder.tensor("blk.0.ffn_down.weight")
        values = dequantize(folder.tensor_bytes(found.name), found.type, found.shape)
    with closing(open_model_file(plain)) as numbers:
        stated = numbers.tensor_bytes("blk.0.ffn_down.weight").view(np.float32).reshape(found.shape)
    assert difference(values, stated) <= 1e-4


@pytest.mark.parametrize(
    ("transforms", "kind", "words"),
    [
        (rotation("somewhere"), UnsupportedFormatError, "applies at 'somewhere'.*input, output"),
        (rotation(type="random-matrix"), UnsupportedFormatError, "of type 'random-matrix'.*hadamard"),
        (rotation(type="random-hadamard"), CorruptFileError, "R4_input.weight is missing, 64 x 64"),
        (rotation(randomize=True), UnsupportedFormatError, "permuted at random"),
        (rotation("q_attn"), UnsupportedFormatError, "queries and keys both"),
        (rotation(head_dim=96), CorruptFileError, "do not split into rotations of 96"),
        (rotation(head_dim="x"), CorruptFileError, "head_dim 'x'"),
        ({"config_groups": 3}, CorruptFileError, "transform_config is"),
    ],
)
def test_rotation_that_cannot_be_folded_is_refused(
    transforms: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    settings = {**VARIANTS["w8a8"][0], "transform_config": transforms}
    quantized, _ = write_pair(tmp_path, settings, row_int8)
    with pytest.raises(kind, match=words):
        open_checkpoint(quantized)


def test_auto_round_folder_has_settings_by_module(tmp_path: Path) -> None:
    sizes = {"self_attn.q_proj": 32, "mlp.up_proj": 64}

    def pack(path: str, values: Array) -> tuple[dict[str, Stored], Array]:
        bits = 8 if path.endswith("v_proj") else 4
        size = next((size for name, size in sizes.items() if path.endswith(name)), 128)
        generator = np.random.default_rng(len(path) + values.size)
        codes = quantized_checkpoints.random_codes(generator, values.shape, bits=bits, group_size=size)
        return quantized_checkpoints.gptq_tensors(codes, 2, has_groups=False), codes.weights32

    plain: dict[str, Array] = llama_weights()
    stored: dict[str, Stored] = dict(plain)
    for layer in range(LAYERS):
        for module in MODULES:
            path = f"model.layers.{layer}.{module}"
            if path == "model.layers.1.mlp.gate_proj":
                continue  # of 16 bits
            tensors, plain[f"{path}.weight"] = pack(path, plain[f"{path}.weight"])
            del stored[f"{path}.weight"]
            stored.update(in_module(path, tensors))
    extra: dict[str, Any] = {
        "model.layers.1.mlp.gate_proj": {"bits": 16, "data_type": "float"},
        ".*v_proj": {"bits": 8},
    }
    for layer in range(LAYERS):
        extra |= {f"model.layers.{layer}.{name}": {"group_size": size} for name, size in sizes.items()}
    settings = {
        "quant_method": "auto-round",
        "packing_format": "auto_round",
        "bits": 4,
        "group_size": 128,
        "sym": False,
    }
    settings["extra_config"] = extra
    quantized = write_folder(tmp_path / "a", stored, {**LLAMA_CONFIG, "quantization_config": settings})
    wanted = oracle_logits(write_folder(tmp_path / "b", plain), TOKEN_IDS)
    assert difference(oracle_logits(quantized, TOKEN_IDS), wanted) <= 1e-10


def test_settings_of_modelopt_in_a_file_of_their_own_are_found(tmp_path: Path) -> None:
    quantized, plain = write_pair(tmp_path, {}, VARIANTS["nvfp4"][1])
    (quantized / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    written = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (quantized / "hf_quant_config.json").write_text(json.dumps(written))
    assert difference(oracle_logits(quantized, TOKEN_IDS), oracle_logits(plain, TOKEN_IDS)) <= 1e-3


def test_bytes_without_settings_are_refused_with_a_way_out(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path, FP8_BLOCKS, block_fp8)
    (quantized / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    with pytest.raises(UnsupportedFormatError, match=r"weight_scale_inv"):
        open_checkpoint(quantized)


HOSTILE: list[Any] = [None, -1, 0, 1 << 70, 1.5, "", "x", "re:(", [], [1], {}, {"a": []}, True, float("nan")]


def changed_documents(document: Any) -> list[Any]:
    """A document with each of its values in turn replaced by every hostile one, and left out."""
    found: list[Any] = list(HOSTILE)
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        for changed in changed_documents(value):
            copy: Any = dict(document) if isinstance(document, dict) else list(document)
            copy[key] = changed
            found.append(copy)
        if isinstance(document, dict):
            found.append({other: kept for other, kept in document.items() if other != key})
    return found


@pytest.mark.parametrize("name", ["fp8-block", "w8a8", "nvfp4", "auto-round"])
def test_no_setting_whatever_its_value_ends_in_another_error(name: str, tmp_path: Path) -> None:
    """What opens states a type and bytes for every matrix; anything else is an error of the model's file."""
    if name == "auto-round":
        settings = {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor", "bits": 4}
        settings["extra_config"] = {".*v_proj": {"bits": 8}}
        quantized, _ = write_pair(tmp_path, settings, VARIANTS["mxfp4"][1])
    else:
        settings, write, _ = VARIANTS[name]
        transforms = {"transform_config": rotation()} if name == "w8a8" else {}
        settings = {**settings, **transforms}
        quantized, _ = write_pair(tmp_path, settings, write)
    opened = 0
    for changed in changed_documents(settings):
        config = {**LLAMA_CONFIG, "quantization_config": changed}
        (quantized / "config.json").write_text(json.dumps(config))
        try:
            with open_checkpoint(quantized) as model:
                assert model.tensor_bytes("blk.0.attn_v.weight").size == model.tensor("blk.0.attn_v.weight").num_bytes
                opened += 1
        except ModelFileError:
            pass
    assert opened
