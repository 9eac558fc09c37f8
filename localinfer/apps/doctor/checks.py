"""The checks by name: each returns facts for JSON, and one that fails says so beside the others.

Heavy modules are imported in the check that needs them, so that one that cannot be imported is a finding as well; the
bandwidth of memory is measured by NumPy, without compiled kernels. Clock, power, huge pages and memory modules are as
Linux reports them; other systems report little of it.
"""

import os
import platform
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localinfer.system.files import text_of
from localinfer.system.folders import user_folder
from localinfer.system.machine_limits import memory_limits, processor_limits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Facts = dict[str, Any]

_ROOT = Path("/")
_CPU = "sys/devices/system/cpu"
_MODULES = "sys/firmware/dmi/entries"
_SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose governor `powersave` is the usual one: the clock follows the load."""


def power_facts(root: Path = _ROOT) -> Facts:
    """The governor of the clock, its limits in MHz, the platform's power profile, and whether a battery feeds it.

    is_saving: the clock is held low by the governor or the profile.
    """
    clock = root / _CPU / "cpu0/cpufreq"
    governor, driver = text_of(clock / "scaling_governor"), text_of(clock / "scaling_driver")
    preference = text_of(clock / "energy_performance_preference")
    profile = text_of(root / "sys/firmware/acpi/platform_profile")
    most, limit = _number(clock / "cpuinfo_max_freq"), _number(clock / "scaling_max_freq")
    is_slow_governor = governor == "powersave" and driver not in _SCALING_DRIVERS
    return {
        "governor": governor or None,
        "driver": driver or None,
        "preference": preference or None,
        "profile": profile or None,
        "max_mhz": None if most is None else most // 1000,
        "limit_mhz": None if limit is None else limit // 1000,
        "on_battery": _on_battery(),
        "is_saving": is_slow_governor or preference == "power" or profile == "low-power",
    }


def huge_pages(root: Path = _ROOT) -> str | None:
    """The system's setting of huge pages: "always", "madvise" or "never"; None if it has none."""
    text = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    _, opened, rest = text.partition("[")
    return rest.partition("]")[0] if opened else None


def memory_modules(root: Path = _ROOT) -> list[dict[str, int]] | None:
    """Each fitted module: its bytes, and transfers per second in millions (0 if unknown); None if not readable.

    From the SMBIOS table's records of type 17 (DSP0134, section 7.18), which usually only the administrator may read.
    """
    found = []
    for path in sorted((root / _MODULES).glob("17-*/raw")):
        try:
            record = path.read_bytes()
        except OSError:
            return None
        if len(record) < 0x17:
            continue
        size = int.from_bytes(record[0x0C:0x0E], "little")
        if size in (0, 0xFFFF):
            continue
        num_bytes = (size & 0x7FFF) << (10 if size & 0x8000 else 20)
        if size == 0x7FFF and len(record) >= 0x20:
            num_bytes = int.from_bytes(record[0x1C:0x20], "little") << 20
        speed = record[0x20:0x22] if len(record) >= 0x22 else record[0x15:0x17]
        found.append({"num_bytes": num_bytes, "mega_transfers": int.from_bytes(speed, "little")})
    return found or None


def _on_battery() -> bool | None:
    import psutil

    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except (OSError, RuntimeError, ValueError):
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text) if text.isdecimal() else None


BUFFER_BYTES = 256 << 20
"""Far more than any cache, on the same kind of pages as weights."""
_ATTEMPTS = 6
_BUSY_SECONDS = 0.4
_LEAST_SHARE = 0.15
"""Of a core; processes that take less are not named."""


def measure_bandwidth(num_threads: int, available_bytes: int) -> Facts:
    """Bytes per second that one thread and `num_threads` threads read from memory: the best of several attempts."""
    import numpy as np

    from localinfer.kernels.cpu.memory import Arena

    num_bytes = min(BUFFER_BYTES, available_bytes // 4) // (8 * num_threads) * 8 * num_threads
    memory = Arena(0).take(num_bytes).view(np.int64)
    # Pages that were never written are all mapped to one page of zeros.
    memory[:] = 1
    alone = max(_read_speed(memory, 1) for _ in range(_ATTEMPTS))
    together = max(_read_speed(memory, num_threads) for _ in range(_ATTEMPTS))
    # Where one thread takes all that there is, the other figure is the same but for noise.
    together = max(alone, together)
    return {
        "num_threads": num_threads,
        "bytes_per_second": together,
        "bytes_per_second_of_one_thread": alone,
        "tokens_per_second_per_gb": together / 1e9,
    }


def _read_speed(memory: "NDArray[np.int64]", num_threads: int) -> float:
    import numpy as np

    parts = np.split(memory, num_threads)
    # A bitwise reduction leaves the interpreter free and is as fast as memory.
    threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts[1:]]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    np.bitwise_or.reduce(parts[0])
    for thread in threads:
        thread.join()
    return memory.nbytes / (time.perf_counter() - began)


