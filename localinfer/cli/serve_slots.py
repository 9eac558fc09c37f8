"""The options of `localinfer serve` for slots and for routes that can be switched off, as llama-server has them."""

import functools
from pathlib import Path
from typing import Any

from localinfer.cli.options import COUNT, Command, flag, option, options_group
from localinfer.errors import RequestError
from localinfer.system.folders import expand_home

_SHOWN = ("slots", "metrics")


def slot_options(command: Command) -> Command:
    """Add the options, and pass them on as fields of `ServerSettings`, `--parallel` to the loading of models too."""

    @functools.wraps(command)
    def call(*, parallel: int, slot_save_path: str | None, **values: Any) -> Any:
        from localinfer.engine.scheduler import EngineLimits

        folder = None if slot_save_path is None else _folder(slot_save_path)
        values["options"]["limits"] = EngineLimits(max_running=parallel)
        shown = {f"shows_{name}": not values.pop(f"no_{name}") for name in _SHOWN}
        return command(num_slots=parallel, slot_folder=folder, **shown, **values)

    return options_group(
        option("--parallel", "N", "Generations that share a step, and slots; others wait.", type=COUNT, default=16),
        option("--slot-save-path", "FOLDER", "Let clients save what is in a slot to files in this folder."),
        flag("--no-slots", "Do not show on /slots what is generated."),
        flag("--no-metrics", "Do not show /metrics."),
    )(call)


def _folder(name: str) -> Path:
    path = expand_home(name)
    if not path.is_dir():
        raise RequestError(f"{path} is not a folder; name one for --slot-save-path, or make it")
    return path
