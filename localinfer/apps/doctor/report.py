"""The facts of the checks as aligned lines: ASCII but for names and paths, headings dim where styles are allowed."""

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from localinfer.apps.doctor.advice import Advice
from localinfer.apps.doctor.checks import failed
from localinfer.system.machine_limits import core_text
from localinfer.terminal import DIM, RESET, neutralise_controls

Facts = dict[str, Any]
Row = tuple[str, str]

_WIDTH = 15
_LEAST_WIDTH = 50
"""Columns below which values are not aligned."""
_SHOWN_CRASHES = 2
_SHOWN_FACTOR = 1.05
_MODEL_SIZES = (1, 4, 8)
"""GB of weights, for which the fastest decoding is shown."""


def report_lines(
    facts: Facts, advice: Sequence[Advice], *, styles: bool = False, width: int | None = None
) -> Iterator[str]:
    """Lines without line ends. styles: headings are dimmed. width: of a terminal, for which lines are wrapped."""
    for title, rows in _SECTIONS.items():
        lines = [(label, value) for name, rule in rows for label, value in _rows(facts, name, rule)]
        if lines:
            yield from _heading(title, styles, width)
            for label, value in lines:
                yield from _wrapped(f"  {neutralise_controls(label):<{_WIDTH}} ", value, width)
    yield from _heading("What would make this machine faster", styles, width)
    if not advice:
        yield "  nothing was found"
    for number, one in enumerate(advice, 1):
        gain = f" (up to {one.factor:.1f} x)" if one.factor > _SHOWN_FACTOR else ""
        yield from _wrapped(f"  {number}. ", f"{one.text}{gain}", width)


def _heading(title: str, styles: bool, width: int | None) -> Iterator[str]:
    for line in [title] if width is None else textwrap.wrap(title, width):
        yield f"{DIM}{line}{RESET}" if styles else line


