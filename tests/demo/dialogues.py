"""The demo model's training texts: books, TinyStories and dialogues, marked up for chat or left plain."""

import random
import re
from pathlib import Path

from story_grammar import (
    ANIMALS,
    BOYS,
    GIRLS,
    HERO_TRAITS,
    PEOPLE,
    THINGS,
    TOPICS,
    Subject,
    invent_word,
    plural,
    read_sections,
    with_article,
    write_story,
)

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_START, IM_END = SPECIAL_TOKENS
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
EVALUATION_BOOKS = frozenset({"railway-children.txt", "sherlock.txt", "tinystories-sample.txt"})
NUM_GRAMMAR_CHATS = 16000
NUM_TALKS = 9000

REQUESTS = (
    "tell me a story about {a}|Tell me a story about {a}.|Can you tell me a story about {a}?|tell me a short story about {a}"
    "|Please tell me a story about {a}.|write a story about {a}|Write a short story about {a}.|I want a story about {a}."
    "|Could you write me a little story about {a}?|a story about {a} please|story about {a}|Make up a story about {a}."
    "|I would like to hear a story about {a}.|Do you know a story about {a}?|give me a story about {a}|Tell me about {a}."
    "|Once more, please: a story about {a}.|Tell a story with {a} in it.|Let's hear a tale about {a}!|Tell us a tale about {a}."
    "|tell me a bedtime story about {a}|Write me a bedtime story with {a}.|Can I have a story about {a}?|{a}, please!"
    "|tell a story about {a}|hey, tell me a story about {a}|Hi! Can you tell me a story about {a}?|tell me something about {a}"
).split("|")
OPEN_REQUESTS = (
    "tell me a story|Tell me a story.|Can you tell me a story?|Please tell me a story.|a story please|Write a short story."
    "|I would like to hear a story.|tell me a bedtime story|Tell me something nice.|write a story|story|Surprise me!"
    "|Tell me any story you like.|I am bored. Tell me a story.|I can't sleep. Please tell me a story.|one story please"
).split("|")
MORE_REQUESTS = (
    "Another one about {a}, please.|Now one about {a}.|And now a story about {a}.|One more, about {a}!|now tell me one about {a}"
    "|Great! Can you do {a} now?|What about {a}?|Nice. Tell me another one about {a}.|another story about {a}"
).split("|")
LEAD_INS = (
    "|||||||||Of course!|Sure!|Here is a story for you.|Here is a story about {a}.|Yes! Listen.|I would love to.".split(
        "|"
    )
)
PRAISES = (
    "That was nice!|I like it.|Great story!|lovely|That was fun.|good story|Wow, thank you!|nice|I liked that.|thank you"
    "|Thanks for the story!|what a nice story|that is so cute|Very good!|haha, that was funny|cool"
).split("|")
PRAISE_ANSWERS = (
    "I am glad that you like it! Do you want another one?|Thank you! Tell me a word, and I will make a story about it."
    "|Thank you! I made it up just for you.|You are welcome! Shall I tell you one more?|I am happy that you liked it."
    "|You are welcome! Ask me for another story whenever you like."
).split("|")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.|You are a friendly assistant.|You tell stories to children.|Be short and kind."
    "|You are the demo model of localinfer."
).split("|")
NOUN = re.compile(r"[a-z]+")
SINGULARS = {plural(noun): noun for noun in TOPICS}
TOO_COMMON = frozenset(
    "boy girl baby man woman child mother father brother sister saw watch toy game well card".split()
)
STORY_NAMES = {
    **dict.fromkeys(GIRLS, True),
    **dict.fromkeys(
        "Lila Sue Sarah Sally Jen Jill Elly Polly Jenny Grace Mae Claire June Rachel Milly Millie Emmy".split(), True
    ),
    **dict.fromkeys(BOYS, False),
    **dict.fromkeys("Timmy John Tommy Benny Jimmy Andy Jim Ted Freddy James Russel Frank".split(), False),
}
"""Names that TinyStories use, and whether they are a girl's."""
Message = tuple[str, str]


