"""The `localinfer` command, also as `python -m localinfer`: Ctrl-C ends it in silence, at whatever moment it comes."""

import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_AGAIN_SECONDS = 0.01


def main() -> int:
    """Run the command of `sys.argv` and return its exit code; see `localinfer.cli.main`."""
    # Of imports that are interrupted Python tells where they were, line by line; the system's own answer is silent.
    answers = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answers:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    watch = None
    if sys.argv[1:2] == ["serve"] and "--until-stdin-ends" in sys.argv:
        # Before the rest is imported, which takes a while: who started us may be gone by then.
        from localinfer.system.parent_watch import ParentWatch

        watch = ParentWatch()
    try:
        from localinfer.cli import EXIT_INTERRUPTED
        from localinfer.cli import main as run_command
    except ModuleNotFoundError as error:
        return _tell_missing(error)

    try:
        if answers:
            sys.unraisablehook = _interrupt_again
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_command(watch=watch)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if answers:
        # What is done at the end of an interpreter is interrupted like its beginning.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def _tell_missing(error: ModuleNotFoundError) -> int:
    """Say on one line how the packages of the command are installed, if it is one of these that is missing."""
    from localinfer.errors import MissingPackageError
    from localinfer.system.extras import require

    try:
        require("cli", "the command")
    except MissingPackageError as missing:
        sys.stderr.write(f"error: {missing}\n")
        return 2
    raise error


def _interrupt_again(unraisable: "UnraisableHookArgs") -> None:
    """Repeat a Ctrl-C that came in a callback, such as one of an import that ends, whose exceptions go nowhere."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    import threading

    # Not here and now: this is still the callback.
    again = threading.Timer(_AGAIN_SECONDS, signal.raise_signal, (signal.SIGINT,))
    again.daemon = True
    again.start()


if __name__ == "__main__":
    sys.exit(main())
