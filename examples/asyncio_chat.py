"""A chat on an event loop: `python asyncio_chat.py [MODEL]`. A line that is typed while it answers ends the answer."""

import asyncio
import sys
import threading

import localinfer

ANSWER_SECONDS = 120


def show_progress(stage: str, done: int, total: int) -> None:
    print(f"\r\x1b[K{stage} {done / total:.0%}" if total else f"\r\x1b[K{stage}", end="", file=sys.stderr)


def read_lines(loop: asyncio.AbstractEventLoop, lines: asyncio.Queue[str | None]) -> None:
    # Without a buffer, whose lock a thread that still waits for a line would hold when the program ends.
    with open(0, "rb", buffering=0, closefd=False) as file:
        for line in file:
            loop.call_soon_threadsafe(lines.put_nowait, line.decode(errors="replace").strip())
    loop.call_soon_threadsafe(lines.put_nowait, None)


async def answer(session: localinfer.Session, question: str) -> None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS), session.stream(question) as stream:
            async for event in stream:
                print(event.reasoning + event.text, end="", flush=True)
    except TimeoutError:
        print(f" ... not finished after {ANSWER_SECONDS} seconds", end="")
    except localinfer.errors.LocalinferError as error:
        print(error, end="")
    finally:
        print(f"\n[{session.context_used} of {session.context_length} tokens]", flush=True)


async def chat(session: localinfer.Session) -> None:
    lines: asyncio.Queue[str | None] = asyncio.Queue()
    threading.Thread(target=read_lines, args=(asyncio.get_running_loop(), lines), daemon=True).start()
    async with asyncio.TaskGroup() as answers:
        running: asyncio.Task[None] | None = None
        while (line := await lines.get()) is not None:
            if running is not None:
                running.cancel()
                await asyncio.wait([running])
            running = answers.create_task(answer(session, line))


async def main(model: str | None = None) -> None:
    try:
        with await localinfer.aload(model, progress=show_progress) as llm:
            print(f"\r\x1b[K{llm.info.name}: ask something", flush=True)
            await chat(llm.session())
    except localinfer.errors.LocalinferError as error:
        sys.exit(f"\r\x1b[K{error}")


if __name__ == "__main__":
    localinfer.freeze_support()
    try:
        asyncio.run(main(*sys.argv[1:2]))
    except KeyboardInterrupt:
        print()
