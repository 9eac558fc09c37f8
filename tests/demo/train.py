"""Train the demo model from nothing and write it as GGUF: corpus -> BPE -> training -> GGUF.

A developer's script; it needs torch and tokenizers. WORK is a folder for everything in between:

    python tests/demo/train.py prepare CORPUS WORK
    python tests/demo/train.py train WORK           # 75 minutes on one core; resumes
    python tests/demo/train.py export WORK OUT.gguf # newest checkpoint, verified in NumPy
    python tests/demo/train.py sample WORK PROMPT   # add --chat for a chat

The clock of the schedule is the process's CPU time, so that a paused training loses nothing.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from dialogues import BOS, EOS, IM_END, IM_START, SPECIAL_TOKENS, read_texts, render
from export import verify_gguf, write_gguf
from network import Shape
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training import Trainer, load_model

NUM_COPY_EXERCISES = 4000


def draw_copy_exercise(random: np.random.Generator) -> NDArray[np.uint16]:
    """Return random tokens, a few at a time, repeated two to five times.

    They teach attention to copy what stood after the same token before. Without them the model did not
    take the asked noun into its story within three million tokens.
    """
    pieces = []
    for _ in range(6):
        segment = random.integers(300, Shape.vocab_size, random.integers(3, 24), np.uint16)
        pieces += [segment] * int(random.integers(2, 6))
    return np.concatenate(pieces)


def prepare(corpus: Path, work: Path, seed: int) -> None:
    """Write the vocabulary and the encoded documents of each source into the work folder."""
    work.mkdir(parents=True, exist_ok=True)
    texts, held_out = read_texts(corpus, seed)
    vocabulary = work / "tokenizer.json"
    if not vocabulary.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=Shape.vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )  # fmt: skip
        stories = texts["stories"][: len(texts["stories"]) // 2]
        tokenizer.train_from_iterator(stories + texts["books"] + texts["talk"] + texts["grammar_chat"][:3000], trainer)
        tokenizer.save(str(vocabulary))
    tokenizer = Tokenizer.from_file(str(vocabulary))
    arrays: dict[str, NDArray[np.uint16]] = {}
    for source, documents in {**texts, "held_out": held_out}.items():
        encoded = [document.ids for document in tokenizer.encode_batch(documents)]
        arrays[source] = np.array([token for ids in encoded for token in ids], np.uint16)
        arrays[f"{source}.ends"] = np.cumsum([len(ids) for ids in encoded])
        print(f"{source}: {len(documents)} documents, {len(arrays[source])} tokens", flush=True)
    copies = [draw_copy_exercise(np.random.default_rng((seed, index))) for index in range(NUM_COPY_EXERCISES)]
    arrays["copies"] = np.concatenate(copies)
    arrays["copies.ends"] = np.cumsum([len(copy) for copy in copies])
    np.savez(work / "tokens.npz", **arrays)


@torch.no_grad()
def sample(prompt: str, arguments: argparse.Namespace) -> str:
    """Return the text that the newest checkpoint adds to the prompt."""
    model, _ = load_model(arguments.work)
    tokenizer = Tokenizer.from_file(str(arguments.work / "tokenizer.json"))
    if arguments.chat:
        prompt = render([("user", prompt)]) + f"{IM_START}assistant\n"
    token_ids = tokenizer.encode(BOS + prompt).ids
    num_prompt_tokens = len(token_ids)
    stop_ids = {tokenizer.token_to_id(EOS), tokenizer.token_to_id(IM_END)}
    generator = torch.Generator().manual_seed(arguments.seed)
    while len(token_ids) < num_prompt_tokens + arguments.max_tokens:
        logits = model(torch.tensor([token_ids]))[0, -1]
        if arguments.temperature > 0:
            shares = (logits / arguments.temperature).softmax(-1)
            chosen = int(torch.multinomial(shares, 1, generator=generator))
        else:
            chosen = int(logits.argmax())
        if chosen in stop_ids:
            break
        token_ids.append(chosen)
    return str(tokenizer.decode(token_ids[num_prompt_tokens:]))


def export(work: Path, path: Path) -> None:
    """Write the newest checkpoint as GGUF and prove the file against torch."""
    model, done = load_model(work)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    write_gguf(model, tokenizer, path)
    error = verify_gguf(model, tokenizer, path)
    megabytes = path.stat().st_size / 1e6
    print(f"{path}: step {done.step}, {megabytes:.1f} MB, relative error of the logits {error:.1e}")


def main() -> None:
    """Run one of the script's commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("corpus", type=Path)
    training = commands.add_parser("train")
    exporting = commands.add_parser("export")
    sampling = commands.add_parser("sample")
    for command in (preparing, training, exporting, sampling):
        command.add_argument("work", type=Path)
        command.add_argument("--seed", type=int, default=1)
    training.add_argument("--cpu-minutes", type=float, default=75.0)
    training.add_argument("--wall-minutes", type=float, default=110.0)
    training.add_argument("--tokens-per-step", type=int, default=4096)
    exporting.add_argument("output", type=Path)
    sampling.add_argument("prompts", nargs="+")
    sampling.add_argument("--chat", action="store_true")
    sampling.add_argument("--temperature", type=float, default=0.0)
    sampling.add_argument("--max-tokens", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if arguments.command == "prepare":
        prepare(arguments.corpus, arguments.work, arguments.seed)
    elif arguments.command == "train":
        trainer = Trainer(arguments.work, tokens_per_step=arguments.tokens_per_step, seed=arguments.seed)
        trainer.run(cpu_budget_seconds=arguments.cpu_minutes * 60, wall_budget_seconds=arguments.wall_minutes * 60)
    elif arguments.command == "export":
        export(arguments.work, arguments.output)
    else:
        for prompt in arguments.prompts:
            print(f">>> {prompt}\n{sample(prompt, arguments)}\n")


if __name__ == "__main__":
    main()
