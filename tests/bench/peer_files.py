"""Run by a Python that has llama-cpp-python: what llama.cpp makes of a model, and what it says with one.

python peer_files.py quantize SOURCE TARGET FTYPE IMPORTANCE.npz: its quantizer, with importance by tensor.
python peer_files.py continue MODEL "1 2 3" COUNT: greedy token ids after given ones, on standard output.
"""

import ctypes
import sys

import llama_cpp
import numpy as np


def quantize(source: str, target: str, file_type: int, importance: str) -> None:
    with np.load(importance) as stored:
        arrays = {name: np.ascontiguousarray(stored[name], np.float32) for name in stored.files}
    entries = (llama_cpp.llama_model_imatrix_data * (len(arrays) + 1))()
    for entry, (name, values) in zip(entries, arrays.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.imatrix = file_type, entries
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not quantize {source}")


def continue_text(model: str, prompt: list[int], count: int) -> None:
    llm = llama_cpp.Llama(model, n_ctx=256, logits_all=False, verbose=False)
    generated = llm.generate(prompt, temp=0.0, repeat_penalty=1.0)
    print(*(next(generated) for _ in range(count)))


if sys.argv[1] == "quantize":
    quantize(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
else:
    continue_text(sys.argv[2], [int(word) for word in sys.argv[3].split()], int(sys.argv[4]))
