"""Identities of prepared media."""

from dataclasses import replace

import numpy as np

from localinfer.models.media.records import EncoderInput, PreparedMedia

PIECE = EncoderInput(False, np.zeros((4, 6, 3), np.uint8), 6, (2, 3), 6)


def test_a_digest_tells_apart_all_that_a_model_reads() -> None:
    others = [
        ("a", "b", PIECE),
        ("ab", PIECE, ""),
        (PIECE, "ab"),
        ("ab", replace(PIECE, values=np.zeros((6, 4, 3), np.uint8))),
        ("ab", replace(PIECE, values=np.ones((4, 6, 3), np.uint8))),
        ("ab", replace(PIECE, values=np.zeros((4, 6, 3), np.float32))),
        ("ab", replace(PIECE, grid=(3, 2))),
        ("ab", replace(PIECE, grid=None)),
        ("ab", PIECE),
    ]
    assert len({PreparedMedia.from_pieces(pieces).digest for pieces in others}) == len(others)
    assert PreparedMedia.from_pieces(others[-1]) == PreparedMedia.from_pieces(["ab", PIECE])


def test_a_digest_does_not_depend_on_how_values_lie_in_memory() -> None:
    values = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    strided = replace(PIECE, values=np.asfortranarray(values))
    assert (
        PreparedMedia.from_pieces([strided]).digest == PreparedMedia.from_pieces([replace(PIECE, values=values)]).digest
    )
