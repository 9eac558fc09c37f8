"""Facts of a machine on which nothing is wrong, in the shape of `localinfer.apps.doctor.checks`."""

from typing import Any

CALM_MACHINE: dict[str, Any] = {
    "load": {"cores": 0.1, "stolen_share": 0.0, "processes": []},
    "cpu": {
        "name": "Some CPU",
        "kernels": "avx2",
        "fastest_here": "avx2",
        "amx_refusal": None,
        "faster_elsewhere": [],
        "governor": "performance",
        "driver": "acpi-cpufreq",
        "preference": None,
        "profile": None,
        "max_mhz": 4000,
        "limit_mhz": 4000,
        "on_battery": None,
        "is_saving": False,
    },
    "threads": {
        "physical_cores": 8,
        "performance_cores": 0,
        "efficiency_cores": 0,
        "hardware_threads": 16,
        "allowed": 16,
        "quota": None,
        "used": 8,
    },
    "memory": {
        "total_bytes": 64 * 10**9,
        "available_bytes": 48 * 10**9,
        "swap_bytes": 0,
        "limited_by": None,
        "huge_pages": "madvise",
        "modules": None,
    },
    "bandwidth": {
        "num_threads": 8,
        "bytes_per_second": 40e9,
        "bytes_per_second_of_one_thread": 12e9,
        "tokens_per_second_per_gb": 40.0,
    },
    "gpu": {
        "has_driver": False,
        "name": None,
        "free_bytes": None,
        "others": [],
        "reason": "no NVIDIA driver is installed",
    },
    "kernels": {
        "folder": "/c/kernels/key",
        "num_compiled": 35,
        "pack": None,
        "num_bytes": 400_000,
        "is_compiled": True,
        "first_start_seconds": 17,
    },
    "prompt_cache": {"folder": "/c/conversations", "num_bytes": 12_000_000, "max_bytes": 4 << 30, "is_writable": True},
    "crashes": {"folder": "/s/crashes", "reports": []},
    "disk": {"caches": {"folder": "/c", "free_bytes": 50 * 10**9, "total_bytes": 10**12}},
    "versions": {"localinfer": "1", "python": "3.12", "torch": None, "system": "Linux"},
    "config": {"lines": ["configuration: /home/me/config.toml", "  threads = 4"]},
    "models": {
        "found": [
            {
                "name": "a/b:Q4_0",
                "num_bytes": 4 * 10**9,
                "source": "ollama",
                "path": "/x",
                "problem": None,
                "writes_date": False,
            }
        ]
    },
}
