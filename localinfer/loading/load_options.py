"""Options of `localinfer.load`: each declared once, with its type, default, range, documentation and flag.

`load`, `aload` and `availability`, the commands, config.toml, --models-config and the fleet read them from here: a new
option is a field here, and its effect. Importing this imports next to nothing; see `imports.py`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import Field, field, fields
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from localinfer.arguments import check_flag, check_number
from localinfer.types import Record

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Mapping, Sequence

    from localinfer.engine.admission import EngineLimits
    from localinfer.models.decoder.rope_options import RopeOptions
    from localinfer.storage.kv_events import KVEventPublisher, KVEventsConfig
    from localinfer.types import ProgressCallback

P = ParamSpec("P")
T = TypeVar("T")

SPECULATION = ("auto", "ngram", "draft", "mtp", "off")
_OPTION = "option"
"""Key of an `Option` in a field's metadata."""


class Flag(Record):
    """An option of the commands that sets an option of `load`, or a part of it."""

    names: str
    """As typed, separated by spaces, with the name of the parameter where it is another."""
    metavar: str | None
    """The value as help shows it."""
    help: str
    kind: str | type | tuple[str, ...] = "text"
    """Parser of the value: one of the kinds of `localinfer.apps.cli.options`, a type, or the words to choose from."""
    default: Any = None
    """As typed, where help shows it."""
    after: str | None = None
    """The option of `load` that help lists it behind, if not in the order of fields."""
    in_config: bool = False
    """True if config.toml sets it too, by the field's name."""

    @property
    def parameter(self) -> str:
        """The name of the command's parameter."""
        last = self.names.split()[-1]
        return last.lstrip("-").replace("-", "_")


class Option(Record):
    """The description of an option of `load`."""

    help: str
    """For programs."""
    flags: tuple[Flag, ...] = ()
    none: str | None = None
    """Of a number of 1 or more: the meaning of None, as errors say it."""
    after: str | None = None
    """The option that signatures list it behind, if not in the order of fields."""


def _option(default: Any, help: str, *flags: Flag, none: str | None = None, after: str | None = None) -> Any:
    return field(default=default, metadata={_OPTION: Option(help, flags, none, after)})


