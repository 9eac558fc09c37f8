"""Move scales per channel out of what writes the channels and into what reads them: the model computes the same."""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError
from localinfer.models.calibration.scale_groups import ScaledPart, ScaleGroup
from localinfer.quant.methods.scaled_model import TensorFactors

Shapes = Mapping[str, tuple[int, ...]]


def fold_scales(scales: Iterable[tuple[ScaleGroup, NDArray[np.float32]]], shapes: Shapes) -> dict[str, TensorFactors]:
    """Return what every tensor is multiplied by when sites' channels are divided by scales and their readers' columns
    multiplied.

    Shapes: scales float32[num_channels] of their site, positive; shapes those of the model's tensors, rows first.
    Raises: ShapeError if scales are not positive finite numbers, one per channel.
    """
    factors: dict[str, TensorFactors] = {}

    def multiply(name: str, more: TensorFactors) -> None:
        factors[name] = factors[name] * more if name in factors else more

    for site, values in scales:
        exact = values.astype(np.float64)
        if values.shape != (site.num_channels,) or not (np.isfinite(exact).all() and (exact > 0).all()):
            raise ShapeError(
                f"got scales {list(values.shape)} for {site.name}; wanted {site.num_channels} positive finite numbers"
            )
        for part in site.writers:
            multiply(part.tensor, _divisors(part, exact, shapes[part.tensor]))
        for reader in site.readers:
            multiply(reader, TensorFactors(columns=reader_scales(site, exact, shapes[reader])))
    return factors


def reader_scales(site: ScaleGroup, values: NDArray[np.float64], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Scales of a reader's columns: float64[columns], or float64[matrices, columns] where each matrix has its own."""
    spread = values if site.columns is None else values[site.columns]
    return spread if spread.size == shape[-1] else spread.reshape(-1, shape[-1])


def _divisors(part: ScaledPart, values: NDArray[np.float64], shape: tuple[int, ...]) -> TensorFactors:
    """1 / scale on the part, 1 elsewhere."""
    length = shape[-1] if part.is_vector else shape[-2]
    per_matrix = values.reshape(-1, part.count)
    divisors = np.ones((len(per_matrix), length))
    divisors[:, part.start : part.start + part.count] = per_matrix**-part.power
    whole = divisors[0] if len(divisors) == 1 else divisors
    if not part.is_vector:
        return TensorFactors(rows=whole)
    return TensorFactors(columns=whole)
