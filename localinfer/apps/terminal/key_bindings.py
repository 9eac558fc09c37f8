"""What keys do at the prompt of a chat."""

import asyncio
from collections.abc import Callable

from prompt_toolkit.application import Application, run_in_terminal
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from localinfer.apps.terminal.interrupts import MOMENT_SECONDS, Interrupts
from localinfer.errors import RequestError

LEAVING_HINT = "Ctrl-C again, or Ctrl-D, leaves"


def key_bindings(
    interrupts: Interrupts,
    notice: Callable[[str], None],
    unfold: Callable[[], None],
    suspend: Callable[[], None],
    edit: Callable[[str], str | None],
) -> KeyBindings:
    """Enter sends; Alt-Enter and Ctrl-J start a new line; a pasted text of several lines is one message.

    Ctrl-C clears what was typed; where nothing was, it says that a second one leaves, by `notice` on a terminal that
    has no status line. Ctrl-O calls `unfold`, which may print, and Ctrl-Z `suspend`, which stops the process. Ctrl-G
    has `edit` change what is typed; it gives None, or raises RequestError, where that stays as it is.
    """
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    def clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif interrupts.press():
            event.app.exit(exception=EOFError)
        elif event.app.renderer.height_is_known:
            # It is in the status line for a moment.
            draw_again(event.app)
        else:
            run_in_terminal(lambda: notice(LEAVING_HINT))

    @bindings.add("c-o")
    def show_reasoning(_: KeyPressEvent) -> None:
        run_in_terminal(unfold)

    @bindings.add("c-g", filter=~is_searching)
    def edit_typed(event: KeyPressEvent) -> None:
        buffer = event.current_buffer

        def change() -> None:
            try:
                edited = edit(buffer.text)
            except RequestError as error:
                notice(str(error))
                return
            if edited is not None:
                buffer.document = Document(edited)

        run_in_terminal(change)

    @bindings.add("c-z")
    def stop(_: KeyPressEvent) -> None:
        run_in_terminal(suspend)

    return bindings


def draw_again(app: Application[str]) -> None:
    """Draw a running prompt anew when the moment after a Ctrl-C is over."""

    async def draw() -> None:
        await asyncio.sleep(MOMENT_SECONDS)
        app.invalidate()

    app.create_background_task(draw())
