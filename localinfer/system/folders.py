"""The user's private folders for caches, state, configuration, data and sockets."""

import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import Literal

from localinfer.errors import RequestError
from localinfer.system import disk

FolderKind = Literal["cache", "state", "config", "data"]

_XDG = {
    "cache": ("XDG_CACHE_HOME", ".cache"),
    "state": ("XDG_STATE_HOME", ".local/state"),
    "config": ("XDG_CONFIG_HOME", ".config"),
    "data": ("XDG_DATA_HOME", ".local/share"),
}
"""Variable and folder in the home folder, of the XDG Base Directory Specification 0.8."""


CACHE_VARIABLE = "LOCALINFER_CACHE"
"""Environment variable with the folder of all caches, for applications that are not Python."""

_chosen: list[Path] = []


def set_cache_folder(path: str | os.PathLike[str] | None) -> None:
    """Keep everything that is cached (compiled kernels, measurements, prompts) in a folder, from now on.

    path: of a folder that need not exist, such as one of the application's own; None: back to `LOCALINFER_CACHE`, or
        this user's cache folder. Set it before the first model is loaded: what is open stays where it is. It changes no
        result. Raises: RequestError.
    """
    if path is None:
        _chosen.clear()
        return
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise RequestError(f"the cache folder is {path!r:.80}; give the path of a folder, or None for the default")
    _chosen[:] = [expand_home(path).absolute()]


def chosen_cache_folder() -> Path | None:
    """The folder of `set_cache_folder`, or None."""
    return _chosen[0] if _chosen else None


def user_folder(kind: FolderKind) -> Path | None:
    """localinfer's folder for this user, which need not exist.

    The one for caches may be chosen by `set_cache_folder` or the variable LOCALINFER_CACHE. None without a home folder
    (no HOME and no entry in the user database, or a relative HOME).
    """
    if kind == "cache":
        if _chosen:
            return _chosen[0]
        if os.environ.get(CACHE_VARIABLE):
            return expand_home(os.environ[CACHE_VARIABLE]).absolute()
    if sys.platform in ("darwin", "win32"):
        return _platform_folder(kind)
    variable, below = _XDG[kind]
    parent = os.environ.get(variable, "")
    if not os.path.isabs(parent):
        home = _home_folder()
        if home is None:
            return None
        parent = str(home / below)
    return Path(parent) / "localinfer"


def _platform_folder(kind: FolderKind) -> Path | None:
    """The folder on macOS and Windows."""
    import platformdirs

    find = {
        "cache": platformdirs.user_cache_dir,
        "state": platformdirs.user_state_dir,
        "config": platformdirs.user_config_dir,
        "data": platformdirs.user_data_dir,
    }
    try:
        path = Path(find[kind]("localinfer", appauthor=False))
    except (OSError, RuntimeError, KeyError):
        return None
    return path if path.is_absolute() else None


def _home_folder() -> Path | None:
    """The home folder, if the environment or the user database has an absolute path."""
    if "HOME" in os.environ and not os.environ["HOME"]:
        # Python takes an empty HOME for the root folder.
        return None
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) else None


def expand_home(path: str | os.PathLike[str]) -> Path:
    """A path that may begin with ~ or ~NAME. Raises: RequestError if that user has no home folder."""
    text = os.fspath(path)
    is_mine = text == "~" or text.startswith("~/")
    expanded = text if is_mine and sys.platform != "win32" and _home_folder() is None else os.path.expanduser(text)
    if text.startswith("~") and expanded == text:
        raise RequestError(f"{text} begins with a home folder unknown to this system; give the whole path")
    return Path(expanded)


def runtime_folder() -> Path | None:
    """A folder for this user's sockets, which need not exist: the system may remove it at logout.

    None on systems without file ownership.
    """
    if sys.platform in ("darwin", "win32"):
        import platformdirs

        return Path(platformdirs.user_runtime_dir("localinfer", appauthor=False))
    for parent in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        if os.path.isabs(parent) and os.path.isdir(parent) and os.access(parent, os.W_OK):
            return Path(parent) / "localinfer"
    return temporary_folder()


def temporary_folder() -> Path | None:
    """A folder for this user in the system's temporary folder, if no other user can rename or replace its files.

    None on systems without file ownership. The folder need not exist, and may belong to another user: see
    `make_private`.
    """
    if not hasattr(os, "getuid"):
        return None
    try:
        parent = Path(tempfile.gettempdir()).resolve()
        for folder in (parent, *parent.parents):
            status = folder.stat()
            is_shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
            if is_shared or status.st_uid not in (0, os.getuid()):
                return None
    except OSError:
        return None
    return parent / f"localinfer-{os.getuid()}"


def make_private(folder: Path) -> str | None:
    """Create `folder` with mode 0700 if it is missing; return why it cannot be used, or None.

    A folder that another user owns or can write is refused; read access of others is removed.
    """
    try:
        disk.make_folder(folder)
        status = disk.status(folder, follow_links=False)
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is not a folder"
        if hasattr(os, "getuid"):
            if status.st_uid != os.getuid():
                return f"{folder} belongs to another user"
            if status.st_mode & 0o022:
                return f"{folder} can be written by other users"
            if status.st_mode & 0o077:
                disk.set_mode(folder, 0o700)
    except OSError as error:
        return f"{folder} cannot be used: {error.strerror or error}"
    return None
