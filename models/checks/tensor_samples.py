"""Checks of weights by samples: values that are not finite, matrices of zeros, scales unlike those of others, and
vectors unlike what converters make of them.

A few blocks of every tensor are read, all of a type decoded at once: some milliseconds for a few hundred tensors. Those
of matrices are `damage`. A rule of conversion (signs, offsets of norms) that was forgotten or applied twice shows in
every layer, so the vectors of a few layers are read. Rules: llama.cpp's converter, which files are made by.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.models.checks import Finding, shortened
from localinfer.models.checks.damage import MATRIX, TABLES, BlockGrid, check_grids, read_grids
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorType, block_bytes, block_size
from localinfer.quant.gguf.mapped_file import MappedFile
from localinfer.types import FloatArray

SAMPLED_TYPES = frozenset(TensorType) - {
    *(TensorType.Q8_1, TensorType.Q8_K),
    *(TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64),
}
"""Types of weights: the others hold activations, or indices."""
_SPOTS = (0.03, 0.37, 0.71)
_FURTHER_SPOTS = tuple(index / 64 for index in range(64))
_SPOT_WEIGHTS = 64
_NEEDED = re.compile(
    r"blk\.\d+\.(?:ffn_gate_inp|ssm_(?:in|out)|attn_(?:q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)|shortconv\.\w+_proj)\.weight"
)
"""Further matrices without which a part of the model does nothing."""
_MOST_TIMES = 12.0
"""Ratio in size of a kind's matrices from layer to layer: up to 4 times in trained models, 14 times where blocks
were read as those of another type."""
_LEAST_LAYERS = 4
_LEAST_SCALE, _MOST_SCALE = 0.02, 60.0
"""Scale of a matrix times the root of its columns: 1 keeps what goes in as large as it is, and models have some 0.2
to 5."""


@dataclass(frozen=True)
class TensorFigures:
    """Figures of a tensor's values."""

    name: str
    shape: tuple[int, ...]
    bad_values: int
    """Number of those that are not finite."""
    rms: float
    """Root mean square of the finite ones."""
    is_whole: bool
    """They are of all values, not of samples."""


def check_samples(file: ModelFile) -> Iterator[Finding]:
    """Yield what a few blocks of each tensor tell; of a folder's tensors those that lie there as they are used.

    Raises: CorruptFileError if the file was changed since it was opened.
    """
    grids = read_grids(file, [info for info in file.tensors.values() if info.type in SAMPLED_TYPES])
    in_grids = {info.name: (grid, index) for grid in grids for index, info in enumerate(grid.tensors)}
    others = {one.name: one for one in sample(file, [name for name in file.tensors if name not in in_grids], _SPOTS)}
    figures = [
        _figures_of(*in_grids[name]) if name in in_grids else others[name]
        for name in file.tensors
        if name in in_grids or name in others
    ]
    yield from shortened([*judge(_again_where_zero(file, figures)), *check_grids(file, grids)])


def _figures_of(grid: BlockGrid, index: int) -> TensorFigures:
    info = grid.tensors[index]
    return TensorFigures(info.name, info.shape, int(grid.bad[index]), grid.spread(index), is_whole=False)


