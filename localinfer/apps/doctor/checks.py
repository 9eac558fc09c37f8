"""The checks by name: each returns facts for JSON, and one that fails says so beside the others.

Heavy modules are imported in the check that needs them, so that one that cannot be imported is a finding as well.
"""

import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from localinfer.apps.doctor.hardware import huge_pages, memory_modules, power_facts
from localinfer.system.folders import user_folder
from localinfer.system.machine_limits import memory_limits, processor_limits

Facts = dict[str, Any]

_COMPILE_SECONDS = 13.0
"""Of one core of an AMD EPYC (Zen 4), for the 36 kernels of the demo model."""
_MOST_COMPILERS = 8
_START_SECONDS = 3.0
"""Of the same, about: imports, those of the processes that compile, the load and a first story."""
_PACKAGES = ("numpy", "numba", "llvmlite", "torch", "numba-cuda")


def run_checks(checks: Mapping[str, Callable[[], Facts]], progress: Callable[[str], object]) -> Facts:
    """The facts of each check by its name; {"error": why} of one that failed."""
    found: Facts = {}
    for name, check in checks.items():
        progress(name.replace("_", " "))
        try:
            found[name] = check()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__}
    return found


def _load() -> Facts:
    from localinfer.apps.doctor.load import other_load

    return other_load()


def _cpu() -> Facts:
    from localinfer.apps.bench.machine import cpu_name
    from localinfer.kernels.jit import isa

    available = isa.available()
    return {
        "name": cpu_name(),
        "kernels": isa.SELECTED.value,
        "fastest_here": available[0].value,
        "faster_elsewhere": faster_instructions(available[0].value, platform.machine()),
        **power_facts(),
    }


def faster_instructions(path: str, machine: str) -> list[str]:
    """Instruction sets of the same kind of CPU with faster kernels than the fastest path of this one."""
    if machine.lower() in ("x86_64", "amd64"):
        order = {"avx512vnni": "AVX-512 VNNI", "avxvnni": "AVX-VNNI", "avx2": "AVX2"}
    else:
        order = {"neon": "dot products (ARMv8.2)"}
    names = list(order)
    return [order[name] for name in names[: names.index(path) if path in names else len(names)]]


def _threads() -> Facts:
    from localinfer.models.load.threads import available_threads

    limits = processor_limits()
    return {
        "physical_cores": limits.physical_cores,
        "hardware_threads": limits.hardware_threads,
        "allowed": limits.allowed,
        "quota": limits.quota,
        "used": available_threads(),
    }


def _memory() -> Facts:
    limits = memory_limits()
    return {
        "total_bytes": limits.total_bytes,
        "available_bytes": limits.available_bytes,
        "swap_bytes": limits.swap_bytes,
        "limited_by": limits.limited_by or None,
        "huge_pages": huge_pages(),
        "modules": memory_modules(),
    }


def _bandwidth() -> Facts:
    from localinfer.apps.doctor.load import measure_bandwidth

    return measure_bandwidth(processor_limits().usable_threads, memory_limits().available_bytes)


def _kernels() -> Facts:
    from localinfer.kernels.cpu.program import POOL_KERNELS
    from localinfer.kernels.jit.object_cache import cache_folder

    folder = cache_folder()
    files = [] if folder is None else list(folder.glob("*.o"))
    compilers = min(os.cpu_count() or 1, _MOST_COMPILERS)
    return {
        "folder": None if folder is None else str(folder),
        "num_compiled": len(files),
        "num_bytes": sum(file.stat().st_size for file in files),
        "is_compiled": bool(files) and all(kernel.is_cached for kernel in POOL_KERNELS),
        "first_start_seconds": round(_COMPILE_SECONDS / compilers + _START_SECONDS),
    }


def _prompt_cache() -> Facts:
    from localinfer.storage.budget import stored_files
    from localinfer.storage.prompt_cache import DEFAULT_MAX_BYTES, conversations_folder

    folder = conversations_folder(None)
    return {
        "folder": None if folder is None else str(folder),
        "num_bytes": 0 if folder is None else sum(file.num_bytes for file in stored_files(folder)),
        "max_bytes": DEFAULT_MAX_BYTES,
        "is_writable": folder is not None and os.access(_existing(folder), os.W_OK),
    }


