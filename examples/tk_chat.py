"""A chat window of Tk: `python tk_chat.py [MODEL]`. A thread uses the model, and the window looks for its news."""

import sys
import threading
import tkinter
from queue import SimpleQueue
from tkinter import scrolledtext, ttk

import localinfer


class ChatWindow:
    def __init__(self, window: tkinter.Tk | tkinter.Toplevel, model: str | None = None) -> None:
        self.window, self.stage, self.bar = window, ttk.Label(window), ttk.Progressbar(window)
        self.view, self.line = scrolledtext.ScrolledText(window), ttk.Entry(window)
        self.stop = ttk.Button(window, text="Stop", command=self.stop_reply)
        for widget in (self.stage, self.bar, self.view, self.line, self.stop):
            widget.pack(fill="x")
        self.line.bind("<Return>", self.ask)
        window.protocol("WM_DELETE_WINDOW", self.close)
        self.session: localinfer.Session | None = None
        self.questions, self.closing = SimpleQueue[str | None](), threading.Event()
        self.news = SimpleQueue[str | tuple[str, int, int]]()
        self.thread_of_model = threading.Thread(target=self.use_model, args=(model,))
        self.thread_of_model.start()
        self.show_news()

    def use_model(self, model: str | None) -> None:
        try:
            with localinfer.load(
                model, progress=lambda stage, done, total: self.news.put((stage, done, total)), cancel=self.closing
            ) as llm:
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

    def show_news(self) -> None:
        self.timer = self.window.after(16, self.show_news)
        while not self.news.empty():
            match self.news.get():
                case str(text):
                    self.view.insert("end", text)
                    self.view.see("end")
                case (stage, done, total):
                    self.stage.configure(text=stage)
                    self.bar.configure(maximum=total or 1, value=done)

    def ask(self, _: object) -> None:
        if self.thread_of_model.is_alive():
            self.news.put(f"\n\n{self.line.get()}\n\n")
            self.questions.put(self.line.get())
            self.line.delete(0, "end")

    def stop_reply(self) -> None:
        if self.session is not None:
            self.session.cancel()

    def close(self) -> None:
        self.window.after_cancel(self.timer)
        self.window.destroy()
        self.closing.set()
        if self.session is not None:
            self.session.close()
        self.questions.put(None)
        self.thread_of_model.join()


if __name__ == "__main__":
    localinfer.freeze_support()
    root = tkinter.Tk()
    window = ChatWindow(root, *sys.argv[1:2])
    root.mainloop()
