"""Programmatic children's stories: the part of the demo model's training text that is always on topic.

A story is a chain of beats (opening, wish, trouble, help, ending) from plots.txt; every beat is drawn from
several ways to say it and filled with one cast, so that names, nouns and pronouns agree all the way through.
"""

import random
from dataclasses import dataclass
from pathlib import Path

ANIMALS = (
    "fox cat dog rabbit bear mouse lion tiger elephant frog duck bird owl wolf horse pony cow pig "
    "sheep goat hen rooster goose swan penguin monkey giraffe zebra hippo rhino kangaroo koala panda "
    "turtle tortoise snake lizard crocodile dinosaur dragon unicorn squirrel hedgehog beaver otter "
    "badger mole raccoon deer moose donkey camel llama whale dolphin shark octopus crab seal fish "
    "starfish snail bee ant spider butterfly caterpillar ladybug firefly cricket worm bat parrot crow "
    "eagle peacock kitten puppy bunny lamb calf chick duckling hamster cheetah leopard gorilla toad "
    "robin sparrow pigeon seagull flamingo ostrich turkey buffalo yak walrus jellyfish goldfish salmon "
    "alligator chipmunk skunk ferret weasel dragonfly grasshopper beetle moth wasp bull piglet cub "
    "fawn hare raven hawk falcon woodpecker stork pelican puffin sloth lemur meerkat armadillo chicken"
).split()
PEOPLE = (
    "pirate princess prince king queen knight wizard witch fairy giant farmer baker doctor nurse "
    "teacher firefighter sailor captain painter singer dancer cook astronaut robot ghost monster "
    "mermaid elf clown gardener fisherman shepherd inventor detective explorer magician boy girl baby "
    "grandmother grandfather postman tailor carpenter scientist pilot snowman soldier musician alien "
    "vampire troll dwarf goblin superhero ninja cowboy viking hunter miller blacksmith shoemaker "
    "barber dentist librarian mechanic policeman student child man woman mother father brother sister "
    "twin neighbor beggar merchant thief spy ballerina drummer writer poet cousin emperor hermit"
).split()
THINGS = (
    "ball kite boat car truck train bike balloon doll book hat coat scarf shoe sock drum flute violin "
    "guitar bell lamp lantern candle clock watch mirror key lock box chest basket bag cup bowl plate "
    "spoon fork pot cake cookie apple pear pie pumpkin carrot banana sandwich egg lollipop puzzle "
    "blanket pillow bed chair table ladder rope wheel wagon sled swing slide rocket plane ship crown "
    "ring necklace gem stone shell feather leaf flower rose seed tree stick map letter pencil crayon "
    "brush picture camera phone computer telescope magnet umbrella button ribbon coin jar bottle broom "
    "bucket shovel hammer wand star teapot whistle toy tent backpack snowball bone nest spaceship "
    "helicopter tractor bus scooter skateboard submarine pizza donut cupcake pancake muffin orange "
    "lemon cherry strawberry peach potato tomato mushroom onion burger waffle piano trumpet harp radio "
    "toothbrush comb towel soap needle thimble carpet sofa desk shelf cradle statue painting mask "
    "trophy medal flag compass anchor net hook oar cannon sword shield helmet glove mitten boot shirt "
    "dress skirt jacket belt purse suitcase envelope stamp notebook pen ruler eraser marble "
    "cloud rainbow snowflake pebble acorn pinecone sunflower tulip cactus vase fan heater "
    "television newspaper ticket sign fence well hose wheelbarrow rake nail screw battery candy "
    "game card pearl diamond treasure potion lightbulb flashlight"
).split()
PLACES = (
    "forest beach river lake pond meadow garden farm castle cave hill mountain island village city "
    "park school library market museum zoo playground jungle desert tower bridge barn mill harbor "
    "lighthouse bakery station circus moon sea valley treehouse volcano waterfall palace hospital "
    "restaurant theater stadium airport kitchen attic basement bedroom classroom swamp field orchard "
    "vineyard glacier ocean canyon shop supermarket toyshop church temple ruin cottage hut igloo "
    "planet galaxy aquarium pool gym office factory cinema"
).split()
TOPICS = {
    **dict.fromkeys(THINGS, "thing"),
    **dict.fromkeys(PLACES, "place"),
    **dict.fromkeys(ANIMALS + PEOPLE, "hero"),
}
COMMON_HELPERS = ANIMALS[:84]
GIRLS = (
    "Lily Mia Anna Sara Lucy Molly Daisy Emma Sophie Rosie Ella Ruby Nora Zoe Ivy Hazel Penny Tina "
    "Amy Bella Clara Mary Jane Kate Luna Maya Olivia Alice"
).split()
BOYS = (
    "Ben Tom Tim Sam Max Jack Leo Finn Oscar Billy Toby Jake Henry Noah Charlie Rusty Pip Otto Bob "
    "Peter Paul Fred George Luke Milo Theo Felix Joe"
).split()
HERO_TRAITS = (
    "little small brave kind curious clever shy happy lonely quiet cheerful gentle young busy sleepy "
    "friendly proud funny silly careful"
).split()
THING_TRAITS = (
    "red blue green yellow purple golden silver shiny small big old new tiny round pretty strange "
    "beautiful magic wooden special"
).split()
FEMALE_NOUNS = frozenset(
    "princess queen witch fairy mermaid girl grandmother hen cow ladybug nurse woman mother sister ballerina".split()
)
MALE_NOUNS = frozenset(
    "prince king knight wizard boy grandfather rooster fisherman postman snowman pirate bull policeman man father "
    "brother emperor".split()
)
IRREGULAR_PLURALS = {
    **{noun: noun for noun in "sheep fish deer moose salmon starfish jellyfish goldfish buffalo dice".split()},
    "mouse": "mice", "goose": "geese", "wolf": "wolves", "leaf": "leaves", "calf": "calves", "elf": "elves",
    "thief": "thieves", "shelf": "shelves", "child": "children", "tomato": "tomatoes", "potato": "potatoes",
    "superhero": "superheroes",
}  # fmt: skip
OUTDOOR_PLACES = (
    "forest beach river lake pond meadow garden farm hill park village market playground harbor valley".split()
)
PREPOSITIONS = {
    **dict.fromkeys("river lake pond sea bridge lighthouse volcano waterfall glacier ocean pool".split(), "by"),
    **dict.fromkeys("beach farm hill mountain island playground moon field planet".split(), "on"),
    **dict.fromkeys("market harbor station circus zoo mill bakery airport gym office cinema restaurant".split(), "at"),
}
FOODS = "soup,apple pie,warm bread,berry cake,cookies,pancakes,hot chocolate,porridge,sweet berries,rice,noodles".split(
    ","
)
FEELINGS = "happy,so happy,very glad,full of joy,proud and happy,very pleased".split(",")
TIMES = "One day,One morning,One sunny day,One afternoon,One windy day,One spring morning,One summer day".split(",")
MORALS = (
    "It is good to help each other.", "Being kind makes everyone happy.", "A good friend is the best treasure of all.",
    "It is all right to ask for help.", "If you keep trying, you can do it.", "It is better to share than to keep.",
    "You do not have to be big to be brave.", "It is always best to tell the truth.", "Good things come to those who wait.",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What somebody asks a story about; `other` is a second noun to weave in, an empty field is drawn."""

    noun: str
    name: str = ""
    trait: str = ""
    other: str = ""
    kind: str = ""
    """"hero", "thing" or "place"; empty for a noun of `TOPICS`, which knows."""


def invent_word(rng: random.Random) -> str:
    """Return a word that does not exist, as a name or noun that must be copied to be told about."""
    starts = "b bl br ch d dr f fl g gl gr h j k l m n p pl qu r s sh sn sp st t tr tw v w wh z".split()
    vowels, ends = "a e i o u ee oo".split(), "b bble ck dle ff g ggle k ll m mp n nk p r rk sh ss t x zz".split()
    middle = rng.choice(vowels) + rng.choice("b d g l m n p r t".split()) if rng.random() < 0.5 else ""
    word = rng.choice(starts) + middle + rng.choice(vowels) + rng.choice(ends)
    return invent_word(rng) if word in TOPICS else word


def with_article(noun: str) -> str:
    """Return the noun phrase with "a" or "an" in front."""
    return f"an {noun}" if noun[0] in "aeiou" and not noun.startswith("uni") else f"a {noun}"


def plural(noun: str) -> str:
    """Return the plural of a noun of `TOPICS`."""
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith("man") and noun != "human":
        return noun[:-2] + "en"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def read_sections(path: Path) -> list[tuple[str, list[list[str]]]]:
    """Return the (title, blocks of lines) of a text file of "[title]" sections, "#" lines left out."""
    sections: list[tuple[str, list[list[str]]]] = []
    is_new_block = True
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            sections.append((line[1:-1], []))
            is_new_block = True
        elif not line.strip():
            is_new_block = True
        elif not line.startswith("#"):
            if is_new_block:
                sections[-1][1].append([])
            sections[-1][1][-1].append(line)
            is_new_block = False
    return sections


SECTIONS = read_sections(Path(__file__).with_name("plots.txt"))
PHRASES = {title: beats[0] for title, beats in SECTIONS if ":" not in title}
PLOTS = {
    kind: [beats for title, beats in SECTIONS if title.startswith(f"{kind}:")] for kind in ("hero", "thing", "place")
}


def _pronouns(prefix: str, is_female: bool) -> dict[str, str]:
    he, him, his = ("she", "her", "her") if is_female else ("he", "him", "his")
    return {
        f"{prefix}he": he, f"{prefix}He": he.capitalize(), f"{prefix}him": him, f"{prefix}his": his,
        f"{prefix}His": his.capitalize(), f"{prefix}hers": "hers" if is_female else "his", f"{prefix}himself": "herself" if is_female else "himself",
    }  # fmt: skip


def _is_female(rng: random.Random, noun: str, name: str = "") -> bool:
    if name in GIRLS or (noun in FEMALE_NOUNS and name not in BOYS):
        return True
    if name in BOYS or noun in MALE_NOUNS:
        return False
    return rng.random() < 0.5


def draw_cast(rng: random.Random, subject: Subject) -> dict[str, str]:
    """Draw hero, helper, thing and place around the subject and return every slot of the patterns."""
    wanted = {subject.kind or TOPICS[subject.noun]: subject.noun}
    if subject.other:
        wanted = {TOPICS[subject.other]: subject.other, **wanted}
    # Only an asked animal is the hero, so that its story never turns into one about a thing that is found.
    hero = wanted.get("hero") or rng.choice(("girl", "boy"))
    is_female = _is_female(rng, hero, subject.name)
    is_two_heroes = bool(subject.other) and TOPICS[subject.other] == "hero"
    helper = subject.other if is_two_heroes else rng.choice([x for x in COMMON_HELPERS if x != hero])
    thing = wanted.get("thing") or rng.choice(THINGS[:134])
    place = wanted.get("place") or rng.choice(OUTDOOR_PLACES)
    trait = subject.trait or rng.choice(HERO_TRAITS)
    thing_trait = rng.choice(THING_TRAITS)
    a_helper = with_article(f"{rng.choice([x for x in HERO_TRAITS if x != trait])} {helper}")
    moral, day = rng.choice(MORALS), rng.choice(TIMES)
    return {
        "hero": hero, "trait": trait, "a_hero": with_article(f"{trait} {hero}"),
        "Name": subject.name or rng.choice(GIRLS if is_female else BOYS),
        "helper": helper, "a_helper": a_helper, "A_helper": a_helper.capitalize(),
        "Helper_with_article": with_article(helper).capitalize(),
        "thing": thing, "thing_trait": thing_trait, "some_thing": with_article(thing),
        "a_thing": with_article(f"{thing_trait} {thing}"), "things": plural(thing),
        "place": place, "a_place": with_article(place), "in_place": f"{PREPOSITIONS.get(place, 'in')} the {place}",
        "far_place": rng.choice([x for x in OUTDOOR_PLACES if x != place]),
        "food": rng.choice(FOODS), "glad": rng.choice(FEELINGS), "mother": rng.choice(("mother", "mom", "grandma")),
        "day": day, "day_lower": day[0].lower() + day[1:], "moral": moral, "moral_lower": moral[0].lower() + moral[1:],
        **_pronouns("", is_female), **_pronouns("h_", _is_female(rng, helper)),
    }  # fmt: skip


def write_story(rng: random.Random, subject: Subject) -> str:
    """Write one short story about the subject, in one to five paragraphs."""
    kind, opening = subject.kind or TOPICS[subject.noun], "opening"
    if kind == "hero" and subject.other:
        kind = TOPICS[subject.other]
        opening = f"opening with a {kind}" if kind != "hero" else opening
    lines = [rng.choice(PHRASES[opening]), *(rng.choice(beat) for beat in rng.choice(PLOTS[kind]))]
    if rng.random() < 0.75:
        lines[0] += " " + rng.choice(PHRASES["habit"])
    lines.append(rng.choice(PHRASES["ending"]))
    text = "".join(line + rng.choice(("\n\n", " ")) for line in lines)
    return text.strip().format_map(draw_cast(rng, subject))
