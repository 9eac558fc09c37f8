"""The modules of the command, where an application answers to its words, such as a server of its own executable."""

from PyInstaller.utils.hooks import collect_submodules

hiddenimports = [*collect_submodules("localinfer.apps.cli"), *collect_submodules("localinfer.apps.terminal")]
