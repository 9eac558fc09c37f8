"""Texts that clients keep: only their sealer reads them, for their owner, as they were."""

import base64
import os
from pathlib import Path

import pytest

from localinfer.storage.sealed_texts import TextSealer

TEXTS = ["", "a", "Grüße \N{DOG FACE} \ud800", "x" * 63, "y" * 64, "z" * 65, "the same again " * 5000]


@pytest.mark.parametrize("text", TEXTS, ids=len)
def test_a_text_comes_back_for_its_owner_only(text: str) -> None:
    sealer = TextSealer()
    sealed = sealer.seal(text, "alice")
    assert sealed != sealer.seal(text, "alice"), "no two look alike"
    assert sealer.unseal(sealed, "alice") == text
    assert len(text) < 64 or text[:16] not in sealed
    for reader, owner in ((sealer, "bob"), (sealer, ""), (TextSealer(), "alice")):
        with pytest.raises(ValueError, match="changed"):
            reader.unseal(sealed, owner)


def test_every_changed_byte_is_noticed() -> None:
    sealer = TextSealer(b"k" * 32)
    sealed = sealer.seal("a summary", "alice")
    prefix, _, encoded = sealed.partition(":")
    raw = bytearray(base64.urlsafe_b64decode(encoded))
    for place in range(len(raw)):
        raw[place] ^= 1
        with pytest.raises(ValueError, match="changed"):
            sealer.unseal(f"{prefix}:{base64.urlsafe_b64encode(raw).decode()}", "alice")
        raw[place] ^= 1
    for wrong in ("", "abc", f"{prefix}:", f"{prefix}:\N{DOG FACE}", f"{prefix}:!!!!", sealed[:-4], encoded):
        with pytest.raises(ValueError):
            sealer.unseal(wrong, "alice")
    assert TextSealer(b"k" * 32).unseal(sealed, "alice") == "a summary"


def test_the_key_outlives_the_process(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    sealed = TextSealer.kept_in(folder).seal("a", "")
    assert TextSealer.kept_in(folder).unseal(sealed, "") == "a"
    (key,) = folder.iterdir()
    if os.name != "nt":
        assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError):
        TextSealer.kept_in(None).unseal(sealed, "")
    key.write_bytes(b"torn")
    other = TextSealer.kept_in(folder)
    assert other.unseal(other.seal("b", ""), "") == "b" and key.exists(), "it may be being written"
    os.utime(key, (1, 1))
    TextSealer.kept_in(folder)
    assert not key.exists()
    lasting = TextSealer.kept_in(folder).seal("c", "")
    assert TextSealer.kept_in(folder).unseal(lasting, "") == "c"


def test_what_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = TextSealer()
    sealed = sealer.seal("a" * 1000, "")
    monkeypatch.setattr("localinfer.storage.sealed_texts._MOST_BYTES", 999)
    with pytest.raises(ValueError, match="longer than 999"):
        sealer.unseal(sealed, "")
