"""Spaces of a text as marks, by the steps of tokenizer.json; SentencePiece's own way is in `unigram.py`.

Source: the tokenizers library, its normalizers Strip and Replace, its pre-tokenizers WhitespaceSplit and Metaspace.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from localinfer.models.text.encoders import SPACE_MARK

_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's White_Space, which `str.isspace` goes beyond."""
_WORD = re.compile(f"[^{_WHITE_SPACE}]+")
_SPACES = re.compile(" {2,}")
_SQUEEZED = re.compile(f"[{_WHITE_SPACE}]{{2,}}|[\n\r\t]")


def marked_as_by_tokenizers(
    stretches: Iterable[str], normalize: Callable[[str], str], flags: Mapping[str, bool]
) -> Iterator[str]:
    """Yield a text, given in stretches, normalized and marked.

    flags: of the vocabulary. squeezes_white_space: before all else, white space of several characters, and what ends
    lines, becomes one space. strips_left, strips_right: no white space around the text, which `strips_before_map` looks
    for before it is normalized. remove_extra_whitespaces: several spaces are one. splits_at_white_space: only words are
    left, each with a mark. Without it every space becomes a mark. add_space_prefix: where a text begins with none, one
    is put there.
    """
    if flags.get("squeezes_white_space"):
        stretches = (_SQUEEZED.sub(" ", piece) for piece in _whole_spaces(stretches, False, False))
    left, right = flags.get("strips_left", False), flags.get("strips_right", False)
    pieces: Iterable[str]
    if flags.get("strips_before_map"):
        pieces = map(normalize, _whole_spaces(stretches, left, right))
        left = right = False
    else:
        pieces = map(normalize, stretches)
    pieces = _whole_spaces(pieces, left, right)
    if flags.get("splits_at_white_space"):
        return _marked_words(pieces)
    if flags.get("remove_extra_whitespaces"):
        pieces = (_SPACES.sub(" ", piece) for piece in pieces)
    return _marked_spaces(pieces, adds=flags.get("add_space_prefix", True))


def _whole_spaces(pieces: Iterable[str], left: bool, right: bool) -> Iterator[str]:
    """Cut a text so that no white space lies in two pieces; leave out that on its left, or on its right."""
    held = ""
    for piece in pieces:
        text = (held + piece).lstrip(_WHITE_SPACE) if left else held + piece
        body = text.rstrip(_WHITE_SPACE)
        held = text[len(body) :]
        if body:
            left = False
            yield body
    if held and not right:
        yield held


def _marked_words(pieces: Iterable[str]) -> Iterator[str]:
    is_inside_word = False
    for piece in pieces:
        words = _WORD.findall(piece)
        goes_on = is_inside_word and piece[0] not in _WHITE_SPACE
        is_inside_word = piece[-1] not in _WHITE_SPACE
        if words:
            yield ("" if goes_on else SPACE_MARK) + SPACE_MARK.join(words)


def _marked_spaces(pieces: Iterable[str], *, adds: bool) -> Iterator[str]:
    for piece in pieces:
        begins = SPACE_MARK if adds and piece[0] != " " else ""
        adds = False
        yield begins + piece.replace(" ", SPACE_MARK)
