"""The lines typed in former chats, in a file of the user's."""

import os

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from localinfer.system.folders import user_folder


class PrivateHistory(FileHistory):
    """Typed lines in a file readable by its owner only; a full disk never ends a chat."""

    def store_string(self, string: str) -> None:
        """Append one entry, with undecodable bytes replaced."""
        try:
            super().store_string(string.encode("utf-8", "replace").decode("utf-8"))
        except OSError:
            return


def open_history() -> History:
    """The history file in the user's state folder, or one in memory where that folder cannot be written."""
    folder = user_folder("state")
    if folder is None:
        return InMemoryHistory()
    path = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        os.close(descriptor)
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return PrivateHistory(str(path))
