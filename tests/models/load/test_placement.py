"""Which GPUs get which layers, and which experts stay on the CPU, by the bytes that there are."""

from dataclasses import replace
from typing import Any

import pytest

from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.kernels.cuda.device import FoundDevice
from localinfer.models.load.device_request import DeviceRequest
from localinfer.models.load.placement import MARGIN_BYTES, DevicePlacement, MemoryNeeds, choose_placement

GB = 1 << 30
DENSE = MemoryNeeds(
    layers=[GB] * 8, output=GB // 4, embedding=GB // 2, working=GB // 4, cache=[GB // 8] * 8, experts=[0] * 8
)
MIXTURE = MemoryNeeds(
    layers=[5 * GB] * 8,
    output=GB // 4,
    embedding=GB // 2,
    working=GB // 4,
    cache=[GB // 8] * 8,
    experts=[4 * GB] * 8,
    active_share=1 / 8,
)


def place(needs: MemoryNeeds, *free: float, **options: Any) -> DevicePlacement:
    gpus = [FoundDevice(f"GPU {index}", int(size * GB) + MARGIN_BYTES, index) for index, size in enumerate(free)]
    found = choose_placement(needs, gpus, DeviceRequest(**{"device": "auto", **options}))
    assert found is not None
    return found


def held(placement: DevicePlacement) -> list[tuple[int, int, int]]:
    """By GPU the first layer and the one after the last."""
    return [(share.device.index, share.first, share.end) for share in placement.gpus]


@pytest.mark.parametrize(
    ("free", "options", "wanted"),
    [
        # The fewest GPUs that hold everything, those with the most room first.
        ((9, 20), {}, [(1, 0, 8)]),
        ((6, 6, 1), {}, [(0, 0, 4), (1, 4, 8)]),
        ((6, 4, 4), {}, [(0, 0, 5), (1, 5, 8)]),
        # All that are named, in that order, filled alike.
        ((20, 20), {"device": "cuda:1,cuda:0"}, [(1, 0, 4), (0, 4, 8)]),
        ((30, 10), {"device": "cuda:0,cuda:1"}, [(0, 0, 6), (1, 6, 8)]),
        ((20, 20), {"device": "cuda:1"}, [(1, 0, 8)]),
        # As they are asked for.
        ((20, 20), {"tensor_split": [3, 1]}, [(0, 0, 6), (1, 6, 8)]),
        ((20, 20, 20), {"tensor_split": [1, 0, 1]}, [(0, 0, 4), (2, 4, 8)]),
        ((20, 20), {"tensor_split": [0.5, 0.5], "gpu_layers": 5}, [(0, 3, 5), (1, 5, 8)]),
        ((6, 9), {"gpu_layers": 4}, [(1, 4, 8)]),
        ((6, 4), {"gpu_layers": 8}, [(0, 0, 5), (1, 5, 8)]),
        # What does not fit stays on the CPU; a GPU without room for a layer is left out.
        ((3, 3), {}, [(0, 4, 6), (1, 6, 8)]),
        ((4, 0.3), {}, [(0, 5, 8)]),
    ],
)
def test_layers_are_shared_by_room_or_as_asked(
    free: tuple[float, ...], options: dict[str, Any], wanted: list[tuple[int, int, int]]
) -> None:
    placement = place(DENSE, *free, **options)
    assert held(placement) == wanted
    for share in placement.gpus:
        assert share.num_bytes <= share.device.free_bytes
        assert share.cache_bytes == (share.end - share.first) * GB // 8
    assert placement.gpus[-1].end == 8


def test_named_gpus_are_filled_alike() -> None:
    placement = place(DENSE, 12, 24, 12, device="cuda:0,cuda:1,cuda:2")
    assert [share.end - share.first for share in placement.gpus] == [1, 5, 2]
    assert not place(DENSE, 12, 24, device="cuda:0,cuda:1").uses_cpu


def test_an_embedding_that_is_the_output_matrix_is_counted_on_both_gpus() -> None:
    tied = MemoryNeeds([GB] * 2, output=GB, embedding=0, working=0, cache=[0, 0], tied=GB)
    placement = place(tied, 3, 3, tensor_split=[1, 1])
    assert [share.num_bytes for share in placement.gpus] == [2 * GB, 2 * GB] and placement.has_embedding
    tight = place(tied, 1.5, 3, tensor_split=[1, 1])
    assert not tight.has_embedding and tight.host_bytes == GB
    assert not place(tied, 3).uses_cpu


def test_experts_stay_on_the_cpu_where_a_token_then_reads_less_of_main_memory() -> None:
    """Half of the layers would fit whole; without experts all do, and the CPU multiplies by an eighth of the others."""
    placement = place(MIXTURE, 21)
    assert held(placement) == [(0, 0, 8)] and placement.cpu_experts == placement.num_split_layers == 5
    assert placement.host_bytes == 5 * 4 * GB
    text = placement.describe()
    assert text.startswith("8 of 8 layers on the GPU: they need 22.5 GB of the 22.8 GB free on GPU 0; ")
    assert text.endswith(
        "; the experts of layers 0 to 4 on the CPU, since with all experts only 4 layers fit, and a token reads "
        "5.91 GB of main memory in place of 2.68 GB"
    )


def test_layers_without_experts_leave_the_cpu_nothing() -> None:
    """The first layers of many mixtures are dense."""
    dense_first = replace(MIXTURE, layers=[GB, *MIXTURE.layers[1:]], experts=[0, *MIXTURE.experts[1:]])
    assert not place(dense_first, 60, cpu_moe=1).uses_cpu
    assert place(dense_first, 60, cpu_moe=2).num_split_layers == 2


@pytest.mark.parametrize(
    ("free", "options", "cpu_experts", "num_gpu_layers"),
    [
        # All of it fits.
        (42, {}, 0, 8),
        # Even without experts not all layers fit.
        (5, {}, 8, 4),
        (21, {"cpu_moe": True}, 8, 8),
        (21, {"cpu_moe": 7}, 7, 8),
        (21, {"cpu_moe": 99}, 8, 8),
        (21, {"cpu_moe": False}, 0, 4),
        (21, {"cpu_moe": 0}, 0, 4),
        # The experts of the first layers are on the CPU with them.
        (21, {"gpu_layers": 4}, 0, 4),
        (21, {"gpu_layers": 6}, 5, 6),
    ],
)
def test_as_few_experts_stay_on_the_cpu_as_needed_or_asked(
    free: float, options: dict[str, Any], cpu_experts: int, num_gpu_layers: int
) -> None:
    placement = place(MIXTURE, free, **options)
    assert (placement.cpu_experts, placement.num_gpu_layers) == (cpu_experts, num_gpu_layers)
    assert placement.num_bytes <= free * GB + MARGIN_BYTES


def test_experts_over_several_gpus_are_planned_together() -> None:
    placement = place(MIXTURE, 11, 11)
    assert placement.num_gpu_layers == 8 and 0 < placement.cpu_experts < 8
    # The first GPU, whose layers have no experts, takes more of them.
    first, second = placement.gpus
    assert first.end - first.first > second.end - second.first
    assert placement.describe().startswith("8 of 8 layers on 2 GPUs: cuda:0 has layers 0 to ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:3"}, r"there is no GPU cuda:3 that can be used; there are: cuda:0 \(GPU 0\), cuda:1"),
        ({"tensor_split": [1, 1, 1]}, "tensor_split has shares for 3 GPUs, and 2 can be used here"),
        ({"gpu_layers": 8}, "gpu_layers is 8, and 8 layers need .* of 2 GPUs that have .* where 4 of 8 fit"),
        ({"gpu_layers": 4, "tensor_split": [1, 0]}, "gpu_layers is 4, and 4 layers need"),
    ],
)
def test_what_is_not_there_or_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((BackendUnavailableError, RequestError), match=message):
        place(DENSE, 3, 3, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:x"}, "wanted one of 'auto', 'cpu', 'cuda', or GPUs by number"),
        ({"device": "cuda:0,"}, "wanted one of"),
        ({"device": ""}, "wanted one of"),
        ({"device": 3}, "wanted one of"),
        ({"device": "cuda:1,cuda:1"}, "name every GPU once"),
        ({"device": "cuda:0", "gpu_layers": 0}, "gpu_layers is 0, but the device is 'cuda:0'"),
        ({"device": "cpu", "tensor_split": [1]}, "but the device is 'cpu'"),
        ({"device": "cuda:0,cuda:1", "tensor_split": [1, 1, 1]}, "shares for 3 GPUs, and device is 'cuda:0,cuda:1'"),
        ({"device": "cuda", "tensor_split": []}, "tensor_split is"),
        ({"device": "cuda", "tensor_split": [0, 0]}, "tensor_split is"),
        ({"device": "cuda", "tensor_split": [1, -1]}, "tensor_split is"),
        ({"device": "cuda", "tensor_split": [float("nan")]}, "tensor_split is"),
        ({"device": "cuda", "tensor_split": "3,1"}, "tensor_split is"),
        ({"device": "cuda", "tensor_split": 3}, "tensor_split is"),
        ({"cpu_moe": -1}, "cpu_moe is -1"),
        ({"cpu_moe": 1.5}, "cpu_moe is 1.5"),
        ({"cpu_moe": "all"}, "cpu_moe is 'all'"),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((BackendUnavailableError, RequestError), match=message):
        DeviceRequest(**options).check()
    DeviceRequest(device="cuda:0, cuda:1", tensor_split=(3, 1), cpu_moe=True).check()