class HeaderOptions(Record, kw_only=True):
    """Options that decide, with the header of a model's file, whether and how it can be loaded."""

    model: str | os.PathLike[str] | None = field(
        default=None,
        kw_only=False,
        metadata={
            _OPTION: Option(
                "Path of a GGUF file (of a split model: any of its parts) or of a Hugging Face folder; None: "
                "the bundled demo model."
            )
        },
    )
    device: str = _option(
        "auto",
        '"cpu", "cuda", GPUs by number such as "cuda:1" or "cuda:0,cuda:1", or "auto" for GPUs if there is one '
        "that holds at least one layer of the model. Several GPUs share the layers in the order in which they "
        "are named; if none are named, the fewest that hold the whole model are taken.",
        Flag(
            "--device",
            "DEVICE",
            "Where to compute: auto (GPUs, if there are any), cpu, cuda, or GPUs by number, such as cuda:0,cuda:1.",
            "devices",
            default="auto",
            in_config=True,
        ),
    )
    gpu_layers: int | str | None = _option(
        None,
        "How many of the model's last layers run on GPUs, the others on the CPU; more than it has means all. "
        'None or "auto": as many as fit, with a KV cache of context_length tokens (8,192 if that is None).',
        Flag(
            "--gpu-layers",
            "N|auto",
            "Layers to run on GPUs, the others on the CPU; auto: as many as fit.",
            "layers",
            default="auto",
        ),
    )
    tensor_split: Sequence[float] | None = _option(
        None,
        "Each GPU's share of those layers, such as [3, 1]. None: shares that fill their free memory alike.",
        Flag(
            "--tensor-split",
            "N,N",
            "Shares of several GPUs in the layers, such as 3,1 (split mode layer). Default: by free memory.",
            "shares",
        ),
    )
    cpu_moe: bool | int | None = _option(
        None,
        "Of a mixture of experts, keep the routed experts on the CPU and all else on GPUs: True for every "
        "layer, or of how many of the first layers. None: of as few as needed, where that lets more of the "
        "model run on GPUs.",
        Flag(
            "--cpu-moe",
            None,
            "Keep the experts of MoE layers on the CPU. Default: if a token then reads less main memory.",
            "switch",
        ),
        Flag("--n-cpu-moe", "N", "Keep the experts of the first N layers on the CPU.", "number"),
    )
    threads: int | None = _option(
        None,
        "CPU threads, fewer while other programs are busy; None: the physical cores.",
        Flag(
            "--threads",
            "N",
            "Maximum CPU threads; fewer compute while other programs are busy. Default: one per physical core.",
            "count",
            in_config=True,
        ),
        none="for the default",
    )
    context_length: int | None = _option(
        None,
        "Tokens of prompt and completion together; None: as trained, or, with a warning, what fits into half "
        "of the memory that is free beside the weights. More than trained is allowed, with a warning; `rope` "
        "scales the positions. What cannot fit is refused before the weights are read.",
        Flag(
            "-c --context-length",
            "N",
            "Maximum tokens of prompt and reply together. Default: as trained; more may need --rope-scaling.",
            "count",
            in_config=True,
        ),
        none="for the default",
    )
    kv_type: str = _option(
        "f16",
        'KV cache element type: "f16", "f32", "q8_0" or "q4_0", or one for each such as "q8_0/q4_0".',
        Flag(
            "--kv-type",
            "TYPE",
            "KV cache element type: f32, f16, q8_0, q4_0, or one each for keys and values, such as q8_0/q4_0.",
            "kv type",
            default="f16",
            in_config=True,
        ),
    )
    kv_memory: int | None = _option(
        None,
        "Maximum bytes of the KV cache, cached prefixes included; None: half of the free memory, or one full "
        "context if that takes more, but at most 8 GiB or one full context, whichever is more. It is allocated "
        "on demand.",
        Flag(
            "--kv-memory",
            "SIZE",
            "Maximum memory of the KV cache, such as 2GB; the least recently used prompts are evicted. "
            "Default: half of the free memory, at most 8 GiB, or one full context if that is more.",
            "size",
        ),
        none="for the default",
    )
    kv_window: int | None = _option(
        None,
        "Evict keys and values so that each sequence keeps at most this many tokens between batches: the "
        "first, the recent half, and those with the highest attention scores. It bounds memory, not the "
        "context. An approximation: beyond that many tokens texts differ from those without it, and from one "
        "run to the next, since what is evicted depends on how prompts were cut into batches and on what was "
        "cached; and they are not cached. None: keep all.",
        Flag(
            "--kv-window",
            "N",
            "Evict keys and values beyond about N tokens: less memory, approximate. Default: keep all.",
            "count",
        ),
        none="for the default",
    )
    speculation: str | None = _option(
        "auto",
        'Speculative decoding: "ngram" drafts from earlier text, "draft" with a draft model, "mtp" with the '
        'layers for next-token prediction that some models bring along (on the CPU), "auto" with all '
        'available, a draft model before such layers, "off" or None with none. It changes speed only, never '
        "the text.",
        Flag(
            "--speculation",
            None,
            "Speculative decoding: faster, same text. mtp: by the model's own draft layers (MTP).",
            SPECULATION,
            default="auto",
        ),
    )
    draft: str | os.PathLike[str] | None = _option(
        None,
        "Path of a draft model: a much smaller GGUF model of the same vocabulary, or one made to draft from "
        "the model's own cache (Gemma 4's, on the CPU).",
        Flag(
            "--draft",
            "MODEL",
            "Draft model: a small GGUF model of the same vocabulary, or one made for the model.",
        ),
    )
    mmproj: str | os.PathLike[str] = _option(
        "auto",
        'Path of the GGUF file with the encoders of a model that sees or hears (mmproj); "auto": the one beside the '
        'model\'s file, if one belongs to it; "off": none, the model reads text.',
        Flag(
            "--mmproj",
            "FILE|auto|off",
            "File with the encoders of a model that sees or hears; auto: the one beside the model's.",
            default="auto",
        ),
    )
    chat_template: str | os.PathLike[str] | None = _option(
        None,
        "Jinja source in place of the model's own template, or the path of a file.",
        Flag("--chat-template", "FILE", "Jinja template in place of the model's own.", "path"),
    )
    rope: RopeOptions | None = _option(
        None,
        "A `localinfer.RopeOptions` in place of the file's rotary position embedding.",
        Flag(
            "--rope-scaling",
            None,
            "Scaling of positions for a longer context. Default: the model's own.",
            ("none", "linear", "yarn"),
        ),
        Flag("--rope-scale", "X", "Scale to X times the context the model was trained for.", float),
        Flag("--rope-base", "X", "Base of the rotary frequencies (theta).", float),
        Flag("--rope-frequency-scale", "X", "Same as --rope-scale 1/X.", float),
        Flag("--yarn-original-context", "N", "Context length of the original training.", int),
        Flag("--yarn-extrapolation-factor", "X", "Share of the unscaled frequency of fast dimensions.", float),
        Flag("--yarn-attention-factor", "X", "Multiplies YaRN's attention temperature.", float),
        Flag("--yarn-beta-fast", "X", "Rotations from which a dimension counts as fast.", float),
        Flag("--yarn-beta-slow", "X", "Rotations below which a dimension counts as slow.", float),
    )
    overrides: Mapping[str, bool | int | float | str] | None = _option(
        None,
        'Metadata in place of the file\'s, by GGUF key: {"llama.rope.freq_base": 1e6}. A key that the file '
        "lacks and localinfer does not read is refused. Entries cached on disk under other settings are not "
        "used.",
        Flag(
            "--set overrides",
            "KEY=VALUE",
            "Metadata in place of the file's; VALUE may begin with int:, float:, bool: or str:. May be repeated.",
            "overrides",
        ),
    )
    memory_limit: int | None = _option(
        None,
        "Maximum bytes of main memory that the model may take: weights as packed, buffers, tokenizer, keys and "
        "values, and the same of a draft model. Checked before the weights are read; a context that is not "
        "requested is reduced to what fits, and the KV cache may take what is left, or kv_memory if that is "
        "less. Not counted: what the process holds anyway (Python and libraries, some 100 MB), texts and "
        "logprobs, memory of a GPU. None: what the machine has.",
        none="for what the machine has",
    )


