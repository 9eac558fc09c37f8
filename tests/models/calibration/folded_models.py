"""Models written again with scales folded through them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.models.calibration.scale_groups import ScaleGroup, Unscalable, find_scale_groups, fold_scales
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorRecord
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, copy_values
from localinfer.quant.methods.awq import ScaledModel
from tests.models.numpy_device import ArrayWeights
from tests.support.oracle import NumpyWeights


def groups_of(file: ModelFile) -> tuple[list[ScaleGroup], list[Unscalable]]:
    """Scale groups of a model, and the matrices without one."""
    shapes = {name: record.shape for name, record in file.tensors.items()}
    return find_scale_groups(ModelConfig.from_metadata(file.metadata, shapes), shapes)


def random_scales(groups: list[ScaleGroup], seed: int) -> list[tuple[ScaleGroup, NDArray[np.float32]]]:
    """Scales from about 1/4 to 4 for every group."""
    generator = np.random.default_rng(seed)
    return [(group, np.exp(0.7 * generator.standard_normal(group.num_channels)).astype(np.float32)) for group in groups]


def folded_weights(source: Path, seed: int) -> tuple[NumpyWeights, NumpyWeights, int]:
    """Weights of a file for the oracle, the same with random scales folded at all groups, and how many it has."""
    with read_gguf(source) as file:
        groups, _ = groups_of(file)
        shapes = {name: record.shape for name, record in file.tensors.items()}
        scaled = ScaledModel(file, fold_scales(random_scales(groups, seed), shapes))
        return _weights(file), _weights(scaled), len(groups)


def _weights(file: ModelFile) -> NumpyWeights:
    tensors = file.tensors.items()
    return ArrayWeights({name: dequantize(file.tensor_bytes(name), one.type, one.shape) for name, one in tensors})


def write_folded(source: Path, target: Path, seed: int) -> int:
    """Write a model with random scales folded at all its groups; return how many it has."""
    with read_gguf(source) as file:
        groups, _ = groups_of(file)
        shapes = {name: record.shape for name, record in file.tensors.items()}
        scaled = ScaledModel(file, fold_scales(random_scales(groups, seed), shapes))
        specs = [TensorRecord(name, record.type, record.shape) for name, record in scaled.tensors.items()]
        with GGUFWriter(target, copy_values(file.metadata), specs) as writer:
            for spec in specs:
                writer.write(scaled.tensor_bytes(spec.name))
    return len(groups)
