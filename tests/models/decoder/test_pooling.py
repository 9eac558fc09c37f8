"""Which pooling a file asks for, and what is refused."""

import numpy as np
import pytest

from localinfer.errors import UnsupportedFormatError
from localinfer.models.decoder.architectures import ARCHITECTURES
from localinfer.models.decoder.block_config import Pooling, classified_rows, read_pooling
from localinfer.models.decoder.config import BIDIRECTIONAL
from localinfer.models.decoder.encoder_architectures import ENCODERS


@pytest.mark.parametrize(
    ("found", "encoder", "decoder"),
    [(None, Pooling.FIRST, Pooling.LAST), (2, Pooling.FIRST, Pooling.LAST), (np.uint32(1), Pooling.MEAN, None)],
)
def test_classifiers_read_the_first_row_of_encoders_and_the_last_of_decoders(
    found: object, encoder: Pooling, decoder: Pooling | None
) -> None:
    metadata: dict[str, object] = {"general.architecture": "bert"}
    if found is not None:
        metadata["bert.classifier.pooling_type"] = found
    assert classified_rows(metadata, is_encoder=True) is encoder
    if decoder is not None:
        assert classified_rows(metadata, is_encoder=False) is decoder
    else:
        with pytest.raises(UnsupportedFormatError, match="the last token"):
            classified_rows(metadata, is_encoder=False)


@pytest.mark.parametrize("found", [9, "mean", 1.0, [0, 2], np.array([0, 2]), None])
def test_unknown_poolings_are_refused(found: object) -> None:
    metadata = {
        "general.architecture": "bert",
        "bert.pooling_type": found,
        "bert.classifier.pooling_type": found,
    }
    with pytest.raises(UnsupportedFormatError, match="pooling_type is"):
        read_pooling(metadata)
    with pytest.raises(UnsupportedFormatError, match="classifier.pooling_type is"):
        classified_rows(metadata, is_encoder=True)


def test_every_encoder_is_listed_as_bidirectional() -> None:
    assert set(ENCODERS) == BIDIRECTIONAL
    assert set(ENCODERS) <= set(ARCHITECTURES)