def other_load(sleep: Callable[[float], object] = time.sleep) -> Facts:
    """Count cores that other programs keep busy, name these, and give the share of time that a hypervisor takes."""
    import psutil

    watched = {}
    for process in psutil.process_iter(["name"]):
        if process.pid not in (0, os.getpid()):
            seconds = _cpu_seconds(process)
            if seconds is not None:
                watched[process] = seconds
    before, began, own = psutil.cpu_times(), time.monotonic(), time.process_time()
    sleep(_BUSY_SECONDS)
    after, elapsed, own = psutil.cpu_times(), time.monotonic() - began, time.process_time() - own
    found = []
    for process, seconds in watched.items():
        now = _cpu_seconds(process)
        if now is not None and (cores := (now - seconds) / elapsed) >= _LEAST_SHARE:
            found.append({"pid": process.pid, "name": process.info["name"] or "", "cores": round(cores, 2)})
    idle = ("idle", "iowait", "steal", "guest", "guest_nice")
    busy = sum(getattr(after, name) - getattr(before, name) for name in after._fields if name not in idle)
    stolen = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
    return {
        "cores": round(max(0.0, (busy - own) / elapsed), 2),
        "stolen_share": round(max(0.0, stolen / elapsed / (os.cpu_count() or 1)), 3),
        "processes": sorted(found, key=lambda process: -float(process["cores"]))[:3],
    }


def _cpu_seconds(process: Any) -> float | None:
    import psutil

    try:
        times = process.cpu_times()
    except (psutil.Error, OSError):
        return None
    return float(times.user + times.system)


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


_X86_INSTRUCTIONS = {"amx": "AMX", "avx512vnni": "AVX-512 VNNI", "avxvnni": "AVX-VNNI", "avx2": "AVX2"}
"""By path, the fastest first. What AMX gains was not measured, so no CPU is said to lack it."""
_ARM64_INSTRUCTIONS = {"i8mm": "products of matrices (i8mm)", "dotprod": "dot products (ARMv8.2)"}
"""By feature."""


def _cpu() -> Facts:
    from localinfer.kernels.jit import isa
    from localinfer.kernels.jit.host import cpu_name, host_features

    available = isa.available()
    return {
        "name": cpu_name(),
        "kernels": isa.SELECTED.value,
        "fastest_here": available[0].value,
        "amx_refusal": isa.amx_refusal_here(),
        "faster_elsewhere": faster_instructions(available[0].value, platform.machine(), host_features()),
        **power_facts(),
    }


def faster_instructions(path: str, machine: str, features: Mapping[str, bool]) -> list[str]:
    """Instruction sets of the same kind of CPU with faster kernels than the fastest path of this one.

    features: whether the CPU has each; what is unknown of it is not said to be absent.
    """
    if machine.lower() not in ("x86_64", "amd64"):
        return [text for name, text in _ARM64_INSTRUCTIONS.items() if features.get(name) is False]
    names = list(_X86_INSTRUCTIONS)
    return [_X86_INSTRUCTIONS[name] for name in names[1 : names.index(path) if path in names else len(names)]]


def _threads() -> Facts:
    from localinfer.models.load.threads import available_threads

    limits = processor_limits()
    return {
        "physical_cores": limits.physical_cores,
        "performance_cores": limits.performance_cores,
        "efficiency_cores": limits.efficiency_cores,
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
    return measure_bandwidth(processor_limits().usable_threads, memory_limits().available_bytes)


def _kernels() -> Facts:
    from localinfer.kernels.cpu.program import POOL_KERNELS
    from localinfer.kernels.jit.object_cache import cache_folder
    from localinfer.kernels.jit.packs import chosen_pack

    folder, pack = cache_folder(), chosen_pack()
    files = [] if folder is None else list(folder.glob("*.o"))
    compilers = min(os.cpu_count() or 1, _MOST_COMPILERS)
    return {
        "folder": None if folder is None else str(folder),
        "num_compiled": len(files),
        "num_bytes": sum(file.stat().st_size for file in files),
        "is_compiled": (bool(files) or pack is not None) and all(kernel.is_cached for kernel in POOL_KERNELS),
        "pack": None if pack is None else pack.path.name,
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
    folders = {"caches": user_folder("cache"), "state": user_folder("state"), "models": models}
    return {
        what: {"folder": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}
        for what, folder in folders.items()
        if folder is not None
        for usage in [shutil.disk_usage(_existing(folder))]
    }


_WITHOUT_METAL = "GPUs are used through NVIDIA's driver, and Apple's (Metal) are not: the CPU computes"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((one for one in (folder, *folder.parents) if one.exists()), folder)


def _gpu() -> Facts:
    from localinfer.errors import LocalinferError
    from localinfer.kernels.cuda.device import find_devices
    from localinfer.system.machine_limits import has_driver

    facts: Facts = {"has_driver": has_driver(), "name": None, "free_bytes": None, "others": [], "reason": None}
    if not facts["has_driver"]:
        return {**facts, "reason": _WITHOUT_METAL if sys.platform == "darwin" else "no NVIDIA driver is installed"}
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
    from localinfer.apps.config import describe_config

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
    from localinfer.system.machine_limits import has_driver

    if model.problem or not has_driver():
        return {}
    from localinfer.loading.memory.gpu_plan import describe_gpus, gpu_line

    plan = describe_gpus(model.path)
    return {} if plan is None else {"gpus": gpu_line(plan)}


CHECKS: dict[str, Callable[[], Facts]] = {
    # First, before the others keep the machine busy.
    "load": other_load,
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
