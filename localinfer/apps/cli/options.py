"""Options that several commands share: loading a model, sampling, constraining the output, and --no-config."""

import functools
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.help import Command, Decorator, GroupedOption, titled
from localinfer.engine.sampling.params import NUMBER_OPTIONS, NumberOption
from localinfer.errors import BackendUnavailableError, LocalinferError, RequestError
from localinfer.generation.options import Constraint, Grammar, JsonObject, JsonSchema, Regex
from localinfer.loading import load_options as loading
from localinfer.loading.load_options import Flag, flags_of, option_of, options_of
from localinfer.terminal import Progress, check_text

if TYPE_CHECKING:
    from localinfer.apps.config import Config
    from localinfer.llm import LLM
    from localinfer.models.decoder.rope_options import RopeOptions
    from localinfer.models.load.model_changes import ModelChanges
    from localinfer.types import ProgressCallback

LoadOptions = dict[str, Any]
"""Keyword arguments of `localinfer.load`, and `ignore_model_sampling` and `template_variables`."""

COUNT = click.IntRange(min=1)
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_LARGEST_SHOWN_BOUND = 1000


def option(names: str, metavar: str | None, help: str, **more: Any) -> Decorator:
    """An option by its names, separated by spaces; help shows its default, if any."""
    more["show_default"] = "default" in more
    return click.option(*names.split(), cls=GroupedOption, metavar=metavar, help=help, **more)


def flag(names: str, help: str) -> Decorator:
    """An option without a value."""
    return click.option(*names.split(), cls=GroupedOption, is_flag=True, help=help)


def options_group(*decorators: Decorator, title: str = "", common: str = "") -> Decorator:
    """Several options as one decorator, listed by help in this order; title, common: see `titled`."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return titled(title, decorate, common) if title else decorate


def options_group_of(made: type[Any], name: str, *decorators: Decorator) -> Decorator:
    """An `options_group` that a command is given as one argument of this name: a dataclass with a field for each."""
    fields = tuple(made.__dataclass_fields__)

    def gather(command: Command) -> Command:
        @functools.wraps(command)
        def call(**values: Any) -> Any:
            return command(**{name: made(**{field: values.pop(field) for field in fields})}, **values)

        return call

    return options_group(*decorators, gather)


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


def _gather_load_options(command: Command) -> Command:
    """Pass the options below as one mapping of `localinfer.load`'s arguments."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        options: LoadOptions = {name: values.pop(name) for name in ("model", *_NOT_OF_LOAD)}
        for name, flags in _FLAGS.items():
            given = {flag.parameter: values.pop(flag.parameter) for flag in flags}
            combine = _COMBINED.get(name)
            (value,) = (combine(given),) if combine is not None else given.values()
            options[name] = not value if flags[0].kind == "off" else value
        return command(options=options, **values)

    return call


def _cpu_moe(given: dict[str, Any]) -> bool | int | None:
    all_experts, num_layers = given.values()
    if all_experts and num_layers is not None:
        raise click.UsageError("Give --cpu-moe for the experts of all layers, or --n-cpu-moe; leave one out.")
    return True if all_experts else num_layers


def _disk_cache(given: dict[str, Any]) -> bool | int:
    is_off, size = given.values()
    return False if is_off else size or True


def _rope(given: dict[str, Any]) -> "RopeOptions":
    from localinfer.models.decoder.rope_options import RopeOptions

    return RopeOptions(**{name.removeprefix("rope_"): value for name, value in given.items()})


