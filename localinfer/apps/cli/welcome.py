"""The text of `localinfer` alone: models, settings and memory here, and commands to type next."""

import os
import shlex
import shutil

from localinfer.apps.cli.models import known_models
from localinfer.errors import RequestError
from localinfer.terminal import neutralise_controls

_EXAMPLE = "Qwen/Qwen3-4B-GGUF:Q4_K_M"
_QUESTION = 'localinfer chat -p "Why is the sky blue?"'
_FEWEST_COLUMNS = 40


def welcome(version: str, *, can_pull: bool) -> str:
    """Ten lines, each as wide as the terminal at most. can_pull: whether there is a command that brings models."""
    model, settings = _configured()
    names = known_models()
    pull = f"localinfer pull {_EXAMPLE}" if can_pull else "localinfer chat -m FILE.gguf"
    if model is None:
        default = "the small demo model, which shows that everything works and knows little"
    else:
        is_missing = os.path.isabs(model) and not os.path.exists(model)
        default = f"{model}, as configured" + (", but it does not exist" if is_missing else "")
    if names:
        found = f"{len(names)} here: {', '.join(names)}"
    else:
        found = "none found yet; the command below brings one" if can_pull else "any GGUF file or Hugging Face folder"
    chosen = f"-m {shlex.quote(names[0])} " if model is None and names else ""
    last = ("localinfer serve", "an API for other programs") if model or names else (pull, "a model that knows more")
    steps = [
        (f"localinfer chat {chosen}".rstrip(), "a conversation"),
        (_QUESTION.replace("chat ", f"chat {chosen}"), "one answer"),
        last,
    ]
    width = max(len(step) for step, _ in steps)
    lines = [
        f"localinfer {version}: language models on this machine, {_machine()}",
        "",
        f"default model  {default}",
        f"models         {found}",
        f"settings       {settings}",
        "",
        "Type next (`localinfer --help` lists all commands):",
        *(f"  {step:<{width}}  {what}" for step, what in steps),
    ]
    columns = max(shutil.get_terminal_size((100, 24)).columns, _FEWEST_COLUMNS)
    return "\n".join(_cut(neutralise_controls(line), columns) for line in lines)


def _configured() -> tuple[str | None, str]:
    """The default model of the configuration file, and a description of that file."""
    from localinfer.storage.config import config_path, read_config

    path = config_path()
    if path is None:
        return None, "none, as this user has no home folder"
    try:
        config = read_config(path)
    except RequestError as error:
        return None, str(error)
    if config.path is None:
        return None, f"none; {path} may give defaults"
    names = ", ".join(config.defaults()) or "nothing yet"
    return config.model, f"{names} from {path}"


def _machine() -> str:
    import psutil

    free = psutil.virtual_memory().available / 1e9
    return f"{os.cpu_count() or 1} processors, {free:.1f} GB of memory free"


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 3]}..."
