"""Registries name what is there: each address resolves, and each table has the keys that it is listed with."""

import pytest

from localinfer.models.decoder import decoder
from localinfer.models.decoder.architectures import ARCHITECTURES
from localinfer.models.text import tokenizer
from localinfer.system.registry import Registry, find_part

REGISTRIES = {
    "architectures": ARCHITECTURES,
    "mixers": decoder.RECURRENT_MIXERS,
    "layers": decoder._WHOLE_LAYERS,
    "encoders": tokenizer._ENCODERS,
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_part_is_where_its_address_says(name: str) -> None:
    registry = REGISTRIES[name]
    assert len(registry) == len(set(registry)) and all(registry[key] is not None for key in registry)
    for table in set(registry._tables.values()):
        listed = {key for key, one in registry._tables.items() if one == table}
        assert listed == set(find_part(table)), f"{table} has other keys than it is listed with"


def test_a_key_that_is_not_listed_is_none_of_a_registry() -> None:
    registry: Registry[str, object] = Registry({"one": "localinfer.errors:RequestError"})
    assert "two" not in registry and registry.get("two") is None
    with pytest.raises(KeyError):
        registry["two"]
