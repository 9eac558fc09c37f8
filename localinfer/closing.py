"""The base of what must be closed: a `with` block does it."""

from typing import Self


class Closing:
    """A context manager that leaves its block by `close`, whatever ended it."""

    __slots__ = ()

    def close(self) -> None:
        """Release what is held; may be called again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
