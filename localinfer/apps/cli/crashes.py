"""What the command does about native crashes: it reports its own, and mentions once what a former one left behind."""

import contextlib
import faulthandler

import click

from localinfer.system.crash_files import report_crashes, reports_folder, take_untold


def begin_crash_reports(command: str) -> None:
    """Report a crash of this process, with Python's stack behind it, and mention the last one's report."""
    # Standard error may be closed, or no file.
    with contextlib.suppress(RuntimeError, ValueError, OSError, AttributeError):
        faulthandler.enable()
    report_crashes()
    report = None if command == "doctor" else take_untold(reports_folder())
    if report is not None:
        where = f" {report.place}" if report.place else ""
        click.echo(
            f"note: localinfer crashed before{where}; `localinfer doctor` shows the report, which was sent nowhere",
            err=True,
        )
