"""The evaluator of ops over whole texts, against another runtime's logits, and in two models at once."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localinfer.errors import UnsupportedFormatError
from localinfer.models.calibration.evaluator import Evaluator
from localinfer.models.calibration.run import calibrate
from localinfer.models.calibration.weights import StreamedWeights, embedding_rows
from localinfer.models.decoder.decoder import write_decoder
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.methods.imatrix import LinearProduct
from localinfer.quant.methods.workers import Workers
from localinfer.types import FloatArray
from tests.models.arch_models import architectures, build_model, normalized_error, read_config


class Scaler:
    """Notes every product, and multiplies the second model's matrices with a factor."""

    def __init__(self, factor: float | None) -> None:
        self.factor = factor
        self.products: list[LinearProduct] = []

    def visit(self, product: LinearProduct) -> Sequence[FloatArray | None]:
        self.products.append(product)
        if self.factor is None:
            return [None] * len(product.matrices)
        return [np.float32(self.factor) * matrix.values for matrix in product.matrices]


def run(
    path: Path, token_ids: np.ndarray, visitor: Scaler, *, is_double: bool = False, threads: int = 1
) -> list[FloatArray]:
    with read_gguf(path) as file, Workers(threads) as workers:
        rows = (lambda name, ids: embedding_rows(file, name, ids)) if is_double else None
        evaluator = Evaluator(token_ids, workers, visitor, rows)
        graph = write_decoder(read_config(path), StreamedWeights(file))
        evaluator.run(graph.ops)
        return evaluator.streams(graph.output)


@pytest.mark.parametrize("name", architectures())
def test_logits_equal_those_of_the_reference_runtime(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    logits = run(model.path, model.token_ids[None], Scaler(None), is_double=True)
    assert normalized_error(logits[0], model.logits) <= 1e-6
    np.testing.assert_array_equal(logits[1], logits[0])


@pytest.mark.parametrize("name", ["llama-gqa", "phi3-dense", "qwen3moe-moe", "deepseek2-moe"])
def test_every_matrix_is_seen_once_with_what_it_reads(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    visitor = Scaler(None)
    run(model.path, model.token_ids[None], visitor)
    seen: dict[str, int] = {}
    for product in visitor.products:
        assert product.current is product.original
        for matrix in product.matrices:
            assert matrix.values.shape[1] == product.original.shape[1]
            seen[matrix.tensor] = seen.get(matrix.tensor, 0) + matrix.values.size
    with read_gguf(model.path) as file:
        wanted = {n: int(np.prod(t.shape)) for n, t in file.tensors.items() if len(t.shape) > 1 and "embd" not in n}
        wanted |= {n: int(np.prod(file.tensor(n).shape)) for n in seen}
    assert seen == wanted


def test_the_second_model_multiplies_with_what_the_visitor_returns(folder: Path) -> None:
    model = build_model(folder, "llama-gqa")
    visitor = Scaler(1.5)
    logits = run(model.path, model.token_ids[None], visitor, is_double=True)
    assert normalized_error(logits[0], model.logits) <= 1e-6
    assert normalized_error(logits[1], model.logits) > 1e-2
    by_name = {product.matrices[0].tensor: product for product in visitor.products}
    first, down = by_name["blk.0.attn_q.weight"], by_name["blk.0.ffn_down.weight"]
    np.testing.assert_array_equal(first.original, first.current)
    assert first.matrices[0].wanted is None
    wanted = down.matrices[0].wanted
    assert wanted is not None
    attention = by_name["blk.0.attn_output.weight"]
    values = attention.matrices[0].values
    moved = attention.original @ values.T - attention.current @ (np.float32(1.5) * values).T
    np.testing.assert_allclose(wanted, down.original @ down.matrices[0].values.T + moved, atol=1e-5)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3moe-moe"])
def test_bits_do_not_depend_on_threads_nor_sequences_on_each_other(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    ids = np.stack([model.token_ids, model.token_ids[::-1]])
    one = run(model.path, ids, Scaler(1.1), is_double=True)
    three = run(model.path, ids, Scaler(1.1), is_double=True, threads=3)
    for first, second in zip(one, three, strict=True):
        np.testing.assert_array_equal(first, second)
    assert normalized_error(one[0][: len(model.token_ids)], model.logits) <= 1e-6


@pytest.mark.parametrize("name", ["gemma4-e2b", "gemma3n-altup", "glm-dsa-sparse"])
def test_models_whose_layers_read_from_further_back_are_not_calibrated(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    with (
        read_gguf(model.path) as file,
        Workers(1) as workers,
        pytest.raises(UnsupportedFormatError, match="without a calibration text"),
    ):
        calibrate(file, model.token_ids[None], workers, Scaler(None))


@pytest.mark.parametrize("name", ["gemma4-moe", "deepseek32-sparse", "minimax-m3-sparse"])
def test_layers_by_themselves_see_every_product_of_the_whole(name: str, folder: Path) -> None:
    model = build_model(folder, name)
    whole, by_layer = Scaler(None), Scaler(None)
    run(model.path, model.token_ids[None], whole)
    with read_gguf(model.path) as file, Workers(1) as workers:
        calibrate(file, model.token_ids[None], workers, by_layer)
    wanted = [product for product in whole.products if product.matrices[0].tensor != "token_embd.weight"]
    assert len(wanted) == len(by_layer.products)
    for found, product in zip(by_layer.products, wanted, strict=True):
        assert [one.tensor for one in found.matrices] == [one.tensor for one in product.matrices]
        np.testing.assert_array_equal(found.original, product.original)
