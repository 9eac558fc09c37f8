"""Where models by name may lie on this machine: the hub's cache, our records of pulls, and other programs' folders."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from localinfer.system.folders import user_folder

HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Places:
    """Folders, which need not exist.

    records: what `localinfer pull` brought; None for a user without a home folder, who cannot pull.
    hub_cache: the cache of huggingface_hub, into which files are pulled; None likewise.
    ollama: folders with `manifests` and `blobs`. lm_studio: folders of publisher/repository/file.
    endpoint: address of the hub. is_offline: ask it nothing.
    """

    records: Path | None
    hub_cache: Path | None
    ollama: tuple[Path, ...] = ()
    lm_studio: tuple[Path, ...] = ()
    endpoint: str = HUB
    is_offline: bool = False

    @classmethod
    def of_user(cls) -> Self:
        """The folders of this user, by the variables that those programs read themselves."""
        data = user_folder("data")
        home = _home()
        ollama = [_folder("OLLAMA_MODELS")] if _folder("OLLAMA_MODELS") else [home and home / ".ollama/models"]
        if sys.platform == "linux":
            # Where its service for all users keeps them.
            ollama.append(Path("/usr/share/ollama/.ollama/models"))
        lm_studio = [home / below for below in (".lmstudio/models", ".cache/lm-studio/models")] if home else []
        return cls(
            records=None if data is None else data / "models",
            hub_cache=_hub_cache(home),
            ollama=tuple(folder for folder in ollama if folder is not None),
            lm_studio=tuple(lm_studio),
            endpoint=os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB,
            is_offline=os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
        )


def _home() -> Path | None:
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) and os.environ.get("HOME") != "" else None


def _folder(variable: str) -> Path | None:
    value = os.environ.get(variable)
    return Path(os.path.expanduser(value)) if value else None


def _hub_cache(home: Path | None) -> Path | None:
    """As huggingface_hub finds it, without importing it, which takes half a second."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := _folder(variable):
            return folder
    if folder := _folder("HF_HOME"):
        return folder / "hub"
    caches = _folder("XDG_CACHE_HOME") or (home and home / ".cache")
    return caches / "huggingface" / "hub" if caches else None
