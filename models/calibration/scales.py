"""Choose scales for every group of a model while a text goes through it, layer by layer; and quantize a model so.

The layer decides: with all its matrices rounded and its inputs as int8, the distance of its result from the original's.
Errors of single products decide badly, because attention forgives in queries and keys what it does not in values
(arXiv 2306.00978 searches by the output of whole blocks too). Only experts' own channels, and the output matrix, are
searched by their products.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models.calibration.run import CalibrationState, LayerRun, calibrate
from localinfer.models.calibration.scale_groups import ScaleGroup, find_scale_groups, fold_scales
from localinfer.models.calibration.weights import RoundedWeights, RoundingOf, StreamedWeights, embedding_rows
from localinfer.models.decoder.config import ModelConfig
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.encoding import LEVEL_RANGES, encode
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.methods.awq import (
    LEAST_GAIN,
    ChannelSizes,
    ReadingMatrix,
    Rounding,
    ScaledModel,
    ScaleSearch,
    channel_sizes,
    round_activations,
    search_scales,
)
from localinfer.quant.methods.gptq import PreparedTensor, RoundingVisitor
from localinfer.quant.methods.imatrix import LinearProduct, ProductVisitor
from localinfer.quant.methods.presets import TypeChoice, is_quantized
from localinfer.quant.methods.workers import Workers
from localinfer.quant.pipeline.quantize import PartialResults
from localinfer.types import FloatArray, ProgressCallback

JUDGING_TOKENS, THOROUGH_JUDGING_TOKENS = 1024, 4096
"""Tokens, the last of the text, that layers are judged by."""

THOROUGH_LAYER_WEIGHTS = 1 << 22
"""Models whose layers have at most so many weights are searched thoroughly: they lose most and cost least."""

_FEWEST_TOKENS = 32
"""An expert that fewer tokens reached keeps its channels as they are."""

_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class GroupScales:
    """Scales float32[num_channels] of a group, and the share of the loss that is left with them."""

    group: ScaleGroup
    scales: FloatArray
    loss_ratio: float


def choose_scales(
    file: ModelFile,
    token_ids: NDArray[np.int32],
    workers: Workers,
    rounding_of: RoundingOf,
    *,
    final: Callable[[], ProductVisitor] | None = None,
    progress: ProgressCallback | None = None,
) -> list[GroupScales]:
    """Choose scales on a text; groups where none help are left out.

    token_ids: int32[sequences, length].
    final: makes a visitor that quantizes as the model will be, where that is not by `rounding_of` alone; a layer then
        keeps its scales only if it loses less with them this way too.
    progress: called with a stage's name, the layers done and the layers in all.
    Raises: ModelFileError and below if the model cannot be run.
    """
    shapes = {name: record.shape for name, record in file.tensors.items()}
    groups, _ = find_scale_groups(ModelConfig.from_metadata(file.metadata, shapes), shapes)
    seen = _SeenGroups(groups, rounding_of)
    run = LayerRun(file, StreamedWeights(file), token_ids, workers, seen)
    layer_weights = sum(prod(shape) for name, shape in shapes.items() if _LAYER.match(name)) // run.num_layers
    is_thorough = layer_weights <= THOROUGH_LAYER_WEIGHTS
    num_judging = THOROUGH_JUDGING_TOKENS if is_thorough else JUDGING_TOKENS
    judging = token_ids[-max(1, num_judging // token_ids.shape[1]) :]
    trial = RoundedWeights(file, rounding_of, seen.mean_squares)
    judged = LayerRun(file, trial, judging, _Int8Workers(workers), _NoVisitor())
    (hidden,) = run.embed()
    kept: list[GroupScales] = []
    for layer in range(run.num_layers):
        if progress is not None:
            progress("choosing scales", layer, run.num_layers)
        given = hidden[-judging.size :]
        (hidden,) = run.layer(layer, [hidden])
        search = _LayerSearch(judged, trial, shapes, layer, given, hidden[-judging.size :])
        found = search.choose([group for group in groups if _layer_of(group) == layer], seen)
        if final is not None and found:
            before, after = (
                _final_loss(one, judging, workers, final(), layer, given) for one in (file, fold(file, found))
            )
            found = found if after < (1 - LEAST_GAIN) * before else []
        kept += found
        trial.forget()
        seen.forget()
    run.output([hidden])
    kept += [
        one for group in groups if _layer_of(group) is None for one in [seen.by_products(group)] if one is not None
    ]
    return kept


def fold(file: ModelFile, chosen: Sequence[GroupScales]) -> ScaledModel:
    """The same model with scales folded into it."""
    shapes = {name: record.shape for name, record in file.tensors.items()}
    return ScaledModel(file, fold_scales([(one.group, one.scales) for one in chosen], shapes))


def _final_loss(
    file: ModelFile,
    token_ids: NDArray[np.int32],
    workers: Workers,
    visitor: ProductVisitor,
    layer: int,
    given: FloatArray,
) -> float:
    """The loss of one layer, quantized by a visitor."""
    run = LayerRun(file, StreamedWeights(file), token_ids, workers, visitor)
    original, found = run.layer(layer, [given, given])
    return _mean_relative_error(original, found)


def _mean_relative_error(wanted: FloatArray, found: FloatArray) -> float:
    """Squared, relative to each token's own size: the next layer norms every token."""
    return float((np.square(found - wanted).sum(axis=1) / np.square(wanted).sum(axis=1)).mean())


