"""Steps that a text goes through before SentencePiece's compiled map, as the files of ALBERT and DeBERTa list them.

A step is a word of STEPS, or a replacement: "replace", what is replaced, and by what, with a tab before each of them.
Steps never look across a space. Source: the tokenizers library, its normalizers.
"""

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from functools import partial

_REPLACE = "replace"


def _lowered(text: str) -> str:
    """Each character by itself: where a word ends does not matter, as it does to Greek in `str.lower`."""
    return text.lower() if text.isascii() else "".join(map(str.lower, text))


def _without_marks(text: str) -> str:
    """Without combining marks of any kind."""
    return text if text.isascii() else "".join(c for c in text if unicodedata.category(c)[0] != "M")


STEPS: Mapping[str, Callable[[str], str]] = {
    "lowercase": _lowered,
    "strip_accents": _without_marks,
    **{form.lower(): partial(unicodedata.normalize, form) for form in ("NFC", "NFD", "NFKC", "NFKD")},
}
"""By name."""

KEEPING_SPACES = ("lowercase", _REPLACE)
"""Steps that neither make white space nor take any."""


def replacement(old: str, new: str) -> str | None:
    """The step that puts one text in place of another; None for texts that a step cannot hold."""
    return None if not old or any(c.isspace() for c in old + new) else f"{_REPLACE}\t{old}\t{new}"


def is_step(step: str) -> bool:
    """Whether a step is one of those that are known."""
    return step in STEPS or (
        step.startswith(f"{_REPLACE}\t") and len(step.split("\t")) == 3 and step.split("\t")[1] != ""
    )


def keeps_spaces(step: str) -> bool:
    """Whether a step leaves white space where it is."""
    return step.split("\t")[0] in KEEPING_SPACES


def apply_steps(steps: Iterable[str], text: str) -> str:
    """The text after all of the steps, which `is_step` knows."""
    for step in steps:
        if step in STEPS:
            text = STEPS[step](text)
        else:
            _, old, new = step.split("\t")
            text = text.replace(old, new)
    return text
