"""Run by a Python that has llama-cpp-python: what llama.cpp makes of a model, and what it says with one.

python peer_files.py quantize SOURCE TARGET FTYPE IMATRIX.gguf: its quantizer, with importance as its tools read it.
python peer_files.py quantize-all SOURCE FOLDER IMATRIX.gguf: the same in every type it has, each named on a line.
python peer_files.py continue MODEL "1 2 3" COUNT: greedy token ids after given ones, on standard output.
python peer_files.py logits MODEL "1 2 3" TARGET.npy [NAME=NUMBER ...]: logits after each of the ids, float32[ids,
vocabulary], by a model loaded with these options.
python peer_files.py embedding MODEL "1 2 3" TARGET.npy: what it pools of a text, float32[size], or a reranker's scores.
python peer_files.py tokens VOCABULARY TEXTS.json: its ids of every text, without special tokens, as JSON.
"""

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp import _ctypes_extensions
from numpy.typing import NDArray


class _InitParams(ctypes.Structure):
    """`gguf_init_params` of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p)))


def read_importance(path: str) -> dict[str, NDArray[np.float32]]:
    """Mean squares of a GGUF imatrix, by ggml's own reader, as llama-quantize takes them."""
    ggml = _ctypes_extensions.load_shared_library("ggml-base", Path(llama_cpp.__file__).parent / "lib")
    ggml.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    ggml.gguf_find_key.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    ggml.gguf_find_key.restype = ggml.ggml_nelements.restype = ctypes.c_int64
    ggml.ggml_get_name.restype = ctypes.c_char_p
    ggml.ggml_get_data_f32.restype = ctypes.POINTER(ctypes.c_float)
    for function in (ggml.gguf_init_from_file, ggml.ggml_get_first_tensor, ggml.ggml_get_next_tensor):
        function.restype = ctypes.c_void_p
    ggml.ggml_get_next_tensor.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    for function in (ggml.ggml_get_first_tensor, ggml.ggml_get_name, ggml.ggml_nelements, ggml.ggml_get_data_f32):
        function.argtypes = [ctypes.c_void_p]
    context = ctypes.c_void_p()
    file = ggml.gguf_init_from_file(path.encode(), _InitParams(False, ctypes.pointer(context)))
    if not file:
        raise SystemExit(f"ggml could not read {path}")
    for key in (b"imatrix.datasets", b"imatrix.chunk_count", b"imatrix.chunk_size"):
        if ggml.gguf_find_key(file, key) < 0:
            raise SystemExit(f"{path} lacks {key.decode()}, which llama-quantize wants")
    arrays, tensor = {}, ggml.ggml_get_first_tensor(context)
    while tensor:
        values = np.ctypeslib.as_array(ggml.ggml_get_data_f32(tensor), (ggml.ggml_nelements(tensor),))
        arrays[ggml.ggml_get_name(tensor).decode()] = values
        tensor = ggml.ggml_get_next_tensor(context, tensor)
    found = {}
    for name, sums in arrays.items():
        if name.endswith(".in_sum2"):
            weight = name.removesuffix(".in_sum2")
            counts = arrays[f"{weight}.counts"]
            found[weight] = (sums.reshape(counts.size, -1) / counts[:, None]).reshape(-1)
    return found


def quantize(source: str, target: str, file_type: int, imatrix: str) -> None:
    if not write_quantized(source, target, file_type, read_importance(imatrix)):
        raise SystemExit(f"llama.cpp could not quantize {source}")


def quantize_all(source: str, folder: str, imatrix: str) -> None:
    """It refuses the types that it has only names of any more."""
    arrays = read_importance(imatrix)
    prefix = "LLAMA_FTYPE_MOSTLY_"
    for name in (name for name in dir(llama_cpp) if name.startswith(prefix)):
        short = name.removeprefix(prefix)
        if write_quantized(source, f"{folder}/{short}.gguf", getattr(llama_cpp, name), arrays):
            print(short)


def write_quantized(source: str, target: str, file_type: int, arrays: dict[str, NDArray[np.float32]]) -> bool:
    """Whether it did."""
    entries = (llama_cpp.llama_model_imatrix_data * (len(arrays) + 1))()
    for entry, (name, values) in zip(entries, arrays.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.imatrix = file_type, entries
    return not llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))


def continue_text(model: str, prompt: list[int], count: int) -> None:
    llm = llama_cpp.Llama(model, n_ctx=256, logits_all=False, verbose=False)
    generated = llm.generate(prompt, temp=0.0, repeat_penalty=1.0)
    print(*(next(generated) for _ in range(count)))


def write_logits(model: str, token_ids: list[int], target: str, options: dict[str, float]) -> None:
    settings = {"n_ctx": 256, "logits_all": True, "verbose": False, **options}
    llm = llama_cpp.Llama(model, **settings)
    llm.eval(token_ids)
    np.save(target, np.array(llm.scores[: len(token_ids)], np.float32))


def write_embedding(model: str, token_ids: list[int], target: str) -> None:
    llm = llama_cpp.Llama(model, n_ctx=256, n_batch=256, n_ubatch=256, embedding=True, verbose=False)
    batch = llama_cpp.llama_batch_init(len(token_ids), 0, 1)
    batch.n_tokens = len(token_ids)
    for position, token_id in enumerate(token_ids):
        batch.token[position], batch.pos[position] = token_id, position
        batch.n_seq_id[position], batch.seq_id[position][0], batch.logits[position] = 1, 0, 1
    if llama_cpp.llama_decode(llm.ctx, batch):
        raise SystemExit(f"llama.cpp could not compute {model}")
    is_ranked = llama_cpp.llama_pooling_type(llm.ctx) == llama_cpp.LLAMA_POOLING_TYPE_RANK
    size = llama_cpp.llama_model_n_cls_out(llm.model) if is_ranked else llm.n_embd()
    pooled = llama_cpp.llama_get_embeddings_seq(llm.ctx, 0)
    np.save(target, np.ctypeslib.as_array(pooled, (size,)).astype(np.float32))


def print_tokens(vocabulary: str, texts: str) -> None:
    llm = llama_cpp.Llama(vocabulary, vocab_only=True, verbose=False)
    found = [llm.tokenize(text.encode(), False, False) for text in json.loads(Path(texts).read_text())]
    print(json.dumps(found))


if sys.argv[1] == "quantize":
    quantize(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
elif sys.argv[1] == "quantize-all":
    quantize_all(sys.argv[2], sys.argv[3], sys.argv[4])
elif sys.argv[1] == "logits":
    pairs = (word.split("=") for word in sys.argv[5:])
    numbers = {name: float(value) if "." in value else int(value) for name, value in pairs}
    write_logits(sys.argv[2], [int(word) for word in sys.argv[3].split()], sys.argv[4], numbers)
elif sys.argv[1] == "embedding":
    write_embedding(sys.argv[2], [int(word) for word in sys.argv[3].split()], sys.argv[4])
elif sys.argv[1] == "tokens":
    print_tokens(sys.argv[2], sys.argv[3])
else:
    continue_text(sys.argv[2], [int(word) for word in sys.argv[3].split()], int(sys.argv[4]))