def _wrapped(begin: str, text: str, width: int | None) -> Iterator[str]:
    """A line, wrapped behind what it begins with; words such as paths are not broken."""
    text = neutralise_controls(text)
    if width is None:
        yield f"{begin}{text}".rstrip()
        return
    indent = following = "  "
    if width >= _LEAST_WIDTH:
        indent, following = begin, " " * len(begin)
    else:
        text, following = f"{' '.join(begin.split())} {text}", "    "
    lines = textwrap.wrap(
        text,
        width=width,
        initial_indent=indent,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from lines or [begin.rstrip()]


def _rows(facts: Facts, name: str, rule: Callable[[Facts], Iterator[Row]]) -> Iterator[Row]:
    found = facts.get(name)
    if found is None:
        return
    if reason := dict(failed({name: found})).get(name):
        yield name.replace("_", " "), f"could not be checked: {reason}"
        return
    yield from rule(found)


def _cpu(cpu: Facts) -> Iterator[Row]:
    yield "processor", cpu["name"]
    kernels = cpu["kernels"]
    if kernels != cpu["fastest_here"]:
        kernels += f", by LOCALINFER_ISA; the fastest here is {cpu['fastest_here']}"
    elif cpu["faster_elsewhere"]:
        kernels += f"; faster with {' or '.join(cpu['faster_elsewhere'])}, which this CPU lacks"
    else:
        kernels += ", the fastest there are"
    if cpu["amx_refusal"]:
        kernels += f"; the CPU has AMX, but {cpu['amx_refusal']}"
    yield "kernels", kernels
    parts = [
        f"governor {cpu['governor']}" if cpu["governor"] else "",
        f"{cpu['max_mhz']} MHz" if cpu["max_mhz"] else "",
    ]
    parts += [f"profile {cpu['profile']}" if cpu["profile"] else "", "on battery" if cpu["on_battery"] else ""]
    if any(parts):
        yield "clock", ", ".join(part for part in parts if part)


def _threads(threads: Facts) -> Iterator[Row]:
    quota = "" if threads["quota"] is None else f", the cgroup allows {threads['quota']:g}"
    allowed = "" if threads["allowed"] == threads["hardware_threads"] else f", allowed are {threads['allowed']}"
    cores, slow = threads["physical_cores"], threads["efficiency_cores"]
    kinds = f" ({core_text(threads['performance_cores'], slow)})" if slow else ""
    yield (
        "threads",
        f"{threads['used']} used; {cores} physical cores{kinds}, {threads['hardware_threads']} hardware "
        f"threads{allowed}{quota}",
    )


def _load(load: Facts) -> Iterator[Row]:
    names = ", ".join(f"{one['name']} ({one['pid']}) {one['cores']:.1f}" for one in load["processes"])
    yield "other programs", f"{load['cores']:.1f} cores busy{f': {names}' if names else ''}"


def _memory(memory: Facts) -> Iterator[Row]:
    limit = f", by the limit of {memory['limited_by']}" if memory["limited_by"] else ""
    yield "memory", f"{_size(memory['available_bytes'])} free of {_size(memory['total_bytes'])}{limit}"
    if memory["modules"]:
        sizes = ", ".join(f"{_size(one['num_bytes'])} {one['mega_transfers']} MT/s" for one in memory["modules"])
        yield "modules", f"{len(memory['modules'])}: {sizes}"
    if memory["huge_pages"]:
        yield "huge pages", memory["huge_pages"]


def _bandwidth(bandwidth: Facts) -> Iterator[Row]:
    speed, alone = bandwidth["bytes_per_second"], bandwidth["bytes_per_second_of_one_thread"]
    yield "bandwidth", f"{speed / 1e9:.1f} GB/s by {bandwidth['num_threads']} threads, {alone / 1e9:.1f} GB/s by one"
    sizes = ", ".join(f"{size} GB {speed / 1e9 / size:.0f}" for size in _MODEL_SIZES)
    yield "decoding", f"at most {speed / 1e9:.0f} tokens/s per GB of weights read: {sizes} tokens/s"


def _gpu(gpu: Facts) -> Iterator[Row]:
    if gpu["name"] is None:
        yield "device", f"none is used: {gpu['reason']}"
    else:
        yield "device", f"{gpu['name']}, {_size(gpu['free_bytes'])} free; used where --device allows it"
        for other in gpu["others"]:
            yield f"cuda:{other['index']}", f"{other['name']}, {_size(other['free_bytes'])} free"


def _kernels(kernels: Facts) -> Iterator[Row]:
    folder = kernels["folder"]
    if kernels["pack"] is not None:
        yield "kernel cache", f"kernels came compiled, in {kernels['pack']}"
    elif folder is None:
        yield "kernel cache", f"none: every start compiles for about {kernels['first_start_seconds']} s"
    elif not kernels["is_compiled"]:
        yield "kernel cache", f"empty: the first start compiles for about {kernels['first_start_seconds']} s ({folder})"
    else:
        parent = os.path.dirname(folder)
        yield "kernel cache", f"{kernels['num_compiled']} kernels compiled, {_size(kernels['num_bytes'])} in {parent}"


def _prompt_cache(cache: Facts) -> Iterator[Row]:
    if cache["folder"] is None:
        yield "prompt cache", "none: this user has no home folder"
        return
    writable = "" if cache["is_writable"] else ", which cannot be written"
    yield (
        "prompt cache",
        f"{_size(cache['num_bytes'])} of at most {_size(cache['max_bytes'])} in {cache['folder']}{writable}",
    )


def _disk(disk: Facts) -> Iterator[Row]:
    for what, usage in disk.items():
        yield what, f"{_size(usage['free_bytes'])} free of {_size(usage['total_bytes'])} for {usage['folder']}"


def _versions(versions: Facts) -> Iterator[Row]:
    for name, version in versions.items():
        if version is not None:
            yield name, version


def _config(config: Facts) -> Iterator[Row]:
    for line in config["lines"]:
        label, colon, value = line.partition(": ")
        yield ("file", value) if label == "configuration" and colon else ("", line.strip())


def _models(models: Facts) -> Iterator[Row]:
    for model in models["found"]:
        problem = f"; {model['problem']}" if model["problem"] else ""
        gpus = f"; {model['gpus']}" if "gpus" in model else ""
        yield _size(model["num_bytes"]), f"{model['name']} ({model['source']}){problem}{gpus}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"


def _crashes(crashes: Facts) -> Iterator[Row]:
    for report in crashes["reports"][:_SHOWN_CRASHES]:
        lines = [line.strip() for line in report["text"].splitlines()]
        end = next((index for index, line in enumerate(lines) if line.startswith("last runs")), len(lines))
        for index, line in enumerate(lines[:end]):
            yield ("" if index else "last crashes"), line
        yield "", f"the whole report: {report['path']}"


_SECTIONS: dict[str, list[tuple[str, Callable[[Facts], Iterator[Row]]]]] = {
    "CPU": [("cpu", _cpu), ("threads", _threads), ("load", _load)],
    "Memory": [("memory", _memory), ("bandwidth", _bandwidth)],
    "GPU": [("gpu", _gpu)],
    "Caches": [("kernels", _kernels), ("prompt_cache", _prompt_cache)],
    "Disk": [("disk", _disk)],
    "Crashes": [("crashes", _crashes)],
    "Models": [("models", _models)],
    "Configuration": [("config", _config)],
    "Versions": [("versions", _versions)],
}