class _SeenGroups:
    """A `ProductVisitor` that measures the channels of groups, and importance. It searches scales where products do."""

    def __init__(self, groups: Sequence[ScaleGroup], rounding_of: RoundingOf) -> None:
        self._groups = {reader: group for group in groups for reader in group.readers}
        self._rounding_of = rounding_of
        self._searches: dict[str, dict[int, ScaleSearch]] = {}
        self.sizes: dict[str, ChannelSizes] = {}
        self.mean_squares: dict[tuple[str, int], FloatArray] = {}

    def visit(self, product: LinearProduct) -> Sequence[FloatArray | None]:
        x, first = product.original, product.matrices[0]
        mean_squares = np.square(x).mean(axis=0) if len(x) else np.ones(x.shape[1], np.float32)
        for part in product.matrices:
            self.mean_squares[part.tensor, part.expert] = mean_squares
        group = self._groups.get(first.tensor)
        if group is None or len(x) < _FEWEST_TOKENS:
            return [None] * len(product.matrices)
        matrices = [
            ReadingMatrix(part.values, rounding)
            for part in product.matrices
            for rounding in [self._rounding_of(part.tensor)]
            if rounding is not None
        ]
        is_own = group.columns is None and group.num_channels > x.shape[1]
        sizes = self.sizes.get(group.name) or channel_sizes(
            x, [part.values for part in product.matrices], group.columns
        )
        if is_own or _layer_of(group) is None:
            search = ScaleSearch(sizes, group.columns)
            search.add(x, matrices)
            self._searches.setdefault(group.name, {})[first.expert] = search
        elif matrices:
            self.sizes[group.name] = sizes
        return [None] * len(product.matrices)

    def by_products(self, group: ScaleGroup) -> GroupScales | None:
        """Scales that help the products that read a group, 1 for experts that few tokens reached; None if none do."""
        choices = {expert: search.best() for expert, search in self._searches.get(group.name, {}).items()}
        if not any(choice.loss_ratio < 1 for choice in choices.values()):
            return None
        scales = np.ones(group.num_channels, np.float32)
        for expert, choice in choices.items():
            scales[expert * choice.scales.size :][: choice.scales.size] = choice.scales
        return GroupScales(group, scales, float(np.mean([choice.loss_ratio for choice in choices.values()])))

    def forget(self) -> None:
        """Drop what a layer left."""
        for kept in (self._searches, self.sizes, self.mean_squares):
            kept.clear()


@dataclass(frozen=True)
class _LayerSearch:
    """One layer, from what it reads (`given`) to what its result should be (`wanted`)."""

    run: LayerRun
    weights: RoundedWeights
    shapes: dict[str, tuple[int, ...]]
    layer: int
    given: FloatArray
    wanted: FloatArray

    def choose(self, groups: Sequence[ScaleGroup], seen: _SeenGroups) -> list[GroupScales]:
        """Choose scales group after group, each with those before it in place."""
        kept: list[GroupScales] = []
        for group in groups:
            is_judged = group.name in seen.sizes
            chosen = self._by_layer(group, seen, kept) if is_judged else self._by_products(group, seen, kept)
            if chosen is not None:
                kept.append(chosen)
        return kept

    def _by_layer(self, group: ScaleGroup, seen: _SeenGroups, kept: Sequence[GroupScales]) -> GroupScales | None:
        def loss(scales: FloatArray) -> float:
            return self._loss([*kept, GroupScales(group, scales, 1.0)])

        choice = search_scales(seen.sizes[group.name], loss)
        return GroupScales(group, choice.scales, choice.loss_ratio) if choice.loss_ratio < 1 else None

    def _by_products(self, group: ScaleGroup, seen: _SeenGroups, kept: Sequence[GroupScales]) -> GroupScales | None:
        found = seen.by_products(group)
        if found is None:
            return None
        before, after = self._loss(kept), self._loss([*kept, found])
        return replace(found, loss_ratio=after / before) if after < (1 - LEAST_GAIN) * before else None

    def _loss(self, chosen: Sequence[GroupScales]) -> float:
        self.weights.scale(fold_scales([(one.group, one.scales) for one in chosen], self.shapes))
        return _mean_relative_error(self.wanted, self.run.layer(self.layer, [self.given])[0])


