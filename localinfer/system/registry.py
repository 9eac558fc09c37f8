"""Parts of the library by name, whose modules are imported when one of theirs is first used.

A model needs the parts of its own family: dispatch over all of them goes through a registry, in which a part is an
address, "module:name", so that naming a part costs nothing. Addresses are of the registry's own package or below it.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Part = TypeVar("Part")


def find_part(address: str) -> Any:
    """Import the module of an address, "module:name", and return what it defines under that name."""
    module, _, name = address.partition(":")
    return getattr(import_module(module), name)


class Registry(Mapping[Key, Part]):
    """Parts by key, each imported when it is looked up.

    addresses: of the parts. tables: of mappings that hold the parts of several keys, with these keys.
    """

    def __init__(
        self, addresses: Mapping[Key, str] | None = None, tables: Mapping[str, Iterable[Key]] | None = None
    ) -> None:
        self._addresses = dict(addresses or {})
        self._tables = {key: table for table, keys in (tables or {}).items() for key in keys}

    def __getitem__(self, key: Key) -> Part:
        if key in self._tables:
            return find_part(self._tables[key])[key]  # type: ignore[no-any-return]
        return find_part(self._addresses[key])  # type: ignore[no-any-return]

    def __contains__(self, key: object) -> bool:
        return key in self._tables or key in self._addresses

    def __iter__(self) -> Iterator[Key]:
        yield from self._tables
        yield from self._addresses

    def __len__(self) -> int:
        return len(self._tables) + len(self._addresses)
