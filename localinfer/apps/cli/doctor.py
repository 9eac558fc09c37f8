"""The `localinfer doctor` command."""

import json
import shutil
import sys

import click

from localinfer.apps.cli.options import flag
from localinfer.terminal import Progress, has_colour


@click.command("doctor")
@flag("--json as_json", "Print one JSON object.")
@flag("--network", "List the other machines that commands reached since localinfer was installed, and nothing else.")
def doctor_command(as_json: bool, network: bool) -> None:
    """Check this machine, and say what would make it faster.

    CPU, threads, memory and its speed, GPU, caches, disk, models, configuration and versions. It takes a few seconds,
    and nothing is downloaded or changed.
    """
    if network:
        from localinfer.apps.doctor.network import network_facts, network_lines

        found = network_facts()
        for line in [json.dumps(found, indent=2)] if as_json else network_lines(found):
            click.echo(line)
        return
    from localinfer.apps.doctor.advice import advise
    from localinfer.apps.doctor.checks import CHECKS, run_checks
    from localinfer.apps.doctor.report import report_lines

    with Progress() as shown:
        facts = run_checks(CHECKS, lambda name: shown(f"checking {name}", 0, 0))
    advice = advise(facts)
    if as_json:
        found = {**facts, "advice": [{"text": one.text, "factor": one.factor or None} for one in advice]}
        click.echo(json.dumps(found, indent=2))
        return
    width = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else None
    for line in report_lines(facts, advice, styles=has_colour(sys.stdout), width=width):
        click.echo(line)
