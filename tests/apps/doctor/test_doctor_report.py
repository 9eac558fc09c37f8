"""`localinfer doctor` prints every fact aligned, and a check that fails says so beside the others."""

import ast
import copy
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from localinfer.apps.cli import main
from localinfer.apps.doctor import checks
from localinfer.apps.doctor.advice import Advice
from localinfer.apps.doctor.checks import CHECKS, huge_pages, memory_modules, power_facts, run_checks
from localinfer.apps.doctor.report import report_lines
from localinfer.quant.gguf.reader import ValueType
from localinfer.quant.gguf.writer import GGUFWriter, encode_value
from tests.apps.doctor.machines import CALM_MACHINE
from tests.support.checkpoint_files import safetensors_bytes
from tests.support.limits import set_clock


def test_lines_are_aligned_and_ascii() -> None:
    lines = list(report_lines(CALM_MACHINE, [Advice("Do this", 1.5), Advice("Do that")]))
    text = "\n".join(lines)
    assert text.isascii() and "\x1b" not in text
    values = [line for line in lines if line.startswith("  ") and line[2:3].isalpha()]
    assert values and {line[16:18].strip() == "" or line[17] == " " for line in values} == {True}
    assert "  threads         8 used; 8 physical cores, 16 hardware threads" in lines
    assert "  bandwidth       40.0 GB/s by 8 threads, 12.0 GB/s by one" in lines
    assert "  decoding        at most 40 tokens/s per GB of weights read: 1 GB 40, 4 GB 10, 8 GB 5 tokens/s" in lines
    assert "  device          none is used: no NVIDIA driver is installed" in lines
    assert "  kernel cache    35 kernels compiled, 0.4 MB in /c/kernels" in lines
    assert "  prompt cache    12.0 MB of at most 4.3 GB in /c/conversations" in lines
    assert "  file            /home/me/config.toml" in lines and "                  threads = 4" in lines
    assert "  4.0 GB          a/b:Q4_0 (ollama)" in lines
    assert not any("torch" in line for line in lines)
    assert lines[-2:] == ["  1. Do this (up to 1.5 x)", "  2. Do that"]


def test_unusual_facts_are_named() -> None:
    facts = copy.deepcopy(CALM_MACHINE)
    refusal = "Linux refuses it to this process: No space left on device"
    facts["cpu"] |= {"kernels": "generic", "amx_refusal": refusal, "on_battery": True, "profile": "low-power"}
    facts["threads"] |= {"quota": 1.5, "allowed": 4, "performance_cores": 2, "efficiency_cores": 6}
    facts["memory"] |= {"limited_by": "the cgroup", "modules": [{"num_bytes": 16 << 30, "mega_transfers": 3200}]}
    others = [{"index": 1, "name": "Another GPU", "free_bytes": 4 * 10**9}]
    facts["gpu"] |= {"name": "Some GPU", "free_bytes": 8 * 10**9, "others": others}
    facts["models"]["found"][0]["gpus"] = "4 of 4 layers on 2 GPUs"
    facts["kernels"] |= {"is_compiled": False}
    facts["prompt_cache"] |= {"folder": None}
    facts["load"] |= {"cores": 1.0, "processes": [{"pid": 7, "name": "x\x1b[2J", "cores": 1.0}]}
    text = "\n".join(report_lines(facts, []))
    for wanted in (
        f"generic, by LOCALINFER_ISA; the fastest here is avx2; the CPU has AMX, but {refusal}",
        "profile low-power, on battery",
        "8 physical cores (2 P + 6 E), 16 hardware threads, allowed are 4, the cgroup allows 1.5",
        "by the limit of the cgroup",
        "1: 17.2 GB 3200 MT/s",
        "Some GPU, 8.0 GB free",
        "cuda:1          Another GPU, 4.0 GB free",
        "a/b:Q4_0 (ollama); 4 of 4 layers on 2 GPUs",
        "the first start compiles for about 17 s",
        "none: this user has no home folder",
        "nothing was found",
    ):
        assert wanted in text
    assert "\x1b" not in text


