"""The `localinfer` command, also as `python -m localinfer`: Ctrl-C ends it in silence, at whatever moment it comes."""

import signal
import sys

from localinfer.system import interruption


def main() -> int:
    """Run the command of `sys.argv` and return its exit code; see `localinfer.apps.cli.main`."""
    answers = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if answers:
            # Of imports that are interrupted Python tells where they were, line by line; the system's answer is silent.
            interruption.replace_handler(signal.SIG_DFL)
        return _run(answers)
    except KeyboardInterrupt:
        # Between two lines of what answers it.
        interruption.end_by_signal()
        return interruption.EXIT_INTERRUPTED


def _run(answers: bool) -> int:
    watch = None
    if sys.argv[1:2] == ["serve"] and "--until-stdin-ends" in sys.argv:
        # Before the rest is imported, which takes a while: the process that started this one may be gone by then.
        from localinfer.system.parent_watch import ParentWatcher

        watch = ParentWatcher()
    try:
        from localinfer.apps.cli import main as run_command
    except ModuleNotFoundError as error:
        return _tell_missing(error)

    from localinfer.system import network_log

    network_log.begin(next((word for word in sys.argv[1:] if not word.startswith("-")), "localinfer"))
    try:
        if answers:
            interruption.begin()
        code = run_command(watch=watch)
    except KeyboardInterrupt:
        code = interruption.EXIT_INTERRUPTED
    if answers:
        # What is done at the end of an interpreter is interrupted like its beginning.
        interruption.end()
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


if __name__ == "__main__":
    sys.exit(main())
