"""The modules and files that an application with models needs and that its imports do not show.

Public names and kernels are imported by name, the default model and the list of known ones are files, and versions are
part of the cache's key. Modules for a GPU are left out: an application for one names torch and numba_cuda as hidden
imports itself.
"""

from pathlib import Path

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

from localinfer import _MODULE_OF
from localinfer.models import checks, demo

hiddenimports = [
    *_MODULE_OF.values(),
    *collect_submodules("localinfer.kernels", filter=lambda name: ".cuda.compiled" not in name),
    *collect_submodules("localinfer.models", filter=lambda name: ".calibration" not in name),
]
datas = [
    (str(Path(demo.__file__).with_name("demo-f16.gguf")), "localinfer/models/demo"),
    (str(Path(checks.__file__).with_name("known_models.json")), "localinfer/models/checks"),
    *collect_data_files("localinfer.kernels", includes=["packs/*.pack"]),
]
for package in ("localinfer", "numba", "llvmlite"):
    datas += copy_metadata(package)
excludedimports = ["torch", "numba_cuda", "numba.cuda", "cuda", "matplotlib", "llama_cpp"]
