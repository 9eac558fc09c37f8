"""Texts and small edits of them, as somebody would ask a model for: what speculation should be good at."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "edit_texts"


@dataclass(frozen=True)
class EditTask:
    """A text of some 600 tokens, what is asked, and the text with that done."""

    name: str
    instruction: str
    source: str
    result: str

    @property
    def prompt(self) -> str:
        """The text and the instruction, as a plain prompt."""
        return f"{self.source}\n{self.instruction}\n\n"


def _task(file: str, name: str, instruction: str, edits: Sequence[tuple[str, str]]) -> EditTask:
    source = result = (_FOLDER / f"{file}.txt").read_text("utf-8")
    for before, after in edits:
        assert before in result, f"{file}.txt has no {before!r}"
        result = result.replace(before, after)
    return EditTask(name, instruction, source, result)


def edit_tasks() -> list[EditTask]:
    """Every task, in a fixed order."""
    return [
        _task(
            "lighthouse",
            "a name changed in a story",
            "Call the keeper Sigrid Halvorsen instead.",
            [("Martha Finn", "Sigrid Halvorsen"), ("Martha", "Sigrid")],
        ),
        _task(
            "lighthouse",
            "a paragraph inserted in a story",
            "Add a paragraph about the gull after the boy's rescue.",
            [
                (
                    '"Can they see my light',
                    "The one-eyed gull had followed them in and stood on the window sill, looking at the soup. Tom "
                    "held out a piece of bread, and the gull took it from his fingers as if it had known him for "
                    "years.\n\n"
                    '"Can they see my light',
                )
            ],
        ),
        _task(
            "letter",
            "dates and prices changed in a letter",
            "The letter came on 12 April, the tea costs fifty pence, and the work ends in October.",
            [("3 March", "12 April"), ("forty pence", "fifty pence"), ("the end of September", "the end of October")],
        ),
        _task(
            "letter",
            "a paragraph removed from a letter",
            "Leave out the paragraph about the tea.",
            [
                (
                    "Third, the tea. The committee agrees that hot tea would help. It does not agree that it should "
                    "be served among the maps. From Monday on there will be a table with tea in the hall, under the "
                    "portrait of the founder, at the price of forty pence a cup. Please leave the cups on the table "
                    "and not on the portrait, as has happened in the past.\n\n",
                    "",
                )
            ],
        ),
        _task(
            "sampler",
            "a method renamed",
            "Rename the method _adjust to _with_penalties.",
            [("_adjust(", "_with_penalties(")],
        ),
        _task(
            "page_pool",
            "a method renamed in two places",
            "Rename acquire to take and release to give_back.",
            [("acquire", "take"), ("release(", "give_back(")],
        ),
        _task(
            "text_stream",
            "a variable renamed",
            "Rename values to requested.",
            [("values", "requested")],
        ),
        _task(
            "thread_choice",
            "an argument added",
            "Give every function that takes num_threads an argument device before it.",
            [
                ("(num_threads: int", "(device: str, num_threads: int"),
                ("(program.num_threads", "(device, program.num_threads"),
            ],
        ),
        _task(
            "stop_matcher",
            "a check inserted at the start of each method",
            "Raise ClosedError in push and flush if the matcher was closed.",
            [
                (
                    "    def push(self",
                    "    def close(self) -> None:\n"
                    '        """Refuse whatever comes from now on."""\n'
                    "        self._closed = True\n\n"
                    "    def push(self",
                )
            ],
        ),
        _task(
            "conversation",
            "a class renamed and a property inserted",
            "Rename Conversation to Dialogue and add a property num_turns.",
            [
                ("class Conversation:", "class Dialogue:"),
                (
                    "    def clear(self)",
                    "    @property\n"
                    "    def num_turns(self) -> int:\n"
                    '        """How many messages there are without the system message."""\n'
                    "        return len(self._turns)\n\n"
                    "    def clear(self)",
                ),
            ],
        ),
        _task(
            "network",
            "a type renamed",
            "Import Tensor as Array and use that name.",
            [("from torch import Tensor, nn", "from torch import Tensor as Array, nn"), (": Tensor", ": Array")],
        ),
        _task(
            "network",
            "numbers changed",
            "Make the model twice as wide and four layers deeper.",
            [
                ("hidden_size: int = 256", "hidden_size: int = 512"),
                ("intermediate_size: int = 768", "intermediate_size: int = 1536"),
                ("num_layers: int = 6", "num_layers: int = 10"),
                ("num_heads: int = 4", "num_heads: int = 8"),
            ],
        ),
        _task(
            "readme",
            "a product renamed",
            "The program is now called hearth.",
            [("localinfer", "hearth")],
        ),
        _task(
            "contributing",
            "a section inserted in a document",
            "Add a section on reporting errors before 'What a change looks like'.",
            [
                (
                    "## What a change looks like",
                    "## Reporting an error\n\n"
                    "Say which command you ran, what you expected and what came instead, and add the output of the "
                    "same command with `--stats`. If a model is needed to see it, name a small one.\n\n"
                    "## What a change looks like",
                )
            ],
        ),
        _task(
            "model_card",
            "figures changed in tables",
            "The model now has 8 layers, 7.21 million parameters and a context of 2048 tokens.",
            [("6 layers", "8 layers"), ("5.77 million", "7.21 million"), ("1024 tokens", "2048 tokens")],
        ),
        _task(
            "kernels",
            "a folder renamed in a table",
            "The folder cpu/ is now called host/.",
            [("`cpu/", "`host/"), ("CpuTape", "HostTape"), ("CpuProgram", "HostProgram")],
        ),
    ]
