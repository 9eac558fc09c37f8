"""Options of `localinfer serve` that llama-server has too: slots, routes that are switched off, context shift."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from localinfer.apps.cli.grouped_help import Command
from localinfer.apps.cli.options import COUNT, flag, option, options_group
from localinfer.apps.cli.serve_defaults import ServerDefaults
from localinfer.errors import RequestError
from localinfer.system.folders import expand_home

_SHOWN = ("slots", "metrics")


def llama_server_options(command: Command) -> Command:
    """Add the options, and pass them on as fields of `ServerSettings`.

    `--parallel` goes to the loading of models too, and `--context-shift` to the defaults of generations: the command
    has `load_options` and `default_options`, which stand above.
    """

    @functools.wraps(command)
    def call(
        *, parallel: int, slot_save_path: str | None, context_shift: bool, defaults: ServerDefaults, **values: Any
    ) -> Any:
        from localinfer.engine.admission import EngineLimits

        folder = None if slot_save_path is None else _folder(slot_save_path)
        values["options"]["limits"] = EngineLimits(max_running=parallel)
        shown = {f"shows_{name}": not values.pop(f"no_{name}") for name in _SHOWN}
        if context_shift:
            defaults = replace(defaults, options={**defaults.options, "context_shift": True})
        return command(num_slots=parallel, slot_folder=folder, defaults=defaults, **shown, **values)

    return options_group(
        option("--parallel", "N", "Generations that share a step, and slots; others wait.", type=COUNT, default=16),
        option("--slot-save-path", "FOLDER", "Let clients save what is in a slot to files in this folder."),
        option(
            "--pooling",
            None,
            "How vectors of tokens become one, on every route. Default: as models say.",
            type=click.Choice(["mean", "first", "cls", "last", "none"]),
        ),
        flag("--context-shift", "At the end of the context, go on without the older half of a text."),
        flag("--no-slots", "Do not show on /slots what is generated."),
        flag("--no-metrics", "Do not show /metrics."),
    )(call)


def _folder(name: str) -> Path:
    path = expand_home(name)
    if not path.is_dir():
        raise RequestError(f"{path} is not a folder; name one for --slot-save-path, or make it")
    return path