def _checked(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that reads a value by the library, whose errors name the option then."""

    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return read(value)
        except (RequestError, BackendUnavailableError) as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _overrides(values: tuple[str, ...]) -> dict[str, bool | int | float | str]:
    from localinfer.models.load.model_changes import parse_override

    return dict(parse_override(value) for value in values)


def _template_variables(values: tuple[str, ...]) -> dict[str, Any]:
    from localinfer.generation.chat.reply import check_template_variables

    variables: dict[str, Any] = {}
    for value in values:
        variables |= _variables_of(value)
    check_template_variables(variables)
    return variables


def _variables_of(text: str) -> dict[str, Any]:
    """Variables as a JSON object, or one as NAME=VALUE, which is JSON where it can be and text otherwise."""
    if text.lstrip().startswith("{"):
        try:
            found: dict[str, Any] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{text!r:.80} is not a JSON object: {error}") from None
        return found
    name, equals, value = check_text(text, "a variable of the chat template").partition("=")
    if not equals or not name:
        raise RequestError(f"{text!r:.80} is no variable; give NAME=VALUE, or a JSON object of names and values")
    try:
        return {name: json.loads(value)}
    except (ValueError, RecursionError):
        return {name: value}


def _layer_count(context: click.Context, parameter: click.Parameter, value: str) -> int | None:
    if value == "auto":
        return None
    if not value.isascii() or not value.isdecimal():
        raise click.BadParameter(f"{value!r} is not a number of layers; give one, or 'auto'.")
    return int(value)


def _device(value: str) -> str:
    from localinfer.models.load.device_request import named_gpus

    named_gpus(value)
    return value


def _tensor_split(context: click.Context, parameter: click.Parameter, value: str | None) -> list[float] | None:
    """Shares separated by commas or slashes, as llama.cpp takes them."""
    if value is None:
        return None
    try:
        shares = [float(part) for part in value.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not any(shares) or not all(math.isfinite(share) and share >= 0 for share in shares):
        raise click.BadParameter(f"{value!r} are no shares; give one number for each GPU, such as 3,1.")
    return shares


def _kv_type(value: str) -> str:
    from localinfer.kernels.kv_layout import parse_kv_type

    parse_kv_type(value)
    return value


_NOT_OF_LOAD = ("ignore_model_sampling", "template_variables")
"""Members of `LoadOptions` that are no arguments of `load`."""
_COMBINED: dict[str, Callable[[dict[str, Any]], Any]] = {"cpu_moe": _cpu_moe, "disk_cache": _disk_cache, "rope": _rope}
"""Arguments of `load` that several options give, or parts of one that they give."""
_FLAGS = {name: option_of(one).flags for name, one in options_of(loading.LoadOptions).items() if option_of(one).flags}
"""The options of the commands by the argument of `load`."""
LOAD_ARGUMENTS = {flag.parameter: name for name, flags in _FLAGS.items() for flag in flags}
"""The argument of `load` that each parameter of the commands gives."""
_DEVICES = click.Choice(["auto", "cpu", "cuda"])


def found_model(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A click callback: the path of the model that a user names."""
    from localinfer.storage.hub.installed import find_model

    return None if value is None else str(find_model(value))


_MODEL_HELP = "Name (see `localinfer list --all`), GGUF file or Hugging Face folder. Default: the demo model."
model_option = option("-m --model", "MODEL", _MODEL_HELP)


def model_argument(name: str) -> Decorator:
    """An argument that takes what -m takes, as the path that is meant."""
    return click.argument(name, metavar=name.upper(), callback=found_model)


def device_option(help: str) -> Decorator:
    return option("--device", None, help, type=_DEVICES, default="auto")


_KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "switch": {"is_flag": True},
    "off": {"is_flag": True},
    "count": {"type": COUNT},
    "number": {"type": click.IntRange(min=0)},
    "size": {"callback": byte_size},
    "path": {"type": click.Path(path_type=Path)},
    "layers": {"callback": _layer_count},
    "shares": {"callback": _tensor_split},
    "kv type": {"callback": _checked(_kv_type)},
    "overrides": {"callback": _checked(_overrides), "multiple": True},
    "devices": {
        "callback": _checked(_device),
        "shell_complete": lambda context, parameter, begun: [one for one in _DEVICES.choices if one.startswith(begun)],
    },
}
"""Types and callbacks of options by `Flag.kind`."""


def _load_option(flag: Flag) -> Decorator:
    if isinstance(flag.kind, str):
        more = dict(_KINDS[flag.kind])
    else:
        more = {"type": click.Choice(flag.kind) if isinstance(flag.kind, tuple) else flag.kind}
    if flag.default is not None:
        more["default"] = flag.default
    return option(flag.names, flag.metavar, flag.help, **more)


_LOAD_FLAGS = {flag.parameter: _load_option(flag) for _, flag in flags_of(loading.LoadOptions)}
threads_option, devices_option = _LOAD_FLAGS["threads"], _LOAD_FLAGS["device"]
_TEMPLATE_VARIABLES = option(
    "--chat-template-kwargs template_variables",
    "NAME=VALUE",
    "A variable of the chat template, or several as JSON; may be repeated. template_date=today, or a day such as "
    "2026-10-01, sets the date that the template writes.",
    multiple=True,
    callback=_checked(_template_variables),
)