def sample(file: ModelFile, names: Iterable[str], spots: Sequence[float]) -> list[TensorFigures]:
    """The figures of some blocks of tensors that lie in the file as they are. spots: where, from 0 to below 1."""
    taken: dict[TensorType, list[tuple[str, int]]] = {}
    parts: dict[TensorType, list[tuple[MappedFile, int, int]]] = {}
    for name in names:
        info = file.tensors[name]
        stretch = file.stretch(name) if info.type in SAMPLED_TYPES else None
        if stretch is None:
            continue
        size, per_block = block_bytes(info.type), block_size(info.type)
        num_blocks = stretch.num_bytes // size
        length = min(max(1, _SPOT_WEIGHTS // per_block), num_blocks)
        firsts = sorted({min(int(num_blocks * spot), num_blocks - length) for spot in spots})
        taken.setdefault(info.type, []).append((name, len(firsts) * length * per_block))
        parts.setdefault(info.type, []).extend(
            (stretch.file, stretch.start + first * size, length * size) for first in firsts
        )
    found: dict[str, TensorFigures] = {}
    for type, members in taken.items():
        data = _read(parts[type])
        values = dequantize(data, type, (data.size // block_bytes(type) * block_size(type),))
        starts = np.cumsum([0] + [count for _, count in members])
        found |= _figures(file, [name for name, _ in members], values, starts)
    return [found[name] for name in names if name in found]


def _read(parts: Sequence[tuple[MappedFile, int, int]]) -> NDArray[np.uint8]:
    """Copy bytes of files, given by where they start and how many they are, one after the other."""
    data = np.empty(sum(size for _, _, size in parts), np.uint8)
    view = data.data
    wanted: dict[MappedFile, list[tuple[int, memoryview]]] = {}
    end = 0
    for source, start, size in parts:
        wanted.setdefault(source, []).append((start, view[end : end + size]))
        end += size
    for source, pieces in wanted.items():
        source.read_into(pieces)
    return data


def _figures(
    file: ModelFile, names: list[str], values: FloatArray, starts: NDArray[np.int64]
) -> dict[str, TensorFigures]:
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, 0).astype(np.float64)
    num_finite = np.add.reduceat(is_finite, starts[:-1], dtype=np.int64)
    squares = np.add.reduceat(finite * finite, starts[:-1])
    counts = np.diff(starts)
    return {
        name: TensorFigures(
            name,
            file.tensors[name].shape,
            bad_values=int(count - good),
            rms=float(np.sqrt(square / max(1, good))),
            is_whole=count == np.prod(file.tensors[name].shape),
        )
        for name, count, good, square in zip(names, counts, num_finite, squares, strict=True)
    }


def _again_where_zero(file: ModelFile, figures: list[TensorFigures]) -> list[TensorFigures]:
    """Look at more of a tensor before it is said to be zero: a model may have rows or experts that are not used."""
    empty = [one.name for one in figures if one.rms == 0 and not one.bad_values and not one.is_whole]
    further = {one.name: one for one in sample(file, empty, _FURTHER_SPOTS)} if empty else {}
    return [further.get(one.name, one) for one in figures]


def judge(figures: Iterable[TensorFigures]) -> Iterator[Finding]:
    """Yield what figures of tensors tell, sampled or of all values."""
    figures = list(figures)
    again = "download the model again"
    for one in figures:
        some = "" if one.is_whole else "sampled "
        if one.bad_values:
            is_part = one.name in TABLES or "_exps" in one.name
            yield Finding(
                "weights not finite",
                f"{one.name} has {one.bad_values} {some}values that are NaN or infinite, so "
                f"{'some texts' if is_part else 'whatever it computes'} will come out as such; {again}",
                is_error=not is_part,
            )
        elif one.rms == 0 and _should_differ_from_zero(one):
            yield Finding(
                "weights zero",
                f"{one.name} is zero in all {some}values, so its part of the model does nothing; {again}",
            )
    yield from _judge_scales([one for one in figures if one.rms > 0 and not one.bad_values])


def _should_differ_from_zero(one: TensorFigures) -> bool:
    is_matrix = MATRIX.fullmatch(one.name) is not None or _NEEDED.fullmatch(one.name) is not None
    return is_matrix or one.name in TABLES or one.name.endswith("norm.weight")


def _judge_scales(figures: list[TensorFigures]) -> Iterator[Finding]:
    """Compare a matrix with the same one of other layers, and those of all layers with what any model has."""
    names = {one.name for one in figures}
    kinds: dict[str, list[TensorFigures]] = {}
    for one in figures:
        found = MATRIX.fullmatch(one.name)
        # A matrix with a factor beside it may have any scale.
        if found is not None and one.name.removesuffix("weight") + "scale" not in names:
            kinds.setdefault(found[2], []).append(one)
    for kind, members in kinds.items():
        scales = np.array([one.rms * np.sqrt(one.shape[-1]) for one in members])
        middle = float(np.sort(scales)[scales.size // 2])
        if len(members) >= _LEAST_LAYERS:
            times = scales / middle
            for index in np.flatnonzero((times > _MOST_TIMES) | (times < 1 / _MOST_TIMES)):
                is_larger = times[index] > 1
                ratio = f"{max(times[index], 1 / times[index]):.0f} times {'larger' if is_larger else 'smaller'}"
                yield Finding(
                    "weights scale",
                    f"{members[index].name} is {ratio} than {kind} of the other layers; download the model again, or "
                    "get another conversion",
                )
        if not _LEAST_SCALE <= middle <= _MOST_SCALE:
            wanted = f"{1 / np.sqrt(members[0].shape[-1]):.2g}"
            rms = f"{middle / np.sqrt(members[0].shape[-1]):.2g}"
            yield Finding(
                "weights scale",
                f"the weights of {kind} are {rms} in size in most layers, where models have some {wanted}: their scale "
                "is likely off; get another conversion",
            )


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
