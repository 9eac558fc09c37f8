"""The base of what must be closed: a `with` block does it."""

from typing import NoReturn, Self, SupportsIndex

from localinfer.errors import RequestError


class Closing:
    """A context manager that leaves its block by `close`, whatever ended it."""

    __slots__ = ()

    _instead = "make another where it is wanted"
    """What to do in place of a copy."""

    def close(self) -> None:
        """Release what is held; may be called again."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse to be pickled or copied. Raises: RequestError."""
        raise RequestError(
            f"this {type(self).__name__} cannot be pickled or copied: it holds memory, threads or files of this "
            f"process; {self._instead}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
