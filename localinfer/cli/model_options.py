"""Options of every command that loads a model, and the loading itself."""

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from localinfer.errors import ClosedError, RequestError
from localinfer.terminal import Progress

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.models.decoder.rope import RopeOptions
    from localinfer.models.load.model_changes import ModelChanges

Command = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model to load and how; None leaves the choice to the library."""

    path: str | None
    device: str
    gpu_layers: int | None
    threads: int | None
    context_length: int | None
    kv_type: str
    kv_memory: int | None
    kv_window: int | None
    disk_cache: bool | int
    disk_cache_folder: str | None
    speculation: str
    draft: str | None
    chat_template: str | None
    rope: "RopeOptions"
    overrides: Mapping[str, bool | int | float | str]


_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def byte_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Read a number of bytes, plain or with a unit: 8GB is 8 times 10^9 bytes, 8GiB 8 times 2^30."""
    if value is None:
        return None
    text = value.strip().upper()
    number = text.rstrip("BKMGI").strip()
    try:
        size = int(float(number) * _SIZE_UNITS[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise click.BadParameter(f"{value!r} is not a size; give bytes, or a number and a unit, such as 2GB.")
    return size


def options_group(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator; help lists them in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def _gather_model_options(command: Command) -> Command:
    """Hand the options below on as one record."""

    @functools.wraps(command)
    def call(*, model: str | None, no_disk_cache: bool, disk_cache_size: int | None, **values: Any) -> Any:
        names = ["device", "gpu_layers", "threads", "context_length", "kv_type", "kv_memory", "kv_window"]
        names += ["disk_cache_folder", "speculation", "draft", "chat_template"]
        disk_cache = False if no_disk_cache else disk_cache_size or True
        loading = {name: values.pop(name) for name in names}
        loading |= {"rope": _rope(values), "overrides": dict(values.pop("overrides"))}
        return command(options=ModelOptions(path=model, disk_cache=disk_cache, **loading), **values)

    return call


def _rope(values: dict[str, Any]) -> "RopeOptions":
    """Take the options that say how positions rotate out of all of them."""
    from localinfer.models.decoder.rope import RopeOptions

    names = {"scaling": "rope_scaling", "scale": "rope_scale", "base": "rope_base"}
    names |= {"frequency_scale": "rope_frequency_scale"}
    for name in ("original_context", "extrapolation_factor", "attention_factor", "beta_fast", "beta_slow"):
        names[f"yarn_{name}"] = f"yarn_{name}"
    return RopeOptions(**{name: values.pop(option) for name, option in names.items()})


def _overrides(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> list[tuple[str, bool | int | float | str]]:
    from localinfer.models.load.model_changes import parse_override

    try:
        return [parse_override(value) for value in values]
    except RequestError as error:
        raise click.BadParameter(str(error)) from None


def _gpu_layers(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    if value == "auto":
        return None
    if not value.isascii() or not value.isdecimal():
        raise click.BadParameter(f"{value!r} is no number of layers; give one, or 'auto'.")
    return int(value)


def _kv_type(context: click.Context, parameter: click.Parameter, value: str) -> str:
    from localinfer.kernels.kv_layout import parse_kv_type

    try:
        parse_kv_type(value)
    except RequestError as error:
        raise click.BadParameter(str(error)) from None
    return value


model_option = click.option(
    "-m", "--model", metavar="PATH", help="GGUF file or Hugging Face folder. Default: the demo model."
)

load_options = options_group(
    model_option,
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="Where to compute: auto takes a GPU where there is one.",
    ),
    click.option(
        "--gpu-layers",
        callback=_gpu_layers,
        metavar="N|auto",
        default="auto",
        show_default=True,
        help="Layers that run on the GPU, the others on the CPU: auto takes as many as fit.",
    ),
    click.option(
        "--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads. Default: one per physical core."
    ),
    click.option(
        "-c",
        "--context-length",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tokens of prompt and reply. Default: what the model was trained for; more may need --rope-scaling.",
    ),
    click.option(
        "--kv-type",
        callback=_kv_type,
        metavar="TYPE",
        default="f16",
        show_default=True,
        help="KV cache element type: f32, f16, q8_0, q4_0, or one each for keys and values, such as q8_0/q4_0.",
    ),
    click.option(
        "--kv-memory",
        callback=byte_size,
        metavar="SIZE",
        help="Most memory for the KV cache, such as 2GB. Default: ample.",
    ),
    click.option(
        "--kv-window",
        type=click.IntRange(min=1),
        metavar="N",
        help="Keep keys and values of about N tokens only: less memory, other words. Default: all, exactly.",
    ),
    click.option("--no-disk-cache", is_flag=True, help="Do not keep conversations on disk to go on with them faster."),
    click.option(
        "--disk-cache-size",
        callback=byte_size,
        metavar="SIZE",
        help="Most that all conversations take on disk. Default: 4GiB.",
    ),
    click.option("--disk-cache-folder", metavar="FOLDER", help="Where they are kept. Default: your cache folder."),
    click.option(
        "--speculation",
        type=click.Choice(["auto", "ngram", "draft", "off"]),
        default="auto",
        show_default=True,
        help="Guess tokens and check many at once: faster, same text.",
    ),
    click.option("--draft", metavar="FILE", help="A small GGUF model of the same vocabulary that guesses."),
    click.option("--chat-template", metavar="FILE", help="Jinja template in place of the model's own."),
    click.option(
        "--rope-scaling",
        type=click.Choice(["none", "linear", "yarn"]),
        help="How positions stretch over a longer context. Default: the model's own.",
    ),
    click.option(
        "--rope-scale", type=float, metavar="X", help="Stretch them over X times the context it was made for."
    ),
    click.option("--rope-base", type=float, metavar="X", help="Base of the rotary frequencies (theta)."),
    click.option("--rope-frequency-scale", type=float, metavar="X", help="Another way to say --rope-scale 1/X."),
    click.option("--yarn-original-context", type=int, metavar="N", help="Context the model was first trained for."),
    click.option("--yarn-extrapolation-factor", type=float, metavar="X", help="How far fast pairs keep their pace."),
    click.option("--yarn-attention-factor", type=float, metavar="X", help="Multiplies YaRN's own temperature."),
    click.option("--yarn-beta-fast", type=float, metavar="X", help="StepLock from which a pair counts as fast."),
    click.option("--yarn-beta-slow", type=float, metavar="X", help="StepLock below which a pair counts as slow."),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        callback=_overrides,
        metavar="KEY=VALUE",
        help="Metadata in place of the file's; VALUE may begin with int:, float:, bool: or str:. May be repeated.",
    ),
    _gather_model_options,
)


def changes_of(options: ModelOptions) -> "ModelChanges":
    """What is set in place of what a model's file says. Raises: RequestError."""
    from pathlib import Path

    from localinfer.loading import model_changes

    template = None if options.chat_template is None else Path(options.chat_template)
    return model_changes(chat_template=template, rope=options.rope, overrides=options.overrides)


def load_with(options: ModelOptions, *, stopping: threading.Event | None = None) -> "LLM":
    """Load a model, with a line on the terminal while that is slow.

    stopping: gives the load up, at its next stage, once it is set. Raises: LocalinferError; ClosedError if given up.
    """
    from pathlib import Path

    import localinfer

    with Progress() as shown:

        def progress(stage: str, done: int, total: int) -> None:
            if stopping is not None and stopping.is_set():
                raise ClosedError("the model is not wanted any more; load it again")
            shown(stage, done, total)

        return localinfer.load(
            options.path,
            device=options.device,
            gpu_layers=options.gpu_layers,
            threads=options.threads,
            context_length=options.context_length,
            kv_type=options.kv_type,
            kv_memory=options.kv_memory,
            kv_window=options.kv_window,
            disk_cache=options.disk_cache,
            disk_cache_folder=options.disk_cache_folder,
            speculation=None if options.speculation == "off" else options.speculation,
            draft=options.draft,
            chat_template=None if options.chat_template is None else Path(options.chat_template),
            rope=options.rope,
            overrides=options.overrides,
            progress=progress,
        )
