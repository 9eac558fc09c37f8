"""Graphs as plain data: equal where the model is, printed without being run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from localinfer.errors import UnsupportedFormatError
from localinfer.kernels.ops import Matmul, OpGraph
from localinfer.models.decoder.checked_weights import ShapeWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_decoder
from localinfer.models.decoder.listing import list_program, program_lines
from localinfer.models.decoder.sparse_attention import index_layers
from localinfer.quant.gguf.reader import GGUFFile, read_gguf
from tests.models.arch_models import architectures, build_model, one_of_each


def config_of(file: GGUFFile) -> ModelConfig:
    return ModelConfig.from_metadata(file.metadata, {name: one.shape for name, one in file.tensors.items()})


def graph_of(file: GGUFFile) -> OpGraph:
    return write_decoder(config_of(file), ShapeWeights({name: one.shape for name, one in file.tensors.items()}))


@pytest.mark.parametrize("name", architectures())
def test_every_matrix_of_a_model_is_listed_and_every_layer(name: str, folder: Path) -> None:
    path = build_model(folder, name).path
    with read_gguf(path) as file:
        program = list_program(file)
        config = config_of(file)
        matrices = {key for key, one in file.tensors.items() if len(one.shape) > 1 and not key.startswith("position")}
    num_layers = config.num_layers
    # The last layers may attend to the keys and values of others, and files may hold some of their own all the same.
    shared = range(num_layers - config.num_shared_layers, num_layers)
    matrices -= {f"blk.{layer}.attn_{letter}.weight" for layer in shared for letter in "kv"}
    # Where a context has no more positions than would be chosen, nothing is chosen; and drafts are not the model's.
    matrices = {key for key in matrices if index_layers(config) or ".indexer." not in key}
    matrices = {key for key in matrices if not key.startswith("blk.") or int(key.split(".")[1]) < num_layers}
    assert json.loads(json.dumps(program)) == program
    text = json.dumps(program["ops"])
    # Of two forms of one matrix one is used; RWKV's first layer mixes no values, and its shares become convolutions.
    not_listed = {key for key in matrices if key.replace("ssm_in", "attn_qkv") in matrices - {key}}
    not_listed |= {key for key in matrices if key.startswith("blk.0.time_mix_v") or "lerp_fused" in key}
    not_listed -= {"blk.0.time_mix_value.weight"}
    matrices -= not_listed
    assert all(f'"{key} ' in text for key in matrices)
    attending = {layer for layer, num_heads in enumerate(config.num_kv_heads) if num_heads} - set(shared)
    assert {op["layer"] for op in program["ops"] if op["op"] == "Attention"} == attending
    lines = list(program_lines(program))
    assert sum(line.startswith("  Attention") for line in lines) <= num_layers
    assert lines[-1] == f"  -> {program['output']}"
    listed = [line.split()[1:] for line in lines if line.startswith("layer")]
    assert listed and len({line for line in lines if line.startswith("layer")}) == len(listed)


@pytest.mark.parametrize("name", one_of_each())
def test_graphs_of_one_file_are_equal_and_differ_by_any_op(name: str, folder: Path) -> None:
    with read_gguf(build_model(folder, name).path) as file:
        graph = graph_of(file)
        assert graph == graph_of(file)
    assert graph != replace(graph, ops=graph.ops[:-1])
    index, op = next((index, op) for index, op in enumerate(graph.ops) if isinstance(op, Matmul))
    projections = [replace(op.projections[0], scale=0.5), *op.projections[1:]]
    other = (*graph.ops[:index], replace(op, projections=projections), *graph.ops[index + 1 :])
    assert graph != replace(graph, ops=other)


def test_layers_that_repeat_are_shown_once(shared: Path) -> None:
    with read_gguf(shared / "models" / "stories260K.gguf") as file:
        lines = list(program_lines(list_program(file)))
    assert [line for line in lines if line.startswith("layer")] == ["layers 0-3", "layer 4"]
    wanted = "  RmsNorm          out=attention_input.batch, x=hidden.batch, weight=blk.N.attn_norm.weight F32 64, "
    assert wanted + "epsilon=1e-05" in lines


def test_an_architecture_that_does_not_run_has_no_ops(shared: Path) -> None:
    with read_gguf(shared / "models" / "stories260K.gguf") as file:
        file.metadata = {**file.metadata, "general.architecture": "nothing"}  # type: ignore[assignment]
        with pytest.raises(UnsupportedFormatError, match="nothing"):
            list_program(file)
