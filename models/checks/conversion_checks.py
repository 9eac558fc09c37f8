"""Checks of what a converter changes on the way: signs, offsets of norms, and the size of vectors beside matrices.

A rule that was forgotten or applied twice shows in every layer, so a few layers are read; vectors are small.
Rules: llama.cpp's converter, which files are made by.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from localinfer.models.checks.finding import Finding
from localinfer.models.checks.tensor_samples import SAMPLED_TYPES
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.reference import dequantize
from localinfer.types import FloatArray

_MOST_LAYERS = 4
_NORM = re.compile(r"(?:attn|ffn|post_attention|post_ffw)_norm")
_STORED_WITH_ONE = ("gemma", "qwen35", "qwen3next", "nemotron", "step35", "minimax-m3")
"""Parts of names of architectures whose checkpoints have norm weights around 0, to which conversion adds 1."""
_MOST_NEGATIVE = 0.2
"""Share of negative weights in every layer's norm: a multiple of those that trained models have after the first layer
(SmolLM2 has 0.005 there, and 0.47 in the first)."""
_POSITIVE_DECAY = "bailingmoe3"
_BIAS = re.compile(r"blk\.(\d+)\.([a-z_]+(?:\.bias|_sinks\.weight))")
_MOST_BIAS = 300.0
_MOST_KEY_BIAS = 3000.0
"""Root mean square of a bias; those of Qwen 2's keys reach 100."""
_MOST_SINK = 100.0
_AGAIN = "get a current conversion of the model"


def check_conversion(file: ModelFile, config: ModelConfig) -> Iterator[Finding]:
    """Yield what vectors of a few layers tell; takes some milliseconds.

    Raises: CorruptFileError if the file was changed since it was opened.
    """
    layers = sorted({layer * (config.num_main_layers - 1) // (_MOST_LAYERS - 1) for layer in range(_MOST_LAYERS)})
    vectors: dict[str, dict[int, FloatArray]] = {}
    for layer in layers:
        prefix = f"blk.{layer}."
        for name in file.tensors:
            if name.startswith(prefix) and _is_read(file, name):
                vectors.setdefault(name.removeprefix(prefix), {})[layer] = _values(file, name)
    yield from _check_norms(config, vectors)
    yield from _check_decay(config, vectors)
    yield from _check_biases(vectors)


def _is_read(file: ModelFile, name: str) -> bool:
    """Vectors, and the decays of Mamba-1, a row of few columns for each channel."""
    info = file.tensors[name]
    is_vector = sum(size > 1 for size in info.shape) <= 1 or name.endswith(".ssm_a")
    return is_vector and info.type in SAMPLED_TYPES


def _values(file: ModelFile, name: str) -> FloatArray:
    info = file.tensors[name]
    data = np.ascontiguousarray(file.tensor_bytes(name)).reshape(-1).view(np.uint8)
    return dequantize(data, info.type, info.shape).reshape(-1)


def _check_norms(config: ModelConfig, vectors: dict[str, dict[int, FloatArray]]) -> Iterator[Finding]:
    """Weights of norms are positive in trained models, but for some of the first layer's."""
    norms = {
        name: [values for layer, values in found.items() if layer > 0]
        for name, found in vectors.items()
        if name.endswith(".weight") and _NORM.fullmatch(name.removesuffix(".weight"))
    }
    norms = {name: found for name, found in norms.items() if found}
    is_added = any(part in config.architecture for part in _STORED_WITH_ONE)
    for name, found in norms.items():
        shares = [float(np.mean(values < 0)) for values in found]
        if min(shares) > _MOST_NEGATIVE:
            why = "conversion adds 1 to them and did not" if is_added else "as if 1 had been taken off"
            yield Finding(
                "norm offset",
                f"{min(shares):.0%} or more of the weights of {name.removesuffix('.weight')} are negative in every "
                f"layer that was looked at ({_mean(found):.2g} on average), where models have positive ones: {why}, "
                f"so answers will mean nothing; {_AGAIN}",
            )
            return
    everything = [values for found in norms.values() for values in found]
    if len(everything) >= _MOST_LAYERS and not is_added and min(float(one.min()) for one in everything) > 1:
        yield Finding(
            "norm offset",
            f"every weight of the norms is above 1 ({_mean(everything):.2g} on average), as if 1 had been added to "
            f"those of a family whose conversion adds none, so answers will likely mean nothing; {_AGAIN}",
        )


def _mean(vectors: Sequence[FloatArray]) -> float:
    return float(np.mean([one.mean() for one in vectors]))


def _check_decay(config: ModelConfig, vectors: dict[str, dict[int, FloatArray]]) -> Iterator[Finding]:
    """States decay by exp(dt * A): A is stored as -exp(A_log)."""
    wanted = 1 if config.architecture == _POSITIVE_DECAY else -1
    for layer, values in vectors.get("ssm_a", {}).items():
        share = float(np.mean(values * wanted < 0))
        if share > _MOST_NEGATIVE:
            signs = {1: "positive", -1: "negative"}
            yield Finding(
                "decay sign",
                f"{share:.0%} of blk.{layer}.ssm_a are {signs[-wanted]}, where all are {signs[wanted]}, so that states "
                f"grow in place of decaying and answers will mean nothing; {_AGAIN}",
            )
            return


def _check_biases(vectors: dict[str, dict[int, FloatArray]]) -> Iterator[Finding]:
    for name, found in vectors.items():
        if not _BIAS.fullmatch(f"blk.0.{name}"):
            continue
        is_key = name.startswith(("attn_k.", "attn_qkv."))
        limit = _MOST_SINK if "sinks" in name else _MOST_KEY_BIAS if is_key else _MOST_BIAS
        for layer, values in found.items():
            size = float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
            if limit < size < np.inf:
                yield Finding(
                    "bias size",
                    f"the values of blk.{layer}.{name} are {size:.3g} in size, where models have at most some "
                    f"{limit / 10:.0f}: whatever is added to them is lost; download the model again, or {_AGAIN}",
                )
                return
