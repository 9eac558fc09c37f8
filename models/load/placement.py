"""Placement of a model's parts on devices: layers in order over the CPU and GPUs, experts on the CPU.

The last layers are placed on GPUs, the output head with the last of them, so that tokens are sampled there; the
embedding with the first GPU, if all layers are on GPUs. Of a mixture of experts that fits no GPU whole, either whole
layers stay on the CPU, or the experts of the first layers: the choice that reads less main memory per token.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.kernels.cuda.device import FoundDevice
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import CUDA_LAYOUTS, SIZES
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import crosses_layers
from localinfer.models.load.device_request import DeviceRequest
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.types import TensorRecord
from localinfer.quant.pipeline.conversion import layout_of

_BATCH_ROWS = 1024
_OUTPUT_ROWS = 64
_LIBRARY_BYTES = 128 << 20
"""Dequantized weights for prompts."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that devices need for the parts of a model."""

    layers: Sequence[int]
    """Weights, keys and values of each."""
    output: int
    """The norm and the matrix after the last layer."""
    embedding: int
    """The table, 0 if it is tied to that matrix."""
    working: int
    """Buffers, for any number of layers, on each GPU."""
    experts: Sequence[int] = ()
    """Share of the routed experts in `layers`; empty for none."""
    cache: Sequence[int] = ()
    """Share of the keys and values in `layers`; empty for none."""
    active_share: float = 1.0
    """Share of an expert's bytes that decoding one token reads."""
    tied: int = 0
    """Share of `output` that an embedding on another GPU takes once more."""

    @property
    def has_experts(self) -> bool:
        """True if any layer has routed experts."""
        return any(self.experts)

    def expert_bytes(self, layer: int) -> int:
        """Bytes of a layer's routed experts."""
        return self.experts[layer] if self.experts else 0

    def cache_bytes(self, first: int, end: int) -> int:
        """Bytes of the keys and values of some layers."""
        return sum(self.cache[first:end])

    def on_gpu(self, layer: int, cpu_experts: int) -> int:
        """Bytes of a layer on a GPU, where the experts of the first `cpu_experts` layers stay on the CPU."""
        return self.layers[layer] - (self.expert_bytes(layer) if layer < cpu_experts else 0)

    def bytes_of(self, num_layers: int, cpu_experts: int = 0) -> int:
        """Bytes of the last `num_layers` layers, the output head and buffers on one GPU, without embeddings."""
        first = len(self.layers) - num_layers
        layers = sum(self.on_gpu(layer, cpu_experts) for layer in range(first, len(self.layers)))
        return self.working + self.output + layers

    def read_by_cpu(self, num_gpu_layers: int, cpu_experts: int) -> int:
        """Bytes of main memory that decoding one token reads, about."""
        first = len(self.layers) - num_gpu_layers
        total = 0.0
        for layer, num_bytes in enumerate(self.layers):
            experts = self.expert_bytes(layer)
            if layer < first:
                total += num_bytes - experts - self.cache_bytes(layer, layer + 1) + self.active_share * experts
            elif layer < cpu_experts:
                total += self.active_share * experts
        return int(total)