load_options = options_group(
    model_option,
    *(
        decorator
        for name, made in _LOAD_FLAGS.items()
        for decorator in ([made, _TEMPLATE_VARIABLES] if name == "chat_template" else [made])
    ),
    flag("--ignore-model-sampling", "Ignore the sampling options that the model's file recommends."),
    _gather_load_options,
    title="Model, machine and memory",
    common="model device threads context_length draft no_disk_cache",
)


def changes_of(options: LoadOptions) -> "ModelChanges":
    """The overrides of a model's metadata. Raises: RequestError."""
    from localinfer.loading.options import model_changes

    return model_changes(**{name: options[name] for name in ("chat_template", "rope", "overrides")})


def load_with(
    options: LoadOptions, *, stopping: threading.Event | None = None, report: "ProgressCallback | None" = None
) -> "LLM":
    """Load a model, with a progress line on the terminal; it samples as its file recommends, unless that is ignored.

    stopping: ends the load once it is set. report: called with its progress too.
    Raises: LocalinferError; LoadCancelledError if it was ended.
    """
    import localinfer
    from localinfer.storage.hub.installed import find_model

    options = dict(options)
    ignores_sampling = options.pop("ignore_model_sampling", False)
    variables = options.pop("template_variables", {})
    named = {name: str(find_model(options[name])) for name in ("model", "draft") if options.get(name) is not None}
    with Progress() as progress:

        def tell(stage: str, done: int, total: int) -> None:
            progress(stage, done, total)
            if report is not None:
                report(stage, done, total)

        llm = localinfer.load(**{**options, **named}, progress=tell, cancel=stopping)
    defaults: dict[str, Any] = {} if ignores_sampling else llm.recommended_sampling
    if variables:
        defaults = {**defaults, "template_variables": variables}
    if defaults:
        llm.set_defaults(**defaults)
    return llm


def _token_biases(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float] | None:
    biases: dict[int, float] = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not ID=NUMBER, such as 42=-5 or 42=-inf.") from None
    return biases or None


def _drop_unset(command: Command) -> Command:
    """Pass options only if they are given, so that those of the model's file and the library's hold."""

    @functools.wraps(command)
    def call(*, dry_sequence_breakers: tuple[str, ...], **values: Any) -> Any:
        for text in dry_sequence_breakers:
            check_text(text, "--dry-sequence-breaker")
        if dry_sequence_breakers:
            values["dry_sequence_breakers"] = list(dry_sequence_breakers)
        for name in (*NUMBER_OPTIONS, "logit_bias"):
            if values[name] is None:
                del values[name]
        return command(**values)

    return call


def _number_flag(name: str, number: NumberOption) -> Decorator:
    """The flag of a numeric option. Large bounds are checked by the library only, and not shown."""
    least, most = (bound if abs(bound) <= _LARGEST_SHOWN_BOUND else None for bound in (number.least, number.most))
    kind: click.ParamType[Any] = click.FLOAT
    if number.kind is int:
        kind = click.IntRange(None if least is None else int(least), None if most is None else int(most))
    elif least is not None:
        kind = click.FloatRange(math.floor(least), most, min_open=not float(least).is_integer())
    shown = f"{number.default:g}"
    text = number.help.format(default=shown)
    default = f" Default: the model's, or {shown}." if number.is_common else ""
    other = _OTHER_FLAGS.get(name) or number.alias
    flags = " ".join(f"--{one.replace('_', '-')}" for one in (name, other) if one is not None)
    return option(f"{flags} {name}", number.metavar, f"{text}{default}", type=kind)


_OTHER_FLAGS = {"temperature": "temp"}
"""Further names of options, beside those that requests may use too."""
_IN_HELP = sorted(NUMBER_OPTIONS.items(), key=lambda named: not named[1].is_common)
SAMPLING_NAMES = (*NUMBER_OPTIONS, "dry_sequence_breakers", "logit_bias", "seed")
"""Options that `sampling_options` pass on, where they are given."""