def _crashes() -> Facts:
    from localinfer.system.crash_files import reports_folder, stored_reports

    folder = reports_folder()
    found = [{"path": str(report.path), "text": report.text} for report in stored_reports(folder)]
    return {"folder": None if folder is None else str(folder), "reports": found}


def _disk() -> Facts:
    from localinfer.storage.hub.places import Places

    models = Places.of_user().hub_cache
    places = {"caches": user_folder("cache"), "state": user_folder("state"), "models": models}
    return {
        what: {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
        for what, folder in places.items()
        if folder is not None
        for usage in [shutil.disk_usage(_existing(folder))]
    }


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((place for place in (folder, *folder.parents) if place.exists()), folder)


def _gpu() -> Facts:
    from localinfer.errors import LocalinferError
    from localinfer.kernels.cuda.device import find_devices, has_driver

    facts: Facts = {"has_driver": has_driver(), "name": None, "free_bytes": None, "others": [], "reason": None}
    if not facts["has_driver"]:
        return {**facts, "reason": "no NVIDIA driver is installed"}
    try:
        device, *others = find_devices()
    except (LocalinferError, ImportError, OSError, RuntimeError) as error:
        return {**facts, "reason": str(error)}
    found = [{"index": one.index, "name": one.name, "free_bytes": one.free_bytes} for one in others]
    return {**facts, "name": device.name, "free_bytes": device.free_bytes, "others": found}


def _versions() -> Facts:
    from importlib import metadata

    from localinfer.kernels.versions import installed_version

    found: Facts = {"localinfer": installed_version("localinfer"), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return {**found, "system": f"{platform.system()} {platform.release()} {platform.machine()}", "path": sys.executable}


def _config() -> Facts:
    from localinfer.storage.config import describe_config

    return {"lines": describe_config()}


def _models() -> Facts:
    from localinfer.storage.hub.installed import find_installed
    from localinfer.storage.hub.places import Places

    return {"found": [_model_facts(model) for model in find_installed(Places.of_user())]}


def _model_facts(model: Any) -> Facts:
    return {
        "name": model.name,
        "num_bytes": model.num_bytes,
        "path": str(model.path),
        "source": model.source,
        "problem": model.problem or None,
        "writes_date": None if model.problem else _writes_date(model.path),
        **_gpu_plan(model),
    }


def _writes_date(path: Path) -> bool | None:
    """True if a model's chat template writes the date by itself; None if there is no template, or none can be read."""
    from localinfer.errors import LocalinferError
    from localinfer.models.checkpoint.tokenizer_json import read_templates
    from localinfer.models.text.chat_template import ChatTemplate
    from localinfer.quant.checkpoint.folder import open_folder
    from localinfer.quant.gguf.reader import read_gguf

    try:
        if path.is_dir():
            with open_folder(path) as folder:
                template = ChatTemplate.from_metadata(read_templates(folder))
        else:
            with read_gguf(path) as file:
                template = ChatTemplate.from_metadata(file.metadata)
    except (LocalinferError, OSError):
        return None
    if template.source is None:
        return None
    with warnings.catch_warnings():
        # Of a template that does not compile it is said when the model is loaded.
        warnings.simplefilter("ignore")
        return template.writes_date()


def _gpu_plan(model: Any) -> Facts:
    """The parts of a model that GPUs would hold, where there is a driver."""
    from localinfer.kernels.cuda.device import has_driver

    if model.problem or not has_driver():
        return {}
    from localinfer.loading.memory.gpu_plan import describe_gpus, gpu_line

    plan = describe_gpus(model.path)
    return {} if plan is None else {"gpus": gpu_line(plan)}


CHECKS: dict[str, Callable[[], Facts]] = {
    # First, before the others keep the machine busy.
    "load": _load,
    "cpu": _cpu,
    "threads": _threads,
    "memory": _memory,
    "bandwidth": _bandwidth,
    "gpu": _gpu,
    "kernels": _kernels,
    "prompt_cache": _prompt_cache,
    "crashes": _crashes,
    "disk": _disk,
    "versions": _versions,
    "config": _config,
    "models": _models,
}


def failed(facts: Facts) -> Iterator[tuple[str, str]]:
    """The checks that failed, and why."""
    for name, found in facts.items():
        if isinstance(found, dict) and "error" in found:
            yield name, found["error"]
