"""Advice to make this machine faster: only what its facts support, most effective first."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Facts = dict[str, Any]

_BUSY_CORES = 0.3
_STOLEN_SHARE = 0.05
_SATURATED = 0.8
"""Of the bandwidth of all threads, the share from which one thread alone is limited by memory too."""
_LOW_CLOCK = 0.95
_MOST_NAMES = 5
_LOW_DISK_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Advice:
    """One thing to do."""

    text: str
    factor: float = 0.0
    """Largest speedup that it may bring; 0: not measured."""


def advise(facts: Facts) -> list[Advice]:
    """Advice from the facts of `checks.run_checks`; a check that failed gives none."""
    found: list[Advice] = []
    for name, rule in _RULES:
        checked = facts.get(name)
        if isinstance(checked, dict) and "error" not in checked:
            found += rule(checked, facts)
    # Sorting is stable: what has no factor keeps the order of the rules.
    return sorted(found, key=lambda advice: -advice.factor)


def _gpu(gpu: Facts, facts: Facts) -> Iterator[Advice]:
    if gpu["has_driver"] and gpu["name"] is None:
        yield Advice(f"An NVIDIA driver is installed, and its GPU is not used: {gpu['reason']}", 10.0)


def _threads(threads: Facts, facts: Facts) -> Iterator[Advice]:
    cores, allowed, quota = threads["physical_cores"], threads["allowed"], threads["quota"]
    if quota is not None and quota < min(cores, allowed):
        yield Advice(
            f"The cgroup allows {quota:g} of {min(cores, allowed)} cores: raise its limit (docker: --cpus, systemd: "
            "CPUQuota=)",
            min(cores, allowed) / quota,
        )
    if allowed < cores:
        yield Advice(
            f"This process may run on {allowed} of {cores} cores: widen its affinity (taskset, or the cpuset of the "
            "container)",
            cores / allowed,
        )


def _load(load: Facts, facts: Facts) -> Iterator[Advice]:
    threads = facts.get("threads", {})
    used, cores = threads.get("used") or 1, threads.get("physical_cores") or 1
    # Programs on cores that localinfer leaves free take nothing from it.
    contended = load["cores"] + used - cores
    if contended >= _BUSY_CORES:
        named = ", ".join(f"{one['name']} (process {one['pid']}) {one['cores']:.1f}" for one in load["processes"])
        which = f" ({named})" if named else ""
        yield Advice(
            f"Other programs keep {load['cores']:.1f} cores busy{which}, and localinfer computes with fewer than its "
            f"{used} threads beside them: end them. The speed of memory above was measured beside them",
            (used + contended) / used,
        )
    if load["stolen_share"] >= _STOLEN_SHARE:
        yield Advice(
            f"The hypervisor takes {100 * load['stolen_share']:.0f} % of the processors' time for other machines",
            1 / (1 - min(0.9, load["stolen_share"])),
        )


def _cpu(cpu: Facts, facts: Facts) -> Iterator[Advice]:
    if cpu["kernels"] != cpu["fastest_here"]:
        yield Advice(
            f"LOCALINFER_ISA selects {cpu['kernels']} kernels, and this CPU runs {cpu['fastest_here']}: unset it", 2.0
        )
    most, limit = cpu["max_mhz"], cpu["limit_mhz"]
    if most and limit and limit < _LOW_CLOCK * most:
        yield Advice(f"The clock is limited to {limit} of {most} MHz (scaling_max_freq): raise it", most / limit)
    if cpu["is_saving"]:
        setting = (
            "the power profile is low-power: choose another (powerprofilesctl set performance)"
            if cpu["profile"] == "low-power"
            else f"its energy preference is {cpu['preference']}: choose performance"
            if cpu["preference"] == "power"
            else f"its governor is {cpu['governor']}: choose performance (cpupower frequency-set -g performance)"
        )
        yield Advice(f"The CPU saves power; {setting}")
    if cpu["on_battery"]:
        yield Advice("The machine runs on its battery, where most CPUs run slower: plug it in")


def _kernels(kernels: Facts, facts: Facts) -> Iterator[Advice]:
    if kernels["folder"] is None and kernels["pack"] is None:
        yield Advice(
            f"Compiled kernels cannot be kept, so every start takes about {kernels['first_start_seconds']} s longer: "
            "see the warning above, or set XDG_CACHE_HOME to a folder of yours"
        )


def _bandwidth(bandwidth: Facts, facts: Facts) -> Iterator[Advice]:
    together, alone = bandwidth["bytes_per_second"], bandwidth["bytes_per_second_of_one_thread"]
    threads, memory = bandwidth["num_threads"], facts.get("memory", {})
    speed = f"Memory is read at {together / 1e9:.0f} GB/s, which bounds decoding"
    modules = memory.get("modules")
    if modules and len(modules) == 1:
        yield Advice(f"{speed}, and a single memory module is fitted: a second one opens another channel", 2.0)
    is_disturbed = facts.get("load", {}).get("cores", 0.0) >= _BUSY_CORES
    if threads == 1 or is_disturbed:
        yield Advice(f"{speed}: a model of half the bytes (a smaller quantization) decodes up to twice as fast")
    elif alone >= _SATURATED * together:
        yield Advice(
            f"{speed}, and one thread alone reads as much: more cores speed up prompts only, a model of half the bytes "
            "(a smaller quantization) decodes up to twice as fast"
        )
    elif together >= _SATURATED * threads * alone:
        yield Advice(f"{speed}, and it still grows with every thread: more cores would speed up decoding too")
    else:
        yield Advice(f"{speed}: a model of half the bytes (a smaller quantization) decodes up to twice as fast")


def _memory(memory: Facts, facts: Facts) -> Iterator[Advice]:
    if memory["huge_pages"] == "never":
        yield Advice(
            "Huge pages are off, so that reading weights misses address translations: "
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        )
    if memory["available_bytes"] < memory["total_bytes"] // 4:
        free, total = memory["available_bytes"] / 1e9, memory["total_bytes"] / 1e9
        yield Advice(f"Only {free:.1f} of {total:.1f} GB of memory are free: close programs to run larger models")


def _prompt_cache(cache: Facts, facts: Facts) -> Iterator[Advice]:
    if not cache["is_writable"]:
        where = "this user has no home folder" if cache["folder"] is None else f"{cache['folder']} cannot be written"
        yield Advice(f"Prompts are not kept between starts, as {where}: give --disk-cache-folder")


def _models(models: Facts, facts: Facts) -> Iterator[Advice]:
    dated = [model["name"] for model in models["found"] if model["writes_date"]]
    if dated:
        more = f" and {len(dated) - _MOST_NAMES} more" if len(dated) > _MOST_NAMES else ""
        yield Advice(
            f"The chat templates of {', '.join(dated[:_MOST_NAMES])}{more} write the date into every prompt, so that "
            "nothing behind it is found in the prompt cache after midnight: give --chat-template-kwargs "
            "template_date=2026-10-01, or another day that stays the same"
        )


def _disk(disk: Facts, facts: Facts) -> Iterator[Advice]:
    for what, usage in disk.items():
        if usage["free_bytes"] < _LOW_DISK_BYTES:
            free = usage["free_bytes"] / 1e9
            yield Advice(f"Only {free:.1f} GB are free for {what} in {usage['folder']}: what is cached is deleted soon")


def _first_start(kernels: Facts, facts: Facts) -> Iterator[Advice]:
    if kernels["folder"] is not None and not kernels["is_compiled"]:
        yield Advice(
            f"Kernels are not compiled yet: the first start takes about {kernels['first_start_seconds']} s, once; "
            "`localinfer run -p Hi -n 1` does it now"
        )


def _instructions(cpu: Facts, facts: Facts) -> Iterator[Advice]:
    if cpu["faster_elsewhere"]:
        names = " or ".join(cpu["faster_elsewhere"])
        yield Advice(f"This CPU lacks {names}, with which prompts are computed faster; only another CPU has it")


_RULES: list[tuple[str, Callable[[Facts, Facts], Iterator[Advice]]]] = [
    ("gpu", _gpu),
    ("threads", _threads),
    ("load", _load),
    ("cpu", _cpu),
    ("kernels", _kernels),
    ("bandwidth", _bandwidth),
    ("memory", _memory),
    ("prompt_cache", _prompt_cache),
    ("models", _models),
    ("disk", _disk),
    ("kernels", _first_start),
    ("cpu", _instructions),
]
