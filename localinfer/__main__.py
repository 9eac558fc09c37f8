"""The `localinfer` command, also as `python -m localinfer`: Ctrl-C ends it in silence, at whatever moment it comes."""

import signal
import sys


def main() -> int:
    """Run the command of `sys.argv` and return its exit code; see `localinfer.cli.main`."""
    # Of imports that are interrupted Python tells where they were, line by line; the system's own answer is silent.
    answers = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if answers:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from localinfer.cli import EXIT_INTERRUPTED
    from localinfer.cli import main as run_command

    try:
        if answers:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_command()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if answers:
        # What is done at the end of an interpreter is interrupted like its beginning.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    sys.exit(main())
