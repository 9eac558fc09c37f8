"""Advice of `localinfer doctor` follows from facts alone, most effective first."""

import copy
from typing import Any

import pytest

from localinfer.apps.doctor.advice import advise
from localinfer.apps.doctor.checks import faster_instructions
from tests.apps.doctor.machines import CALM_MACHINE


def machine(**changes: dict[str, Any]) -> dict[str, Any]:
    """A machine on which nothing is wrong, with changed facts."""
    facts = copy.deepcopy(CALM_MACHINE)
    for name, values in changes.items():
        facts[name] |= values
    return facts


def texts(**changes: dict[str, Any]) -> list[str]:
    """Advice beyond that of the calm machine."""
    usual = {advice.text for advice in advise(CALM_MACHINE)}
    return [advice.text for advice in advise(machine(**changes)) if advice.text not in usual]


def test_a_calm_machine_gets_what_its_memory_says_only() -> None:
    (advice,) = advise(CALM_MACHINE)
    assert advice.text.startswith("Memory is read at 40 GB/s, which bounds decoding: a model of half the bytes")


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (
            {"gpu": {"has_driver": True, "reason": "numba-cuda is missing"}},
            "its GPU is not used: numba-cuda is missing",
        ),
        ({"threads": {"quota": 1.5}}, "The cgroup allows 1.5 of 8 cores"),
        ({"threads": {"allowed": 2}}, "may run on 2 of 8 cores"),
        ({"load": {"stolen_share": 0.2}}, "The hypervisor takes 20 %"),
        ({"cpu": {"kernels": "generic"}}, "LOCALINFER_ISA selects generic kernels, and this CPU runs avx2"),
        ({"cpu": {"max_mhz": 4000, "limit_mhz": 1400}}, "The clock is limited to 1400 of 4000 MHz"),
        ({"cpu": {"is_saving": True, "governor": "powersave"}}, "its governor is powersave"),
        ({"cpu": {"is_saving": True, "profile": "low-power"}}, "the power profile is low-power"),
        ({"cpu": {"is_saving": True, "preference": "power"}}, "its energy preference is power"),
        ({"cpu": {"on_battery": True}}, "runs on its battery"),
        ({"cpu": {"faster_elsewhere": ["AVX-512 VNNI", "AVX-VNNI"]}}, "This CPU lacks AVX-512 VNNI or AVX-VNNI"),
        ({"kernels": {"folder": None}}, "Compiled kernels cannot be kept, so every start takes about 17 s longer"),
        ({"kernels": {"is_compiled": False}}, "the first start takes about 17 s, once"),
        ({"memory": {"huge_pages": "never"}}, "Huge pages are off"),
        ({"memory": {"available_bytes": 10**9}}, "Only 1.0 of 64.0 GB of memory are free"),
        ({"prompt_cache": {"is_writable": False}}, "/c/conversations cannot be written"),
        ({"disk": {"caches": {"folder": "/c", "free_bytes": 10**9, "total_bytes": 10**11}}}, "Only 1.0 GB are free"),
    ],
)
def test_each_fact_has_its_advice(changes: dict[str, Any], wanted: str) -> None:
    (text,) = texts(**changes)
    assert wanted in text


def test_models_whose_templates_write_the_date_are_named() -> None:
    (model,) = CALM_MACHINE["models"]["found"]
    found = [{**model, "name": f"m{index}", "writes_date": index != 3} for index in range(8)]
    (text,) = texts(models={"found": found})
    assert text.startswith("The chat templates of m0, m1, m2, m4, m5 and 2 more write the date into every prompt")
    assert "--chat-template-kwargs template_date=2026-10-01" in text


def test_programs_on_cores_that_are_left_free_are_no_trouble() -> None:
    busy = {"cores": 1.2, "processes": [{"pid": 12, "name": "ffmpeg", "cores": 1.2}]}
    (text,) = texts(load=busy)
    assert "Other programs keep 1.2 cores busy (ffmpeg (process 12) 1.2)" in text
    assert "--threads" not in text, "steps choose fewer threads by themselves"
    assert texts(load=busy, threads={"used": 6}) == []


def test_bandwidth_says_what_limits_it() -> None:
    saturated = {"bytes_per_second_of_one_thread": 38e9}
    assert "more cores speed up prompts only" in advise(machine(bandwidth=saturated))[0].text
    growing = {"bytes_per_second_of_one_thread": 5.5e9}
    assert "still grows with every thread" in advise(machine(bandwidth=growing))[0].text
    # What threads read beside busy programs says nothing about cores.
    assert advise(machine(bandwidth=growing, load={"cores": 0.5}, threads={"used": 4})) == advise(CALM_MACHINE)
    single = {"modules": [{"num_bytes": 16 << 30, "mega_transfers": 3200}]}
    assert "a single memory module is fitted" in advise(machine(memory=single))[0].text


def test_the_most_effective_comes_first_and_failed_checks_give_none() -> None:
    facts = machine(
        threads={"quota": 4.0}, gpu={"has_driver": True, "reason": "x"}, cpu={"max_mhz": 4000, "limit_mhz": 1000}
    )
    found = advise(facts)
    assert [round(advice.factor) for advice in found] == [10, 4, 2, 0]
    facts["threads"] = facts["cpu"] = {"error": "RuntimeError"}
    assert [round(advice.factor) for advice in advise(facts)] == [10, 0]


def test_instructions_that_would_be_faster() -> None:
    assert faster_instructions("amx", "x86_64", {}) == []
    assert faster_instructions("avx512vnni", "x86_64", {}) == [], "what AMX gains was not measured"
    assert faster_instructions("avx2", "AMD64", {}) == ["AVX-512 VNNI", "AVX-VNNI"]
    assert faster_instructions("generic", "x86_64", {}) == ["AVX-512 VNNI", "AVX-VNNI", "AVX2"]
    assert faster_instructions("generic", "aarch64", {"dotprod": False}) == ["dot products (ARMv8.2)"]
    assert faster_instructions("generic", "aarch64", {}) == [], "not known to be absent"
    assert faster_instructions("neon", "arm64", {"dotprod": True, "i8mm": False}) == ["products of matrices (i8mm)"]
    assert faster_instructions("i8mm", "arm64", {"dotprod": True, "i8mm": True}) == []
