"""A chat window of Qt (PySide6): `python qt_chat.py [MODEL]`. A thread uses the model, and signals tell the window."""

import sys
import threading
from queue import SimpleQueue

from PySide6 import QtCore, QtGui, QtWidgets

import localinfer


class ChatWindow(QtWidgets.QWidget):
    progress = QtCore.Signal(str, int, int)
    text = QtCore.Signal(str)

    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self.bar, self.view = QtWidgets.QProgressBar(), QtWidgets.QPlainTextEdit(readOnly=True)
        self.line, self.stop = QtWidgets.QLineEdit(), QtWidgets.QPushButton("Stop")
        layout = QtWidgets.QVBoxLayout(self)
        for widget in (self.bar, self.view, self.line, self.stop):
            layout.addWidget(widget)
        self.progress.connect(self.show_progress)
        self.text.connect(self.show_text)
        self.line.returnPressed.connect(self.ask)
        self.stop.clicked.connect(self.stop_reply)
        self.session: localinfer.Session | None = None
        self.questions, self.closing = SimpleQueue[str | None](), threading.Event()
        self.thread_of_model = threading.Thread(target=self.use_model, args=(model,))
        self.thread_of_model.start()

    def use_model(self, model: str | None) -> None:
        try:
            with localinfer.load(model, progress=self.progress.emit, cancel=self.closing) as llm:
                self.session = llm.session()
                self.progress.emit("ready", 1, 1)
                while (question := self.questions.get()) is not None:
                    try:
                        for event in self.session.stream(question):
                            self.text.emit(event.reasoning + event.text)
                    except localinfer.errors.LocalinferError as error:
                        self.text.emit(str(error))
        except localinfer.errors.LocalinferError as error:
            self.text.emit(str(error))

    def show_progress(self, stage: str, done: int, total: int) -> None:
        self.bar.setRange(0, total)
        self.bar.setValue(done)
        self.bar.setFormat(f"{stage}: %p%")

    def show_text(self, text: str) -> None:
        self.view.moveCursor(QtGui.QTextCursor.MoveOperation.End)
        self.view.insertPlainText(text)

    def ask(self) -> None:
        if self.thread_of_model.is_alive():
            self.show_text(f"\n\n{self.line.text()}\n\n")
            self.questions.put(self.line.text())
            self.line.clear()

    def stop_reply(self) -> None:
        if self.session is not None:
            self.session.cancel()

    def closeEvent(self, event: QtGui.QCloseEvent) -> None:
        self.hide()
        self.closing.set()
        if self.session is not None:
            self.session.close()
        self.questions.put(None)
        self.thread_of_model.join()


if __name__ == "__main__":
    localinfer.freeze_support()
    app = QtWidgets.QApplication(sys.argv)
    window = ChatWindow(*sys.argv[1:2])
    window.show()
    sys.exit(app.exec())