def memory_needs(file: ModelFile, config: ModelConfig, kv_layout: KVLayout, num_tokens: int) -> MemoryNeeds:
    """The bytes of each part of a model, with a KV cache of `num_tokens` positions."""
    weights, experts = [0] * config.num_layers, [0] * config.num_layers
    output = embedding = 0
    widest = config.hidden_size
    for name, tensor in file.tensors.items():
        num_bytes = _device_bytes(file, tensor)
        block = re.match(r"blk\.(\d+)\.", name)
        if block is not None:
            # Further layers are for next-token prediction, which is not run.
            if int(block[1]) < config.num_layers:
                weights[int(block[1])] += num_bytes
                widest = max(widest, *tensor.shape[-2:])
                if "_exps." in name:
                    experts[int(block[1])] += num_bytes
        elif name in ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight"):
            embedding += num_bytes
        elif name.startswith(("output", "per_layer_", "altup_", "cls", "dense_")):
            output += num_bytes
    is_tied = "output.weight" not in file.tensors
    tied = embedding if is_tied else 0
    if is_tied:
        output, embedding = output + embedding, 0
    num_pages = -(-num_tokens // kv_layout.page_tokens)
    cache = [
        num_pages * shape.num_kv_heads * kv_layout.head(layer).num_bytes
        for layer, shape in enumerate(kv_layout.layers[: config.num_layers])
    ]
    # All layers of an encoder take turns in the memory of one, on each GPU.
    shared_cache = sum(cache) if config.is_encoder else 0
    if config.is_encoder:
        cache = [0] * config.num_layers
    layers = [num_bytes + kept for num_bytes, kept in zip(weights, cache, strict=True)]
    slots = 1 if config.experts is None else config.experts.num_selected
    # Texts of an encoder are computed whole.
    batch_rows = max(_BATCH_ROWS, num_tokens) if config.is_encoder else _BATCH_ROWS
    embeddings = 0
    if config.takes_media:
        batch_rows = max(batch_rows, find_architecture(config).picture_rows)
        embeddings = config.hidden_size * (1 + config.num_deepstack_layers)
    rows = batch_rows * 4 * (8 * config.hidden_size + (3 + slots) * widest + embeddings)
    working = shared_cache + rows + _OUTPUT_ROWS * 4 * config.vocab_size + _LIBRARY_BYTES
    share = 1.0 if config.experts is None else config.experts.num_selected / config.experts.num_experts
    return MemoryNeeds(layers, output, embedding, working, experts, cache, share, tied)


def bytes_per_token(file: ModelFile, config: ModelConfig) -> int:
    """Bytes of weights that decoding one token reads on a device: of experts the selected ones, of tables one row."""
    total = 0
    is_tied = "output.weight" not in file.tensors
    for name, tensor in file.tensors.items():
        num_bytes = _device_bytes(file, tensor)
        block = re.match(r"blk\.(\d+)\.", name)
        if block is not None and int(block[1]) >= config.num_layers:
            continue
        if name.endswith("_embd.weight") and not (is_tied and name == "token_embd.weight"):
            num_bytes //= tensor.shape[0]
        elif "_exps." in name and config.experts is not None:
            num_bytes = num_bytes * config.experts.num_selected // config.experts.num_experts
        total += num_bytes
    return total


def _device_bytes(file: ModelFile, tensor: TensorRecord) -> int:
    """Bytes of a tensor in its layout on a GPU; vectors are float32."""
    if file.grouped(tensor.name) is not None:
        return tensor.num_bytes
    if len(tensor.shape) < 2:
        return 4 * prod(tensor.shape)
    sizes = SIZES[layout_of(tensor.type, CUDA_LAYOUTS)]
    return prod(tensor.shape) // sizes.unit * sizes.file_bytes


MARGIN_BYTES = 256 << 20
"""Reserve for what is not counted: library workspace, captured graphs, other programs."""

HOP_BYTES = 2 << 20
"""Memory that the CPU could read while a layer's rows travel to it and back: some 50 us at 40 GB/s."""
_BALANCE_STEPS = 24


@dataclass(frozen=True)
class GpuShare:
    """Share of one GPU: layers `first` to `end` - 1, and bytes in all and of keys and values."""

    device: FoundDevice
    first: int
    end: int
    num_bytes: int
    cache_bytes: int


@dataclass(frozen=True)
class DevicePlacement:
    """The parts of a model on devices: its last layers on GPUs, and the embeddings or not."""

    num_layers: int
    gpus: tuple[GpuShare, ...]
    has_embedding: bool
    cpu_experts: int = 0
    """Number of the first layers whose experts are on the CPU."""
    host_bytes: int = 0
    """Weights in main memory."""
    host_cache_bytes: int = 0
    """Keys and values in main memory."""
    reason: str = ""
    """Why experts stay on the CPU, where that was not asked for."""

    @property
    def num_gpu_layers(self) -> int:
        """Layers on GPUs."""
        return self.num_layers - self.gpus[0].first

    @property
    def num_bytes(self) -> int:
        """Bytes on all GPUs."""
        return sum(share.num_bytes for share in self.gpus)

    @property
    def num_split_layers(self) -> int:
        """Layers on GPUs whose experts are on the CPU."""
        return max(0, self.cpu_experts - self.gpus[0].first)

    def has_all(self, request: DeviceRequest) -> bool:
        """True if as many layers are on GPUs as were asked for, with experts unless they were to stay on the CPU."""
        wanted = self.num_layers if request.gpu_layers is None else min(request.gpu_layers, self.num_layers)
        return self.num_gpu_layers == wanted and (not self.num_split_layers or bool(request.cpu_moe))

    @property
    def uses_cpu(self) -> bool:
        """True if the CPU computes any part."""
        return not self.has_embedding or self.num_split_layers > 0

    @property
    def is_whole(self) -> bool:
        """True if the whole model is on one GPU."""
        is_one = len(self.gpus) == 1 and not self.num_split_layers
        return is_one and self.has_embedding and self.num_gpu_layers == self.num_layers

    def describe(self) -> str:
        """One line: the placement and the memory it needs."""
        count = f"{self.num_gpu_layers} of {self.num_layers} layers"
        rest: list[str] = []
        if len(self.gpus) == 1:
            (share,) = self.gpus
            text = f"{count} on the GPU: they need {_memory(share)}"
        else:
            text = f"{count} on {len(self.gpus)} GPUs: {', '.join(self._shares())}"
        if self.num_split_layers:
            which = _layers(self.gpus[0].first, self.cpu_experts)
            rest.append(f"the experts of {which}")
        if self.num_gpu_layers < self.num_layers:
            rest.append("the others" if not rest else f"{_layers(0, self.gpus[0].first)} whole")
        elif not self.has_embedding:
            rest.append("embeddings")
        if rest:
            text += f"; {' and '.join(rest)} on the CPU"
        return f"{text}, since {self.reason}" if self.reason else text

    def _shares(self) -> Iterator[str]:
        for share in self.gpus:
            held = _layers(share.first, share.end) if share.first < share.end else "the output head"
            yield f"cuda:{share.device.index} has {held}: {_memory(share)}"


def check_runs_on_gpus(config: ModelConfig, placement: DevicePlacement, *, has_window: bool = False) -> None:
    """Raise BackendUnavailableError for a model that does not run so on GPUs.

    has_window: texts evict keys and values.
    """
    if config.indexer is not None:
        raise BackendUnavailableError(
            f"the sparse attention of {config.architecture} models is computed on the CPU only; take device 'cpu'"
        )
    if placement.is_whole or not (has_window or crosses_layers(config)):
        return
    held = f"the GPU was to hold {placement.num_gpu_layers} of {placement.num_layers} layers"
    if len(placement.gpus) > 1:
        held = f"{len(placement.gpus)} GPUs were to share it"
    elif placement.num_split_layers:
        held = "the experts were to stay on the CPU"
    if has_window:
        raise BackendUnavailableError(
            f"kv_window evicts by the attention of all layers, which one device has to measure, and {held}; leave it "
            "out, or take a smaller quantization, or device 'cpu'"
        )
    raise BackendUnavailableError(
        f"the layers of this {config.architecture} model read more than the layer before them wrote, so all of it "
        f"runs on one device, and {held}; take a smaller context_length or quantization, or device 'cpu'"
    )


def _layers(first: int, end: int) -> str:
    return f"layer {first}" if end - first == 1 else f"layers {first} to {end - 1}"


def _memory(share: GpuShare) -> str:
    return f"{share.num_bytes / 1e9:.1f} GB of the {share.device.free_bytes / 1e9:.1f} GB free on {share.device.name}"


def choose_placement(
    needs: MemoryNeeds, found: Sequence[FoundDevice], request: DeviceRequest
) -> DevicePlacement | None:
    """As many layers on GPUs as fit, or as many as are wanted (at most all); None if not one fits.

    found: GPUs that can be used. If the number of layers is not given, MARGIN_BYTES of each are kept free, and of GPUs
    that were not named no more are taken than hold the whole model.
    Raises: RequestError if what is wanted does not fit; BackendUnavailableError for GPUs that are not there.
    """
    groups = _groups(found, request)
    wanted_experts = request.num_cpu_experts(len(needs.layers))
    if request.gpu_layers is not None:
        return _wanted(needs, groups, request)
    if wanted_experts is not None or not needs.has_experts:
        return _most(needs, groups, request, wanted_experts or 0)
    whole = _most(needs, groups, request, 0)
    if whole is not None and whole.num_gpu_layers == whole.num_layers:
        return whole
    split = _fewest_cpu_experts(needs, groups, request)
    if split is None or (whole is not None and _cpu_reads(needs, whole) <= _cpu_reads(needs, split)):
        return whole
    return _with_reason(needs, split, whole)


def refusal(needs: MemoryNeeds, found: Sequence[FoundDevice], request: DeviceRequest) -> str:
    """Reason why `choose_placement` put no layer on a GPU."""
    wanted = request.num_cpu_experts(len(needs.layers))
    cpu_experts = len(needs.layers) if wanted is None else wanted
    needed = needs.bytes_of(1, cpu_experts) + MARGIN_BYTES
    best = max(_groups(found, request)[-1], key=lambda device: device.free_bytes)
    return (
        f"a single layer and the output need {needed / 1e9:.1f} GB on {best.name}, which has "
        f"{best.free_bytes / 1e9:.1f} GB free; take a smaller model, quantization or context_length, or device 'cpu'"
    )


def _groups(found: Sequence[FoundDevice], request: DeviceRequest) -> list[list[FoundDevice]]:
    """The GPUs to try together, in this order. Raises: BackendUnavailableError, RequestError if some are not there."""
    by_index = {device.index: device for device in found}
    if request.gpus is not None:
        missing = [f"cuda:{index}" for index in request.gpus if index not in by_index]
        if missing:
            there = ", ".join(f"cuda:{index} ({device.name})" for index, device in by_index.items())
            raise BackendUnavailableError(f"there is no GPU {missing[0]} that can be used; there are: {there}")
        return [[by_index[index] for index in request.gpus]]
    if request.tensor_split is not None:
        count = len(request.tensor_split)
        if count > len(found):
            raise RequestError(
                f"tensor_split has shares for {count} GPUs, and {len(found)} can be used here; give one share for each"
            )
        return [list(found[:count])]
    ranked = sorted(found, key=lambda device: -device.free_bytes)
    return [sorted(ranked[:count], key=lambda device: device.index) for count in range(1, len(found) + 1)]


def _most(
    needs: MemoryNeeds, groups: Sequence[Sequence[FoundDevice]], request: DeviceRequest, cpu_experts: int
) -> DevicePlacement | None:
    """The whole model on the first GPUs that hold it, or else as many layers as fit on all of them."""
    num_layers = len(needs.layers)
    for gpus in groups:
        found = _place(needs, gpus, request, num_layers, cpu_experts, MARGIN_BYTES)
        if found is not None:
            return found
    for count in range(num_layers - 1, 0, -1):
        found = _place(needs, groups[-1], request, count, cpu_experts, MARGIN_BYTES)
        if found is not None:
            return found
    return None


def _fewest_cpu_experts(
    needs: MemoryNeeds, groups: Sequence[Sequence[FoundDevice]], request: DeviceRequest
) -> DevicePlacement | None:
    """All layers on GPUs with the experts of as few as possible on the CPU; else those of all, and what fits."""
    num_layers = len(needs.layers)
    for cpu_experts in range(1, num_layers + 1):
        found = _place(needs, groups[-1], request, num_layers, cpu_experts, MARGIN_BYTES)
        if found is not None:
            return found
    return _most(needs, groups[-1:], request, num_layers)


def _wanted(needs: MemoryNeeds, groups: Sequence[Sequence[FoundDevice]], request: DeviceRequest) -> DevicePlacement:
    """The requested number of layers on the first GPUs that hold them, without a margin.

    Raises: RequestError if they do not fit.
    """
    num_layers, wanted = len(needs.layers), request.gpu_layers
    assert wanted is not None, "how many layers is given"
    count = min(wanted, num_layers)
    given = request.num_cpu_experts(num_layers)
    choices = [given] if given is not None else [0, *(range(1, num_layers + 1) if needs.has_experts else ())]
    for cpu_experts, gpus in product(choices, groups):
        found = _place(needs, gpus, request, count, cpu_experts, 0)
        if found is not None:
            return _with_reason(needs, found, None) if found.num_split_layers and given is None else found
    gpus = groups[-1]
    best = _most(needs, groups, request, choices[-1])
    fitting = 0 if best is None else best.num_gpu_layers
    free = sum(gpu.free_bytes for gpu in gpus)
    what = f"{count} layers need {needs.bytes_of(count, choices[-1]) / 1e9:.1f} GB"
    where = "of a GPU that has" if len(gpus) == 1 else f"of {len(gpus)} GPUs that have"
    raise RequestError(
        f"gpu_layers is {wanted}, and {what} {where} {free / 1e9:.1f} GB free, where {fitting} of {num_layers} fit; "
        "give that or less, a smaller context_length, or leave gpu_layers out"
    )


def _place(
    needs: MemoryNeeds,
    gpus: Sequence[FoundDevice],
    request: DeviceRequest,
    count: int,
    cpu_experts: int,
    margin: int,
) -> DevicePlacement | None:
    """The last `count` layers on these GPUs, with the embedding where it fits; None if they do not fit."""
    num_layers = len(needs.layers)
    layers = [needs.on_gpu(layer, cpu_experts) for layer in range(num_layers - count, num_layers)]
    for has_embedding in (True, False) if count == num_layers else (False,):
        held, shares, counts = list(gpus), request.tensor_split, [0]
        while 0 in counts:
            rooms = [gpu.free_bytes - margin for gpu in held]
            fixed = [needs.working] * len(held)
            fixed[-1] += needs.output
            if has_embedding:
                # A table that is also the output matrix is there already, if that is on the same GPU.
                fixed[0] += needs.embedding if len(held) == 1 else needs.embedding or needs.tied
            found = _balanced(layers, rooms, fixed) if shares is None else _as_asked(layers, shares, rooms, fixed)
            if found is None:
                if shares is not None or len(held) == 1:
                    break
                # Without the one that has the least room, which may be too little for anything.
                held.remove(min(held, key=lambda gpu: gpu.free_bytes))
                continue
            # A GPU without layers is left out, and the embedding or the output is another's.
            counts = found
            used = [index for index, number in enumerate(counts) if number]
            held = [held[index] for index in used]
            shares = None if shares is None else [shares[index] for index in used]
        else:
            return _placement(needs, held, counts, fixed, has_embedding, cpu_experts)
    return None


def _as_asked(
    layers: Sequence[int], shares: Sequence[float], rooms: Sequence[int], fixed: Sequence[int]
) -> list[int] | None:
    """Layers of each GPU by the shares that were asked for; None if they do not fit."""
    total, seen = float(sum(shares)), 0.0
    counts: list[int] = []
    for share in shares:
        seen += float(share)
        counts.append(round(len(layers) * seen / total) - sum(counts))
    first = 0
    for count, room, own in zip(counts, rooms, fixed, strict=True):
        if count and own + sum(layers[first : first + count]) > room:
            return None
        first += count
    return counts


def _balanced(layers: Sequence[int], rooms: Sequence[int], fixed: Sequence[int]) -> list[int] | None:
    """Layers of each GPU, all filled to about the same share of their room; None if they do not fit."""
    best = _filled(layers, rooms, fixed, 1.0)
    if best is None or len(rooms) == 1:
        return best
    low, high = 0.0, 1.0
    for _ in range(_BALANCE_STEPS):
        middle = (low + high) / 2
        found = _filled(layers, rooms, fixed, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _filled(layers: Sequence[int], rooms: Sequence[int], fixed: Sequence[int], share: float) -> list[int] | None:
    """Layers of each GPU where each before the last takes all that fit a share of its room, and the last at least one;
    None if the rest does not fit the last."""
    counts: list[int] = []
    first = 0
    for room, own in zip(rooms[:-1], fixed[:-1], strict=True):
        total, count = own, 0
        while first + count < len(layers) - 1 and total + layers[first + count] <= share * room:
            total += layers[first + count]
            count += 1
        counts.append(count)
        first += count
    if fixed[-1] + sum(layers[first:]) > share * rooms[-1]:
        return None
    return [*counts, len(layers) - first]


def _placement(
    needs: MemoryNeeds,
    gpus: Sequence[FoundDevice],
    counts: Sequence[int],
    fixed: Sequence[int],
    has_embedding: bool,
    cpu_experts: int,
) -> DevicePlacement:
    num_layers = len(needs.layers)
    shares: list[GpuShare] = []
    first = on_gpus = num_layers - sum(counts)
    for gpu, count, own in zip(gpus, counts, fixed, strict=True):
        end = first + count
        num_bytes = own + sum(needs.on_gpu(layer, cpu_experts) for layer in range(first, end))
        shares.append(GpuShare(gpu, first, end, num_bytes, needs.cache_bytes(first, end)))
        first = end
    if not any(needs.expert_bytes(layer) for layer in range(on_gpus, cpu_experts)):
        cpu_experts = 0
    host_cache = needs.cache_bytes(0, on_gpus)
    on_host = sum(needs.layers[:on_gpus]) - host_cache
    on_host += sum(needs.expert_bytes(layer) for layer in range(on_gpus, cpu_experts))
    on_host += 0 if has_embedding else needs.embedding or needs.tied
    return DevicePlacement(num_layers, tuple(shares), has_embedding, cpu_experts, on_host, host_cache)


def _cpu_reads(needs: MemoryNeeds, placement: DevicePlacement) -> int:
    """Bytes that the CPU could read per token in the time that it takes, about."""
    read = needs.read_by_cpu(placement.num_gpu_layers, placement.cpu_experts)
    return read + HOP_BYTES * placement.num_split_layers


def _with_reason(needs: MemoryNeeds, split: DevicePlacement, whole: DevicePlacement | None) -> DevicePlacement:
    """A placement whose experts were put on the CPU, with the reason for the log."""
    reads = needs.read_by_cpu(split.num_gpu_layers, split.cpu_experts) / 1e9
    if whole is None:
        reason = f"with all experts fewer than {split.num_gpu_layers} layers fit"
    else:
        before = needs.read_by_cpu(whole.num_gpu_layers, whole.cpu_experts) / 1e9
        reason = (
            f"with all experts only {whole.num_gpu_layers} layers fit, and a token reads {before:.2f} GB of main "
            f"memory in place of {reads:.2f} GB"
        )
    return replace(split, reason=reason)
