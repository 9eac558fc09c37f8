"""Hooks by which PyInstaller finds what an application with localinfer needs; it reads them by itself."""

from pathlib import Path


def hook_folders() -> list[str]:
    """The folder of the hooks: what the entry point `hook-dirs` of the group `pyinstaller40` names."""
    return [str(Path(__file__).parent)]