@pytest.mark.parametrize("width", [25, 79])
def test_a_terminal_gets_wrapped_lines_and_dim_headings(width: int) -> None:
    lines = list(report_lines(CALM_MACHINE, [Advice("word " * 60)], styles=True, width=width))
    assert "\x1b[2mMemory\x1b[0m" in lines
    lines = [re.sub(r"\x1b\[\d*m", "", line) for line in lines]
    longest = max(len(word) for line in lines for word in line.split())
    assert all(len(line) <= max(width, longest + 18) for line in lines)
    assert max(map(len, lines[-5:])) <= width


def test_a_check_that_fails_says_so_and_the_others_run() -> None:
    def broken() -> dict[str, object]:
        raise RuntimeError("no such thing")

    named: list[str] = []
    found = run_checks({"gpu": broken, "disk": dict, "prompt_cache": broken}, named.append)
    assert named == ["gpu", "disk", "prompt cache"]
    assert found == {
        "gpu": {"error": "RuntimeError: no such thing"},
        "disk": {},
        "prompt_cache": {"error": "RuntimeError: no such thing"},
    }
    text = "\n".join(report_lines({**CALM_MACHINE, **found}, []))
    assert "  gpu             could not be checked: RuntimeError: no such thing" in text
    assert "  prompt cache    could not be checked" in text and "Some CPU" in text


def test_every_check_is_shown(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(checks, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(checks, "_BUSY_SECONDS", 0.01)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {*CHECKS, "advice"} == {*CALM_MACHINE, "advice"}
    for name, found in CALM_MACHINE.items():
        assert "error" not in facts[name], name
        if name not in ("disk", "versions"):
            assert facts[name].keys() == found.keys(), name
    assert facts["bandwidth"]["bytes_per_second"] >= facts["bandwidth"]["bytes_per_second_of_one_thread"] > 0
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "could not be checked" in line] == []
    assert "What would make this machine faster" in lines


def test_what_other_parts_of_the_package_know_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **members: object) -> None:
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    module("localinfer.apps.config", describe_config=lambda: ["configuration: /c.toml"])
    module("localinfer.storage.hub")
    module("localinfer.storage.hub.places", Places=SimpleNamespace(of_user=lambda: "places"))
    model = SimpleNamespace(name="m", num_bytes=5, path=Path("/m"), source="ollama", problem="", quant=None)
    module("localinfer.storage.hub.installed", find_installed=lambda places: [model] if places == "places" else [])
    assert CHECKS["config"]() == {"lines": ["configuration: /c.toml"]}
    (found,) = CHECKS["models"]()["found"]
    path = str(Path("/m"))
    # There is no such file.
    writes_date = found.pop("writes_date")
    assert found == {"name": "m", "num_bytes": 5, "path": path, "source": "ollama", "problem": None}
    assert writes_date is None


def test_templates_of_files_and_folders_are_rendered_on_two_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {
        "today": "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}",
        "own": "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}",
        "broken": "{% for %}",
        "none": None,
    }
    models = []
    for name, source in sources.items():
        metadata = {"general.architecture": "llama"} | ({} if source is None else {"tokenizer.chat_template": source})
        encoded = {key: encode_value(value, ValueType.STRING) for key, value in metadata.items()}
        with GGUFWriter(tmp_path / f"{name}.gguf", encoded, []):
            pass
        (tmp_path / name).mkdir()
        stored = safetensors_bytes({"a": np.zeros(1, np.float32)})
        (tmp_path / name / "model.safetensors").write_bytes(stored)
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": source} if source else {}))
        models += [tmp_path / f"{name}.gguf", tmp_path / name]
    found = [SimpleNamespace(name=path.name, num_bytes=5, path=path, source="ollama", problem="") for path in models]
    monkeypatch.setattr("localinfer.storage.hub.installed.find_installed", lambda places: found)
    assert {one["name"]: one["writes_date"] for one in CHECKS["models"]()["found"]} == {
        "today.gguf": True,
        "today": True,
        "own.gguf": False,
        "own": False,
        "broken.gguf": False,
        "broken": False,
        "none.gguf": None,
        "none": None,
    }


