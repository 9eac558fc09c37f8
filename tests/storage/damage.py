"""Everything that may have become of a file in a cache folder: damaged, replaced, or written by hand."""

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]

HUGE_BYTES = 1 << 36
"""Larger than memory; the file has a hole of that size."""


def full_disk_after(calls: int, function: Callable[..., object]) -> Callable[..., object]:
    """The function, which says that the disk is full once it has been called so often."""
    left = calls

    def call(*arguments: object, **options: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*arguments, **options)

    return call


def _written(content: bytes) -> Damage:
    def damage(path: Path) -> None:
        path.unlink()
        path.write_bytes(content)

    return damage


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _huge(path: Path) -> None:
    os.truncate(path, HUGE_BYTES)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _folder_of_others(path: Path) -> None:
    _folder(path)
    (path / "notes.txt").write_text("mine")


def _link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _unreadable(path: Path) -> None:
    path.chmod(0)


DAMAGES: dict[str, Damage] = {
    "empty": _written(b""),
    "garbage": _written(b"\xff\xfe\x00garbage\n\x80" * 40),
    "half": _half,
    "one bit": _one_bit,
    "longer": _longer,
    "huge": _huge,
    "folder": _folder,
    "folder of others": _folder_of_others,
}
if sys.platform != "win32":
    DAMAGES |= {
        "link to nothing": _link_to_nothing,
        "link to itself": _link_to_itself,
        "link to a device": _link_to_a_device,
        "pipe": _pipe,
        "unreadable": _unreadable,
    }

_VALUES = ("null", "true", "[]", "{}", '"x"', '"\\ud800"', "-1", "0", "1e999", "NaN", "1" + "0" * 400, "7.5", "[[[]]]")


def json_damages(example: bytes) -> dict[str, bytes]:
    """Texts that are JSON and not what was meant: wrong as a whole, a key missing, a value of another type."""
    found = {f"all {value:.9}": value.encode() for value in _VALUES}
    found["deep"] = b"[" * 200_000
    fields = json.loads(example)
    for key in fields:
        found[f"no {key}"] = json.dumps({name: value for name, value in fields.items() if name != key}).encode()
        for value in _VALUES:
            others = ", ".join(f"{json.dumps(name)}: {json.dumps(fields[name])}" for name in fields if name != key)
            found[f"{key} {value:.9}"] = f"{{{others}{', ' if others else ''}{json.dumps(key)}: {value}}}".encode()
    return found