def render(messages: list[Message]) -> str:
    """Return (role, text) pairs in the model's chat markup."""
    return "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in messages)


def read_stories(path: Path) -> list[str]:
    """Split a TinyStories extract, whose stories touch and whose paragraphs are set apart by blank lines."""
    text = path.read_text(encoding="utf-8")
    for damaged, right in (
        ("â€œ", '"'),
        ("â€™", "'"),
        ("â€˜", "'"),
        ("â€”", " - "),
        ("â€“", " - "),
        ("â€¦", "..."),
        ("â€\x9d", '"'),
        ("â€", '"'),
    ):
        text = text.replace(damaged, right)
    text = text.translate(str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'"}))
    stories: list[list[str]] = []
    after_blank = False
    for line in text.splitlines():
        if not line.strip():
            after_blank = True
            continue
        if not stories or not after_blank:
            stories.append([])
        stories[-1].append(line.strip())
        after_blank = False
    joined = ["\n\n".join(paragraphs) for paragraphs in stories]
    return [story for story in joined if len(story) >= 350 and story.isascii()]


def read_book_passages(path: Path, passage_characters: int = 1800) -> list[str]:
    """Cut a book into passages that end with a paragraph, without its front matter."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))]
    passages, current = [], ""
    for paragraph in paragraphs[12:]:
        if len(paragraph) < 40 or paragraph.isupper():
            continue
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if len(current) >= passage_characters:
            passages.append(current)
            current = ""
    return passages


def topics_of(story: str) -> list[str]:
    """Return the known nouns that a story names at its start and repeats, the most frequent first."""
    counts: dict[str, int] = {}
    for word in NOUN.findall(story.lower()):
        noun = word if word in TOPICS else SINGULARS.get(word, "")
        if noun and noun not in TOO_COMMON:
            counts[noun] = counts.get(noun, 0) + 1
    early = {SINGULARS.get(word, word) for word in NOUN.findall(story[:200].lower())}
    repeated = [noun for noun, count in counts.items() if count >= 3 and noun in early]
    return sorted(repeated, key=lambda noun: -counts[noun])[:2]


def rename(rng: random.Random, story: str) -> str:
    """Return the story with its people renamed, so that many readings do not end in learning it by heart."""
    found = {name for name in re.findall(r"\b[A-Z][a-z]+\b", story) if name in STORY_NAMES}
    new_names: dict[str, str] = {}
    for name in sorted(found):
        pool = [x for x in (GIRLS if STORY_NAMES[name] else BOYS) if x not in found and x not in new_names.values()]
        new_names[name] = rng.choice(pool)
    return re.sub(r"\b[A-Z][a-z]+\b", lambda match: new_names.get(match[0], match[0]), story)


def swap_hero(story: str, hero: str, new_hero: str) -> str:
    """Return the story told about another animal or person, articles and plurals following."""
    story = re.sub(rf"\b([Aa])n? {hero}\b", lambda m: m[1] + with_article(new_hero)[1:], story)
    story = re.sub(rf"\b{plural(hero)}\b", plural(new_hero), story)
    return re.sub(rf"\b{hero}\b", new_hero, re.sub(rf"\b{hero.capitalize()}\b", new_hero.capitalize(), story))


def _noun_phrase(rng: random.Random, subject: Subject) -> str:
    noun = subject.noun
    if not (subject.name or subject.trait or subject.other) and rng.random() < 0.15:
        return rng.choice((plural(noun), f"the {noun}"))
    phrase = with_article(f"{subject.trait} {noun}" if subject.trait else noun)
    if subject.name:
        phrase += rng.choice((" named ", " called ")) + subject.name
    return f"{phrase} and {with_article(subject.other)}" if subject.other else phrase


def _casual(rng: random.Random, text: str) -> str:
    """Write a request as people type: often without capitals or a final stop."""
    if rng.random() < 0.35:
        text = text.rstrip(".!?").lower() if rng.random() < 0.6 else text.rstrip(".")
    return text


def _story_turn(rng: random.Random, requests: list[str], subject: Subject, story: str) -> list[Message]:
    phrase = _noun_phrase(rng, subject)
    lead_in = rng.choice(LEAD_INS).format(a=phrase)
    answer = f"{lead_in}\n\n{story}" if lead_in else story
    return [("user", _casual(rng, rng.choice(requests).format(a=phrase))), ("assistant", answer)]


def draw_subject(rng: random.Random) -> Subject:
    """Draw what a user asks for: mostly one noun, sometimes with a name, a trait or a second noun.

    Some nouns are compounds or do not exist: only copying them from the request gets them right.
    """
    noun = rng.choice(list(TOPICS))
    kind = TOPICS[noun]
    form = rng.random()
    if form < 0.08:
        noun, kind = invent_word(rng), rng.choice(("hero", "thing", "place"))
    elif form < 0.16 and kind != "hero":
        noun = f"{rng.choice(THINGS)} {noun}"
    name = trait = other = ""
    if kind == "hero":
        if rng.random() < 0.2:
            name = rng.choice(GIRLS + BOYS) if rng.random() < 0.4 else invent_word(rng).capitalize()
        trait = rng.choice(HERO_TRAITS) if rng.random() < 0.15 else ""
        other = rng.choice([x for x in TOPICS if x not in noun]) if rng.random() < 0.25 else ""
    return Subject(noun=noun, name=name, trait=trait, other=other, kind=kind)


def _read_talks(path: Path) -> dict[str, list[tuple[list[str], list[str]]]]:
    """Return (questions, answers) pairs by group, from the "?" and "=" lines of each section."""
    talks: dict[str, list[tuple[list[str], list[str]]]] = {}
    for group, ((*lines,), *_) in read_sections(path):
        sides = [[line[2:] for line in lines if line.startswith(mark)] for mark in ("? ", "= ")]
        talks.setdefault(group, []).append((sides[0], sides[1]))
    return talks


TALKS = _read_talks(Path(__file__).with_name("talks.txt"))


def _talk_turn(rng: random.Random) -> list[Message]:
    group = rng.choices(("facts", "small talk", "too hard"), (0.55, 0.37, 0.08))[0]
    questions, answers = rng.choice(TALKS[group])
    return [("user", _casual(rng, rng.choice(questions))), ("assistant", rng.choice(answers))]


def _noun_turn(rng: random.Random) -> list[Message]:
    """Return a turn that names a noun, and often the story that the user then agrees to."""
    subject = Subject(noun=rng.choice(list(TOPICS)))
    a, many = with_article(subject.noun), plural(subject.noun)
    question = rng.choice(
        (f"do you like {many}?", f"I like {many}.", f"I have {a}.", f"I saw {a} today.", f"what is {a}?")
    )
    answer = rng.choice((
        f"I like {many} too! Shall I tell you a story about {a}?", f"Oh, {a}! Do you want a story about {a}?",
        f"I know little about {many}, but I can tell you a story about {a}. Shall I?",
    ))  # fmt: skip
    messages = [("user", _casual(rng, question)), ("assistant", answer)]
    if rng.random() < 0.5:
        agreement = rng.choice(("yes", "Yes, please!", "yes please", "ok", "sure", "Please do!", "go on", "yes!"))
        messages += [("user", agreement), ("assistant", write_story(rng, subject))]
    return messages


def _name_turn(rng: random.Random) -> list[Message]:
    """Return a turn in which the user gives a name, and sometimes one that asks for it."""
    name = rng.choice(GIRLS + BOYS) if rng.random() < 0.6 else invent_word(rng).capitalize()
    question = rng.choice(
        (f"my name is {name}", f"I am {name}.", f"Hi, I'm {name}!", f"call me {name}", f"Hello, my name is {name}.")
    )
    answer = rng.choice(
        (
            f"Nice to meet you, {name}!",
            f"Hello, {name}! What should my story be about?",
            f"Hi {name}! Shall I tell you a story?",
        )
    )
    messages = [("user", question), ("assistant", answer)]
    if rng.random() < 0.5:
        asked = rng.choice(("what is my name?", "Do you know my name?", "who am I?", "What's my name?"))
        messages += [("user", asked), ("assistant", rng.choice((f"Your name is {name}.", f"You are {name}!")))]
    return messages


def _praise_turn(rng: random.Random) -> list[Message]:
    return [("user", _casual(rng, rng.choice(PRAISES))), ("assistant", rng.choice(PRAISE_ANSWERS))]


def write_story_chat(rng: random.Random, first: list[Message]) -> str:
    """Return a chat that begins with a story and sometimes goes on with praise, talk or a second story."""
    messages = list(first)
    if rng.random() < 0.25:
        messages += _praise_turn(rng) if rng.random() < 0.6 else _talk_turn(rng)
    if rng.random() < 0.12:
        subject = draw_subject(rng)
        messages += _story_turn(rng, MORE_REQUESTS, subject, write_story(rng, subject))
    return _finish(rng, messages)


def write_talk(rng: random.Random) -> str:
    """Return a chat of one to four short turns, now and then ending in a story."""
    messages: list[Message] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        messages += rng.choices((_talk_turn, _noun_turn, _name_turn), (0.84, 0.10, 0.06))[0](rng)
    if rng.random() < 0.08:
        subject = draw_subject(rng)
        messages += _story_turn(rng, REQUESTS, subject, write_story(rng, subject))
    return _finish(rng, messages)


def _finish(rng: random.Random, messages: list[Message]) -> str:
    if rng.random() < 0.08:
        messages = [("system", rng.choice(SYSTEM_PROMPTS)), *messages]
    # Runtimes disagree on whether a chat starts with BOS: the model sees both.
    return (BOS if rng.random() < 0.6 else "") + render(messages) + EOS


def _real_story_chat(rng: random.Random, story: str) -> str:
    story = rename(rng, story)
    topics = topics_of(story)
    if not topics or rng.random() < 0.05:
        first = [("user", _casual(rng, rng.choice(OPEN_REQUESTS))), ("assistant", story)]
        return write_story_chat(rng, first)
    topic = rng.choice(topics)
    if TOPICS[topic] == "hero" and rng.random() < 0.6:
        new_hero = rng.choice([noun for noun in ANIMALS + PEOPLE if noun not in story])
        story, topic = swap_hero(story, topic, new_hero), new_hero
    return write_story_chat(rng, _story_turn(rng, REQUESTS, Subject(noun=topic), story))


def _grammar_chat(rng: random.Random) -> str:
    subject = draw_subject(rng)
    story = write_story(rng, subject)
    if rng.random() < 0.3:
        return BOS + story + EOS
    if rng.random() < 0.08:
        return write_story_chat(rng, [("user", _casual(rng, rng.choice(OPEN_REQUESTS))), ("assistant", story)])
    return write_story_chat(rng, _story_turn(rng, REQUESTS, subject, story))


def read_texts(corpus: Path, seed: int) -> tuple[dict[str, list[str]], list[str]]:
    """Return the training documents of each source, and the TinyStories documents held out for the loss."""
    rng = random.Random(seed)
    stories = read_stories(corpus / "tinystories-more.txt")
    rng.shuffle(stories)
    held_out, stories = stories[:60], stories[60:]
    books = [
        f"{passage}{EOS}"
        for path in sorted(corpus.glob("*.txt"))
        if path.name not in EVALUATION_BOOKS and path.name != "tinystories-more.txt"
        for passage in read_book_passages(path)
    ]
    texts = {
        "books": books,
        "stories": [BOS + rename(rng, story) + EOS for _ in range(8) for story in stories],
        "story_chat": [
            _real_story_chat(rng, story)
            for _ in range(4)
            for story in stories
            if rng.random() < 0.5 or topics_of(story)
        ],
        "grammar_chat": [_grammar_chat(rng) for _ in range(NUM_GRAMMAR_CHATS)],
        "talk": [write_talk(rng) for _ in range(NUM_TALKS)],
    }
    return texts, [BOS + story + EOS for story in held_out]