class LoadOptions(HeaderOptions, kw_only=True):
    """Options of `load`."""

    disk_cache: bool | int = _option(
        False,
        "Keep a prompt cache on disk, so that conversations continue after a restart without a prefill: True, "
        "or its maximum bytes (True: 4 GiB; evicted by least recent use).",
        Flag("--no-disk-cache", None, "Keep no prompt cache on disk.", "switch"),
        Flag("--disk-cache-size", "SIZE", "Maximum size of the prompt cache on disk. Default: 4GiB.", "size"),
        after="kv_window",
    )
    disk_cache_folder: str | os.PathLike[str] | None = _option(
        None,
        "Its location, of which a private subfolder is used; None: this user's cache folder.",
        Flag("--disk-cache-folder", "FOLDER", "Location of the prompt cache on disk. Default: your cache folder."),
        after="disk_cache",
    )
    limits: EngineLimits | None = _option(
        None,
        "How many generations run concurrently, and how many may wait; None: 16, and any number.",
        after="overrides",
    )
    priority: str = _option(
        "normal",
        'Of the threads that load and compute, "normal" or "background"; see `LLM.set_priority`.',
    )
    measure_again: bool = _option(
        False,
        "Do not use what earlier loads have measured of this machine: the number of threads that decodes "
        "fastest, and what verifying drafts costs. Measurements are kept for 30 days, and none of a busy "
        "machine.",
        Flag(
            "--measure-again",
            None,
            "Measure the fastest number of threads again, which is done once a month.",
            "switch",
            after="threads",
        ),
    )
    may_measure: bool = _option(
        True,
        "Whether to measure what no earlier load has. False loads faster, and without work that other models "
        "would feel: all threads decode, and drafts are tried with care until it shows what they cost.",
    )
    verify: bool = _option(
        True,
        "Make cheap checks of the file, some milliseconds: what is likely wrong, such as a word splitting that "
        "is not the vocabulary's, is logged and in `llm.info.warnings`; weights that are not finite are "
        "refused. False makes none. `localinfer show --verify` makes them over every weight.",
        Flag(
            "--no-verify",
            None,
            "Load the file without checking it, even if its weights are not finite.",
            "off",
        ),
    )
    kv_events: str | KVEventsConfig | KVEventPublisher | None = _option(
        None,
        "Publish KV cache events for routers, as vLLM does (ZMQ: BlockStored, BlockRemoved, AllBlocksCleared), "
        'at this address, such as "tcp://127.0.0.1:5557"; or a `localinfer.KVEventsConfig`. Who can connect '
        "reads the token ids of every text. None: no events.",
    )
    progress: ProgressCallback | bool | None = _option(
        None,
        "Called with a stage's name, the units done and the total, in the thread that loads, several times in "
        "200 ms; what it raises ends the load. True: written to standard error, as in a notebook or a "
        "terminal.",
    )
    cancel: threading.Event | None = _option(
        None,
        "Once it is set, from any thread, the load stops within 200 ms with LoadCancelledError, and leaves no "
        "thread, child process, open file or memory behind. Kernels that are compiled in this process, where "
        "no child can be started, are each compiled to the end.",
    )


