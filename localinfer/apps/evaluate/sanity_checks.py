"""Sanity checks: ten questions with known answers, asked before and after quantization."""

from dataclasses import dataclass

from localinfer.llm import LLM
from localinfer.types import ProgressCallback

LONGEST_ANSWER = 96


@dataclass(frozen=True)
class Question:
    """A question, and words of which a right answer contains one."""

    text: str
    answers: tuple[str, ...]


QUESTIONS = (
    Question("What is the capital of Japan?", ("tokyo",)),
    Question("How many days does a leap year have?", ("366",)),
    Question("What is 17 plus 25?", ("42",)),
    Question("Which planet is closest to the sun?", ("mercury",)),
    Question("At how many degrees Celsius does water boil at sea level?", ("100", "hundred")),
    Question("Who wrote the play Romeo and Juliet?", ("shakespeare",)),
    Question("What is the opposite of 'hot'?", ("cold",)),
    Question("Which gas do plants take from the air to grow?", ("carbon dioxide", "co2", "co₂")),
    Question("What is the largest ocean on Earth?", ("pacific",)),
    Question("How many legs does a spider have?", ("8", "eight")),
)


@dataclass(frozen=True)
class Answer:
    """A model's answer to a question."""

    question: Question
    text: str

    @property
    def is_right(self) -> bool:
        return any(wanted in self.text.lower() for wanted in self.question.answers)


def ask(llm: LLM, *, progress: ProgressCallback = lambda *_: None) -> list[Answer]:
    """Ask all questions, each in its own conversation, with greedy decoding.

    progress: called with a stage's name, the questions answered and the total.
    Raises: RequestError if the model cannot chat, TemplateError if its template refuses a question.
    """
    answers = []
    for index, question in enumerate(QUESTIONS):
        progress("asking", index, len(QUESTIONS))
        completion = llm.chat(
            [{"role": "user", "content": f"{question.text} Answer in one short sentence."}],
            temperature=0.0,
            max_tokens=LONGEST_ANSWER,
        )
        answers.append(Answer(question, completion.text.strip()))
    return answers
