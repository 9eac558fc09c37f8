"""A chat window of Qt (PySide6): `python qt_chat.py [MODEL]`. A thread uses the model, and a timer shows its news."""

import sys
import threading
from queue import SimpleQueue

from PySide6 import QtCore, QtGui, QtWidgets

import localinfer


class ChatWindow(QtWidgets.QWidget):
    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self.bar, self.view = QtWidgets.QProgressBar(), QtWidgets.QPlainTextEdit(readOnly=True)
        self.line = QtWidgets.QLineEdit(returnPressed=self.ask)
        self.stop = QtWidgets.QPushButton("Stop", clicked=lambda: self.session and self.session.cancel())
        layout = QtWidgets.QVBoxLayout(self)
        for widget in (self.bar, self.view, self.line, self.stop):
            layout.addWidget(widget)
        self.session: localinfer.Session | None = None
        self.closing, self.questions = threading.Event(), SimpleQueue[str | None]()
        self.news = SimpleQueue[str | tuple[str, int, int]]()
        self.thread_of_model = threading.Thread(target=self.use_model, args=(model,))
        self.thread_of_model.start()
        self.startTimer(16)

    def use_model(self, model: str | None) -> None:
        try:
            with localinfer.load(model, progress=lambda *stage: self.news.put(stage), cancel=self.closing) as llm:
                self.session = llm.session()
                self.news.put(("ready", 1, 1))
                while (question := self.questions.get()) is not None:
                    try:
                        for event in self.session.stream(question):
                            self.news.put(event.reasoning + event.text)
                    except localinfer.errors.LocalinferError as error:
                        self.news.put(str(error))
        except localinfer.errors.LocalinferError as error:
            self.news.put(str(error))

    def timerEvent(self, event: QtCore.QTimerEvent) -> None:
        texts: list[str] = []
        while not self.news.empty():
            match self.news.get():
                case str(part):
                    texts.append(part)
                case (stage, done, total):
                    self.bar.setMaximum(total)
                    self.bar.setValue(done)
                    self.bar.setFormat(f"{stage}: %p%")
        if text := "".join(texts):
            self.view.moveCursor(QtGui.QTextCursor.MoveOperation.End)
            self.view.insertPlainText(text)

    def ask(self) -> None:
        if self.thread_of_model.is_alive():
            self.news.put(f"\n\n{self.line.text()}\n\n")
            self.questions.put(self.line.text())
            self.line.clear()

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
