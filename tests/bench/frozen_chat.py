"""A small application that `bench_frozen.py` freezes: it loads the default model, answers, chats and constrains.

Started with the time at which that was, it prints one JSON object: seconds since then, and what the model wrote.
"""

import json
import os
import sys
import time

import localinfer


def main() -> None:
    """Do everything once."""
    started = float(sys.argv[1])
    reports = [time.time()]

    def progress(stage: str, done: int, total: int) -> None:
        reports.append(time.time())
        stages.setdefault(stage.partition(":")[0], time.time() - started)

    stages: dict[str, float] = {}
    with localinfer.load(progress=progress) as llm:
        loaded = time.time()
        reports.append(loaded)
        text = llm.complete("Once upon a time", max_tokens=8, seed=1).text
        answered = time.time()
        chat = llm.chat([{"role": "user", "content": "Hi"}], max_tokens=8, seed=1).text
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        constraint = localinfer.JsonSchema({**schema, "additionalProperties": False})
        constrained = llm.complete("x", constraint=constraint, max_tokens=64, seed=1).text
    from localinfer.kernels.jit import object_cache

    folder = object_cache.cache_folder()
    print(
        json.dumps(
            {
                "main_seconds": reports[0] - started,
                "load_seconds": loaded - started,
                "answer_seconds": answered - started,
                "longest_silence_seconds": max(b - a for a, b in zip(reports, reports[1:], strict=False)),
                "num_reports": len(reports),
                "stages": stages,
                "text": text,
                "chat": chat,
                "constrained": json.loads(constrained),
                "key": None if folder is None else folder.name,
                "has_numba": "numba" in sys.modules,
                "process": os.getpid(),
            }
        )
    )


if __name__ == "__main__":
    localinfer.freeze_support()
    main()
