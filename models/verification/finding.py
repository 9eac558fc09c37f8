"""What a check of a model file has found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something about a model that is likely wrong.

    check: the name of the check, for programs. message: one line without a full stop: what was found, what was wanted,
    and the way out. is_error: the model cannot work so, and is refused unless its caller wants it all the same.
    """

    check: str
    message: str
    is_error: bool = False