def options_of(record: type[HeaderOptions]) -> dict[str, Field[Any]]:
    """The fields of a record of options by name, in the order of signatures."""
    found: dict[str, Field[Any]] = {}
    moved = []
    for one in fields(record):
        if option_of(one).after is None:
            found[one.name] = one
        else:
            moved.append(one)
    for one in moved:
        items = list(found.items())
        items.insert([name for name, _ in items].index(str(option_of(one).after)) + 1, (one.name, one))
        found = dict(items)
    return found


def option_of(one: Field[Any]) -> Option:
    """The description of a field of `LoadOptions`."""
    option: Option = one.metadata[_OPTION]
    return option


def flags_of(record: type[HeaderOptions]) -> list[tuple[str, Flag]]:
    """The flags of a record of options in the order of help, each with the name of its field."""
    found: list[tuple[str, Flag]] = []
    flags = [(name, flag) for name, one in options_of(record).items() for flag in option_of(one).flags]
    for name, flag in sorted(flags, key=lambda one: one[1].after is not None):
        known = [other for other, _ in found]
        place = len(found) if flag.after is None else len(known) - known[::-1].index(flag.after)
        found.insert(place, (name, flag))
    return found


def checked_values(options: HeaderOptions) -> dict[str, Any]:
    """The values of options, numbers and flags of them checked. Raises: RequestError."""
    found = {}
    for one in fields(options):
        value, option = getattr(options, one.name), one.metadata.get(_OPTION)
        if option is not None and option.none is not None:
            value = check_number(one.name, value, 1, none=option.none)
        elif one.type == "bool":
            value = check_flag(one.name, value)
        found[one.name] = value
    return found


def takes(options: Callable[P, Any]) -> Callable[[Callable[[Any], T]], Callable[P, T]]:
    """Let a function of a record of options take the options themselves, and document them."""

    def decorate(function: Callable[[Any], T]) -> Callable[P, T]:
        @wraps(function)
        def call(*arguments: P.args, **given: P.kwargs) -> T:
            try:
                record = options(*arguments, **given)
            except TypeError as error:
                raise TypeError(str(error).replace(f"{options.__name__}.__init__", function.__name__)) from None
            return function(record)

        known = options_of(options)  # type: ignore[arg-type]
        kinds = {True: inspect.Parameter.KEYWORD_ONLY, False: inspect.Parameter.POSITIONAL_OR_KEYWORD}
        parameters = [
            inspect.Parameter(name, kinds[bool(one.kw_only)], default=one.default, annotation=one.type)
            for name, one in known.items()
        ]
        result = function.__annotations__["return"]
        call.__annotations__ = {**{name: one.type for name, one in known.items()}, "return": result}
        call.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        del call.__wrapped__
        if function.__doc__:
            call.__doc__ = _with_options(function.__doc__, known)
        return call

    return decorate


def _with_options(text: str, options: dict[str, Field[Any]]) -> str:
    """A docstring with a paragraph of options before the errors."""
    lines = [
        textwrap.fill(f"{name}: {option_of(one).help}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, one in options.items()
    ]
    body, raises, errors = text.partition("    Raises:")
    return "\n".join([body.rstrip(), "", *lines, raises + errors])
