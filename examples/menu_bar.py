"""A menu bar app of Qt: `python menu_bar.py [MODEL]`. Its model is loaded when asked, and unloaded when idle."""

import shutil
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Literal, TypedDict

from PySide6 import QtCore, QtGui, QtWidgets

import localinfer


class Note(TypedDict):
    kind: Literal["task", "question", "idea"]
    urgent: bool


def free_space(unit: Literal["GB", "GiB"]) -> str:
    """Tell how much space is free on the user's disk."""
    return f"{shutil.disk_usage('.').free / (1e9 if unit == 'GB' else 2**30):.0f} {unit}"


class MenuBarApp(QtWidgets.QSystemTrayIcon):
    told = QtCore.Signal(str, str)

    def __init__(self, model: str | None = None, *, idle_seconds: float = 300) -> None:
        super().__init__(QtGui.QIcon.fromTheme("computer"))
        self.model, self.idle_seconds, self.menu = model, idle_seconds, QtWidgets.QMenu()
        for action in (self.sort_note, self.check_disk, self.quit):
            self.menu.addAction(action.__name__.replace("_", " ").capitalize(), action)
        self.setContextMenu(self.menu)
        self.told.connect(self.showMessage)
        self.session: localinfer.Session | None = None
        self.jobs, self.closing = SimpleQueue[Callable[[localinfer.Session], str] | None](), threading.Event()
        self.thread_of_model = threading.Thread(target=self.use_model)
        self.thread_of_model.start()

    def use_model(self) -> None:
        while (job := self.jobs.get()) is not None:
            found = localinfer.availability(self.model)
            self.told.emit("Loading", found.reason or f"{found.compile_seconds:.0f} seconds to compile")
            try:
                with localinfer.load(self.model, cancel=self.closing) as llm:
                    while job is not None:
                        self.session = llm.session(tools=[free_space])
                        try:
                            self.told.emit("Answer", "" if self.closing.is_set() else job(self.session))
                        except localinfer.errors.LocalinferError as error:
                            self.told.emit("No answer", str(error))
                        job = self.jobs.get(timeout=self.idle_seconds)
                    return
            except (Empty, localinfer.errors.LocalinferError) as error:
                self.told.emit("Unloaded", str(error) or "Nobody asked for a while.")

    def sort_note(self) -> None:
        question = f"What kind of note is this?\n\n{QtWidgets.QApplication.clipboard().text()}"
        self.jobs.put(lambda session: session.ask(question, type=Note, tool_choice="none")["kind"])

    def check_disk(self) -> None:
        self.jobs.put(lambda session: session.ask("Is my disk full?", tool_choice="required").text)

    def quit(self) -> None:
        self.closing.set()
        if self.session is not None:
            self.session.close()
        self.jobs.put(None)
        self.thread_of_model.join()
        QtWidgets.QApplication.quit()


if __name__ == "__main__":
    localinfer.freeze_support()
    app = QtWidgets.QApplication(sys.argv)
    icon = MenuBarApp(*sys.argv[1:2])
    icon.show()
    sys.exit(app.exec())