class _Int8Workers(Workers):
    """Workers whose products read their inputs as int8."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self.num_threads, self.memory = workers.num_threads, workers.memory

    def run(self, function: Callable[[int], None], count: int) -> None:
        self._workers.run(function, count)

    def product(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        return self._workers.product(round_activations(x), weight)


class _NoVisitor:
    """A `ProductVisitor` that does nothing."""

    def visit(self, product: LinearProduct) -> Sequence[FloatArray | None]:
        return [None] * len(product.matrices)


def _layer_of(group: ScaleGroup) -> int | None:
    match = _LAYER.match(group.readers[0])
    return None if match is None else int(match[1])


def round_by_calibration(
    file: ModelFile,
    token_ids: NDArray[np.int32],
    choices: Mapping[str, TypeChoice],
    pool: ThreadPool,
    workers: Workers,
    results: PartialResults,
    *,
    progress: ProgressCallback | None = None,
) -> Mapping[str, PreparedTensor]:
    """Quantize the matrices that presets touch, but for embeddings, and return them by name.

    Those that the preset leaves in floats compensate for earlier errors too; blocks of the wanted type stay.

    They stay in `results` and are read from there on access; the caller deletes those afterwards. A run that finds
    results of its own there continues after their last layer.

    token_ids: int32[sequences, length] of the calibration text. choices: what each tensor becomes.
    Raises: ModelFileError and below if the model cannot be run, RequestError if a weight cannot be encoded.
    """
    todo = {name: choice for name, choice in choices.items() if _changes(file.tensors[name], choice)}
    visitor = RoundingVisitor(todo, file.tensors, pool, workers)

    def quantized_rows(name: str, ids: NDArray[np.int32]) -> FloatArray:
        rows, type = embedding_rows(file, name, ids), choices[name].type
        return dequantize(encode(pool, rows, type), type, rows.shape)

    def layer_done(state: CalibrationState) -> None:
        results.save(state.num_layers_done, visitor.take_finished(), state.hidden)

    found = results.load()
    start = None if found is None else CalibrationState(found[0], found[1])
    num_layers = calibrate(
        file,
        token_ids,
        workers,
        visitor,
        quantized_rows=quantized_rows,
        start=start,
        layer_done=layer_done,
        progress=progress,
    )
    return results.tensors(num_layers, visitor.take_finished())


def _changes(record: TensorRecord, choice: TypeChoice) -> bool:
    is_plain = choice.type in (TensorType.F16, TensorType.BF16)
    return is_quantized(record) and (record.type is not choice.type or is_plain)


def scale_for_rounding(
    file: ModelFile,
    token_ids: NDArray[np.int32],
    choices: Mapping[str, TypeChoice],
    pool: ThreadPool,
    workers: Workers,
    *,
    is_proven_by_feedback: bool = True,
    progress: ProgressCallback | None = None,
) -> tuple[ScaledModel, list[GroupScales]]:
    """Fold scales into a model that make its matrices round better; return it and what was folded.

    is_proven_by_feedback: keep a layer's scales only if `round_by_calibration` loses less with them, too.
    Other arguments and errors: as there.
    """
    todo = {name: choice for name, choice in choices.items() if is_quantized(file.tensors[name])}

    def rounding_of(name: str) -> Rounding | None:
        if name not in todo or todo[name].type not in LEVEL_RANGES:
            return None
        type = todo[name].type

        def rounded(weights: FloatArray, importance: FloatArray) -> FloatArray:
            return dequantize(encode(pool, weights, type, importance), type, weights.shape)

        return rounded

    def final() -> RoundingVisitor:
        return RoundingVisitor(todo, file.tensors, pool, workers)

    found = choose_scales(
        file, token_ids, workers, rounding_of, final=final if is_proven_by_feedback else None, progress=progress
    )
    return fold(file, found), found