sampling_options = options_group(
    *(_number_flag(name, number) for name, number in _IN_HELP),
    option(
        "--dry-sequence-breaker dry_sequence_breakers",
        "TEXT",
        'A repetition ends at TEXT for DRY; may be repeated. Default: : * " and newline.',
        multiple=True,
    ),
    option("--logit-bias", "ID=B", "Add B to a token's logit; may be repeated.", multiple=True, callback=_token_biases),
    option("--seed", "S", "The same seed gives the same text. Default: random.", type=click.IntRange(min=0)),
    _drop_unset,
    title="Sampling",
    common="temperature top_k top_p min_p seed",
)


def _text_of(context: click.Context, parameter: click.Parameter, value: Path | None) -> str | None:
    if value is None:
        return None
    try:
        return value.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{value} cannot be read as text: {error}") from None


_CONSTRAINTS: dict[str, Callable[[Any], Constraint]] = {
    "json_object": lambda _: JsonObject(),
    "json_schema": JsonSchema,
    "grammar": Grammar,
    "regex": Regex,
}


def _make_constraint(command: Command) -> Command:
    """Pass the options below as one argument, `constraint`."""

    @functools.wraps(command)
    def call(**values: Any) -> Any:
        given = {name: value for name in _CONSTRAINTS if (value := values.pop(name)) is not None and value is not False}
        if len(given) > 1:
            raise click.UsageError("Only one of --json, --json-schema, --grammar and --regex can be given.")
        constraint = next((_CONSTRAINTS[name](value) for name, value in given.items()), None)
        return command(constraint=constraint, **values)

    return call


_FILE = click.Path(dir_okay=False, path_type=Path)
constraint_options = options_group(
    flag("--json json_object", "Constrain the text to one JSON object."),
    option(
        "--json-schema", "FILE", "Constrain the text to JSON that matches this schema.", type=_FILE, callback=_text_of
    ),
    option("--grammar", "FILE", "Constrain the text to this Lark or GBNF grammar.", type=_FILE, callback=_text_of),
    option("--regex", "PATTERN", "Constrain the text to a full match of this regular expression."),
    _make_constraint,
    title="Constraints of the output",
    common="json_schema",
)


_KEY = "localinfer.apps.config"
"""Of the configuration that gives the running command its model, in click's context."""


def takes_config(*names: str) -> Decorator:
    """Let the configuration file give defaults of a command's options; of these parameters only, if any are named.

    Options of the command line win. The file is read before the other options, and not for --help.
    """

    def decorate(command: Command) -> Command:
        def read(context: click.Context, parameter: click.Parameter, is_ignored: bool) -> None:
            if not is_ignored and not context.resilient_parsing:
                _apply(context, names)

        return click.option(
            "--no-config",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=read,
            help="Ignore the configuration file.",
        )(command)

    return decorate


def is_from_config(name: str) -> bool:
    """True if the running command has a parameter's value from the configuration file."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP


def _apply(context: click.Context, names: tuple[str, ...]) -> None:
    from localinfer.apps.config import read_config

    try:
        config = read_config()
    except RequestError as error:
        # The names in it are those of the file's keys, not of options.
        raise click.ClickException(str(error)) from None
    taken = names or {parameter.name for parameter in context.command.params}
    context.default_map = {name: value for name, value in config.defaults().items() if name in taken}
    if "model" in context.default_map:
        context.meta[_KEY] = config


@contextmanager
def config_model_named(context: click.Context) -> Iterator[None]:
    """Add to an error about the model that the configuration file named it; the user did not type it."""
    try:
        yield
    except (LocalinferError, click.ClickException) as error:
        config: Config | None = context.meta.get(_KEY)
        if config is not None and config.model is not None and Path(config.model).name in str(error):
            error.add_note(f"the model is set in {config.path}, and -m FILE or --no-config takes another")
        raise


def prepare_in_background(llm: "LLM") -> "LLM":
    """Return the model at once, which serves while a thread prepares its constraints: 0.5 s at 128,000 tokens."""

    def prepare() -> None:
        # A model that cannot be constrained, or lacks files or memory, raises when a constraint is asked for.
        with suppress(Exception):
            llm.prepare_constraints()

    threading.Thread(target=prepare, name="localinfer-prepare-constraints").start()
    return llm
