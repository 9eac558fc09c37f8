"""How many cells of a terminal text takes, and where a line may be broken without a space."""

from functools import lru_cache

from wcwidth import wcswidth, wcwidth

_ZERO_WIDTH_JOINER = "\u200d"
_EMOJI_STYLE = "\ufe0f"
"""Makes the character before it wide."""
_LONGEST_CLUSTER = 16
_OPENING = frozenset("([{\u2018\u201c\u300a\u3008\u300c\u300e\u3010\u3014\u3016\uff08\uff3b\uff5b")
"""Never the last on a line."""
_CLOSING = frozenset(
    ")]}.,;:!?%\u2019\u201d\u2026\u3001\u3002\u3009\u300b\u300d\u300f\u3011\u3015\u3017\uff09\uff0c\uff0e\uff1a\uff1b"
    "\uff01\uff1f\uff3d\uff5d\uff05\u30fb\u30fc\u3005\u3041\u3043\u3045\u3047\u3049\u3063\u3083\u3085\u3087\u30a1\u30a3"
    "\u30a5\u30a7\u30a9\u30c3\u30e3\u30e5\u30e7"
)
"""Never the first on a line: closing punctuation, and the small kana."""


def text_width(text: str) -> int:
    """Cells of a text without line ends: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    width = wcswidth(text)
    return width if width >= 0 else sum(max(0, wcwidth(character)) for character in text)


@lru_cache(maxsize=4096)
def _is_wide(character: str) -> bool:
    # Korean puts spaces between its words, and breaks lines there.
    return wcwidth(character) == 2 and not "\uac00" <= character <= "\ud7a3"


def is_wide(character: str) -> bool:
    """Whether a line may be broken beside the character: an ideograph, kana or an emoji."""
    return character >= "\u1100" and _is_wide(character)


def joins(before: str, character: str) -> bool:
    """Whether the character is drawn in the cells of the text before it, and is never parted from it."""
    if not before:
        return False
    cluster = before[-_LONGEST_CLUSTER:]
    return character == _EMOJI_STYLE or text_width(cluster + character) <= text_width(cluster)


def may_break(before: str, character: str) -> bool:
    """Whether a line may end after the text `before`, which is not empty, though no space follows it."""
    last = before[-1]
    if last.isascii() and character.isascii():
        return False
    if last in _OPENING or character in _CLOSING or last == _ZERO_WIDTH_JOINER or joins(before, character):
        return False
    return is_wide(character) or any(map(is_wide, before[-2:]))
