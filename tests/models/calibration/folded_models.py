"""Models written again with scales folded through them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.models.calibration.folding import fold_scales
from localinfer.models.calibration.scale_groups import ScaleGroup, Unscalable, find_scale_sites
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, TensorSpec, copy_values
from localinfer.quant.methods.scaled_model import ScaledModel


def sites_of(file: ModelFile) -> tuple[list[ScaleGroup], list[Unscalable]]:
    """Sites of a model, and the matrices without one."""
    shapes = {name: record.shape for name, record in file.tensors.items()}
    return find_scale_sites(ModelConfig.from_metadata(file.metadata, shapes), shapes)


def random_scales(sites: list[ScaleGroup], seed: int) -> list[tuple[ScaleGroup, NDArray[np.float32]]]:
    """Scales from about 1/4 to 4 for every site."""
    generator = np.random.default_rng(seed)
    return [(site, np.exp(0.7 * generator.standard_normal(site.num_channels)).astype(np.float32)) for site in sites]


def write_folded(source: Path, target: Path, seed: int) -> int:
    """Write a model with random scales folded at all its sites; return how many it has."""
    with read_gguf(source) as file:
        sites, _ = sites_of(file)
        shapes = {name: record.shape for name, record in file.tensors.items()}
        scaled = ScaledModel(file, fold_scales(random_scales(sites, seed), shapes))
        specs = [TensorSpec(name, record.type, record.shape) for name, record in scaled.tensors.items()]
        with GGUFWriter(target, copy_values(file.metadata), specs) as writer:
            for spec in specs:
                writer.write(scaled.tensor_bytes(spec.name))
    return len(sites)
