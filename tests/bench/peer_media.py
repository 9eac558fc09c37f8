"""Run by a Python that has llama-cpp-python with libmtmd: what it makes of pictures, and how long it takes.

python peer_media.py MODEL MMPROJ THREADS: then reads lines `encode PICTURE TARGET.npy` and `first PICTURE PROMPT`,
where PROMPT is JSON of a text with libmtmd's mark in it, and answers each with a line of JSON: its seconds, also on
processors, and the likeliest token of the second. All settings but the threads are the library's own.
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import mtmd_cpp


class Peer:
    """A model with its encoder, and a context of its own for prompts."""

    def __init__(self, model: str, mmproj: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._keep = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._keep, None)
        mtmd_cpp.mtmd_log_set(self._keep, None)
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_threads, settings.n_threads_batch = 4096, threads, threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self._num_batch = settings.n_batch
        parameters = mtmd_cpp.mtmd_context_params_default()
        parameters.n_threads, parameters.print_timings, parameters.use_gpu = threads, False, False
        self._media = mtmd_cpp.mtmd_init_from_file(mmproj.encode(), self._model, parameters)
        if not self._media:
            raise SystemExit(f"libmtmd could not load {mmproj}")

    def chunks(self, picture: str, prompt: str) -> Any:
        """The chunks of a prompt with one picture, decoded from a file's bytes."""
        data = Path(picture).read_bytes()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd_cpp.mtmd_helper_bitmap_init_from_buf(self._media, buffer, len(data), False)
        text = mtmd_cpp.mtmd_input_text(prompt.encode(), len(prompt.encode()), True, True)
        found = mtmd_cpp.mtmd_input_chunks_init()
        bitmaps = (ctypes.c_void_p * 1)(bitmap)
        if mtmd_cpp.mtmd_tokenize(self._media, found, ctypes.byref(text), bitmaps, 1):
            raise SystemExit(f"libmtmd could not read {picture}")
        mtmd_cpp.mtmd_bitmap_free(bitmap)
        return found

    def encode(self, picture: str, target: str) -> dict[str, Any]:
        chunks = self.chunks(picture, mtmd_cpp.mtmd_default_marker().decode())
        kind = mtmd_cpp.MTMD_INPUT_CHUNK_TYPE_IMAGE
        count = mtmd_cpp.mtmd_input_chunks_size(chunks)
        found = [mtmd_cpp.mtmd_input_chunks_get(chunks, index) for index in range(count)]
        (chunk,) = (one for one in found if mtmd_cpp.mtmd_input_chunk_get_type(one) == kind)
        begin = _clocks()
        if mtmd_cpp.mtmd_encode_chunk(self._media, chunk):
            raise SystemExit("libmtmd could not encode the picture")
        seconds = _since(begin)
        shape = (mtmd_cpp.mtmd_input_chunk_get_n_tokens(chunk), llama_cpp.llama_model_n_embd_inp(self._model))
        np.save(target, np.ctypeslib.as_array(mtmd_cpp.mtmd_get_output_embd(self._media), shape))
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        return {"seconds": seconds}

    def first(self, picture: str, prompt: str) -> dict[str, Any]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        begin = _clocks()
        chunks, end = self.chunks(picture, prompt), llama_cpp.llama_pos(0)
        if mtmd_cpp.mtmd_helper_eval_chunks(
            self._media, self._context, chunks, 0, 0, self._num_batch, True, ctypes.byref(end)
        ):
            raise SystemExit("libmtmd could not compute the prompt")
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (size,))
        token = int(logits.argmax())
        seconds = _since(begin)
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        return {"seconds": seconds, "token": token}


def _clocks() -> tuple[float, float]:
    """Time, and the process's time on processors."""
    return time.perf_counter(), time.process_time()


def _since(begin: tuple[float, float]) -> list[float]:
    return [now - before for now, before in zip(_clocks(), begin, strict=True)]


def main() -> None:
    peer = Peer(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"marker": mtmd_cpp.mtmd_default_marker().decode()}), flush=True)
    for line in sys.stdin:
        command, *words = line.rstrip("\n").split(" ", 2)
        answer = peer.encode(*words) if command == "encode" else peer.first(words[0], json.loads(words[1]))
        print(json.dumps(answer), flush=True)


main()
