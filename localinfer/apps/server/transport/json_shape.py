"""How large a JSON text is once it is decoded: its depth, values and containers, counted before anything is built.

Decoding holds the interpreter's lock, and what it builds may be twenty times the text, so limits are looked at first.
The count takes no text apart: NumPy looks for signs outside of strings, in pieces between which other threads run.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PIECE_BYTES = 1 << 18
_QUOTE, _BACKSLASH, _COMMA = b'"'[0], b"\\"[0], b","[0]
_STEPS = np.zeros(256, np.int8)
"""What a byte does to the depth."""
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_IS_SIGN = _STEPS != 0
_IS_SIGN[_COMMA] = True


class JsonShape(NamedTuple):
    """Of a text, or of what of it was read before a limit was passed.

    depth: of the deepest bracket. values: at most so many, by commas and brackets that open. containers: objects and
    arrays. entries: of the outermost object or array.
    """

    depth: int = 0
    values: int = 0
    containers: int = 0
    entries: int = 0


def json_shape(text: bytes | bytearray | memoryview, most_depth: int, most_values: int) -> JsonShape:
    """The shape of a text, which need not be JSON; reading ends where a limit is passed."""
    view = np.frombuffer(text, np.uint8)
    found = JsonShape()
    level, num_commas = 0, 0
    is_inside, num_backslashes = False, 0
    for start in range(0, view.size, _PIECE_BYTES):
        piece = view[start : start + _PIECE_BYTES]
        quotes = np.flatnonzero(piece == _QUOTE)
        if quotes.size or num_backslashes or is_inside:
            quotes, num_backslashes = _unescaped(piece, quotes, num_backslashes)
        places = np.flatnonzero(_IS_SIGN[piece])
        if quotes.size:
            toggles = np.zeros(piece.size, np.bool_)
            toggles[quotes] = True
            places = places[np.logical_xor.accumulate(toggles)[places] == is_inside]
            is_inside ^= bool(quotes.size & 1)
        elif is_inside:
            continue
        signs = piece[places]
        steps = _STEPS[signs]
        levels = level + np.cumsum(steps, dtype=np.int64)
        if not levels.size:
            continue
        level = int(levels[-1])
        num_opened = int(np.count_nonzero(steps == 1))
        num_commas += int(np.count_nonzero((steps == 0) & (levels == 1)))
        found = JsonShape(
            max(found.depth, int(levels.max())),
            found.values + num_opened + int(np.count_nonzero(steps == 0)),
            found.containers + num_opened,
            num_commas + 1,
        )
        if found.depth > most_depth or found.values > most_values:
            break
    return found


def _unescaped(piece: NDArray[np.uint8], quotes: NDArray[np.int64], before: int) -> tuple[NDArray[np.int64], int]:
    """The quotes without an odd number of backslashes before them, and how many the piece ends in.

    before: backslashes that the text before the piece ends in.
    """
    is_backslash = piece == _BACKSLASH
    if not is_backslash.any():
        return quotes[1:] if before & 1 and quotes.size and quotes[0] == 0 else quotes, 0
    # Where the last byte before each place stands that is no backslash.
    others = np.where(is_backslash, np.int32(-1 - before), np.arange(piece.size, dtype=np.int32))
    others = np.maximum.accumulate(others)
    lengths = np.arange(piece.size, dtype=np.int32) - others
    at_quotes = np.where(quotes > 0, lengths[quotes - 1], before)
    return quotes[at_quotes & 1 == 0], int(lengths[-1])