def test_a_broken_part_is_a_failure_of_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "localinfer.storage.hub.installed", None)
    with pytest.raises(ModuleNotFoundError, match=r"localinfer\.storage\.hub\.installed"):
        CHECKS["models"]()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("driver", "governor", "preference", "is_saving"),
    [
        ("acpi-cpufreq", "powersave", "", True),
        ("acpi-cpufreq", "schedutil", "", False),
        ("intel_pstate", "powersave", "balance_performance", False),
        ("intel_pstate", "powersave", "power", True),
    ],
)
def test_power_is_saved_by_governors_that_hold_the_clock_low(
    tmp_path: Path, driver: str, governor: str, preference: str, is_saving: bool
) -> None:
    clock = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {"scaling_driver": driver, "scaling_governor": governor, "energy_performance_preference": preference}
    files |= {"cpuinfo_max_freq": "4000000\n", "scaling_max_freq": "1400000\n"}
    found = power_facts(write(tmp_path, {f"{clock}/{name}": text for name, text in files.items()}))
    assert (found["is_saving"], found["max_mhz"], found["limit_mhz"]) == (is_saving, 4000, 1400)
    assert power_facts(tmp_path / "nothing")["governor"] is None


def test_huge_pages_and_modules_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"})
    assert huge_pages(tmp_path) == "never"
    assert huge_pages(tmp_path / "nothing") is None
    assert memory_modules(tmp_path) is None

    def module(index: int, size: int, extended_mib: int = 0) -> None:
        record = bytearray(0x22)
        record[0x0C:0x0E] = size.to_bytes(2, "little")
        record[0x15:0x17] = (4800).to_bytes(2, "little")
        record[0x1C:0x20] = extended_mib.to_bytes(4, "little")
        record[0x20:0x22] = (4400).to_bytes(2, "little")
        folder = tmp_path / f"sys/firmware/dmi/entries/17-{index}"
        folder.mkdir(parents=True)
        (folder / "raw").write_bytes(record)

    for index, arguments in enumerate(((16384,), (0,), (0xFFFF,), (0x7FFF, 65536))):
        module(index, *arguments)
    assert memory_modules(tmp_path) == [
        {"num_bytes": 16 << 30, "mega_transfers": 4400},
        {"num_bytes": 64 << 30, "mega_transfers": 4400},
    ]


def test_busy_processes_are_named_and_this_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Process:
        def __init__(self, pid: int, name: str, cores: float) -> None:
            self.pid, self.info, self._cores, self._asked = pid, {"name": name}, cores, 0

        def cpu_times(self) -> SimpleNamespace:
            self._asked += 1
            return SimpleNamespace(user=self._cores * self._asked, system=0.0)

    processes = [Process(1, "idle", 0.0), Process(2, "encoder", 1.5), Process(checks.os.getpid(), "self", 2.0)]
    clock = iter((10.0, 11.0))
    Times = type("Times", (SimpleNamespace,), {"_fields": ("user", "idle", "steal")})
    times = iter((Times(user=5.0, idle=5.0, steal=0.0), Times(user=6.5, idle=5.3, steal=0.2)))
    monkeypatch.setattr(psutil, "process_iter", lambda names: processes)
    monkeypatch.setattr(psutil, "cpu_times", lambda: next(times))
    set_clock(monkeypatch, checks, monotonic=lambda: next(clock), process_time=lambda: 0.0)
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 2)
    found = checks.other_load(sleep=lambda _: None)
    assert found["processes"] == [{"pid": 2, "name": "encoder", "cores": 1.5}]
    assert found["cores"] == 1.5 and found["stolen_share"] == 0.1


def test_checks_import_nothing_heavy_before_they_run() -> None:
    """A package that cannot be imported is a finding of one check, and must not keep the others from running."""
    tree = ast.parse(Path(checks.__file__).read_text(encoding="utf-8"))
    names = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    heavy = [name for name in names if name.split(".")[0] not in sys.stdlib_module_names]
    assert [name for name in heavy if not name.startswith("localinfer.system.")] == []
