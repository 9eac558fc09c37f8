"""Cuts of a text before it is encoded: at the spellings of special tokens, then into words.

Merges never cross a word's edge, so a wrong rule changes the ids without any visible error. The patterns of byte-level
BPE, by the name in `tokenizer.ggml.pre`, are those of the models' own tokenizers, in Oniguruma syntax; the names are
the ones llama.cpp writes into files. Each step cuts what the step before it left.
"""

import re
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from localinfer.models.text.known_vocabularies import KnownVocabulary


class TokenizerWarning(UserWarning):
    """The tokenizer works, but may not be the one the model was trained with."""


# Converters leave many of these without a role or even a control type, so they go by their spelling,
# the same list that llama.cpp keeps. Not on it: </s>, an ordinary word of vocabularies with HTML.
_END_TEXTS = frozenset(
    (
        "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|>"
        " <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response>"
        " <｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|>"
        " <fim-repo> <REPO> <reponame> <|file_sep|>"
    ).split()
)
FILL_IN_SPELLINGS = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>".split(),
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>".split(),
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>".split(),
)
"""Spellings of the tokens that stand before a text, before what follows it, and before what is to be filled in."""
_FILL_IN_TEXTS = frozenset().union(*FILL_IN_SPELLINGS)
CONTROL_TEXTS = _END_TEXTS | _FILL_IN_TEXTS
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def find_end_of_generation(
    ids: Mapping[str, int], roles: Mapping[str, int], is_control: Callable[[int], bool]
) -> frozenset[int]:
    """Return the ids that end a generation: those with such a role, and the well-known spellings."""
    ending = {ids[text] for text in _END_TEXTS if text in ids}
    if "</s>" in ids and is_control(ids["</s>"]) and "<|tool_response>" not in ids:
        ending.add(ids["</s>"])
    # In the Harmony and Solar formats <|end|> closes one message of several, not the turn.
    has_calls = "<|call|>" in ids or "<|calls|>" in ids
    if has_calls and ("<|return|>" in ids or "<|flush|>" in ids):
        ending.discard(ids.get("<|end|>", -1))
    ending.update(roles[role] for role in _END_ROLES if role in roles)
    return frozenset(ending)


# Characters of a spelling that a first search looks for, and how many different ones it tells apart.
_BEGINNING = 5
_MOST_BEGINNINGS = 64
_SEARCHED = 1 << 18
"""Characters that are searched at a time."""
_FEW_FIRSTS = 8


class Spelling(NamedTuple):
    """A spelling of a special token: text[start:end]."""

    start: int
    end: int
    token_id: int


class SpellingFinder:
    """Finds every occurrence of some texts, overlapping ones too.

    Time grows with the length of the text and the number of different lengths that begin alike, not
    with the number of texts: a vocabulary may hold thousands of special tokens.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        shortest: dict[str, int] = {}
        for text in ids:
            shortest[text[0]] = min(len(text), shortest.get(text[0], _BEGINNING))
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[: shortest[text[0]]], set()).add(len(text))
        self._lengths = {beginning: sorted(found, reverse=True) for beginning, found in lengths.items()}
        self._beginning = _beginnings(self._lengths, shortest)
        self._firsts = "".join(shortest)

    def ignoring_case(self) -> "SpellingFinder":
        """Return the finder for lower-cased text."""
        return SpellingFinder({text.lower(): token_id for text, token_id in self._ids.items()})

    def find(self, text: str) -> Iterator[Spelling]:
        """Yield the spellings from left to right, at one position the longest first."""
        if self._beginning is None:
            return
        # In pieces: other threads run Python only between two searches.
        for first in range(0, len(text), _SEARCHED):
            end = first + _SEARCHED
            if len(self._firsts) <= _FEW_FIRSTS and all(text.find(one, first, end) < 0 for one in self._firsts):
                continue
            for match in self._beginning.finditer(text, first, end + _BEGINNING):
                start = match.start()
                if start >= end:
                    break
                for length in self._lengths.get(match[1], ()):
                    token_id = self._ids.get(text[start : start + length])
                    if token_id is not None and start + length <= len(text):
                        yield Spelling(start, start + length, token_id)


def _beginnings(texts: Iterable[str], lengths: Mapping[str, int]) -> re.Pattern[str] | None:
    """Return the pattern of where one of some texts begins; those of one first character are equally long."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    if not rests:
        return None
    ways = []
    for first, found in rests.items():
        # Alternatives are tried one by one, so of many only the length is matched.
        rest = f".{{{lengths[first] - 1}}}" if len(found) > _MOST_BEGINNINGS else "|".join(map(re.escape, found))
        ways.append(f"{re.escape(first)}(?:{rest})")
    firsts = "".join(map(re.escape, rests))
    return re.compile(f"(?=[{firsts}])(?=({'|'.join(ways)}))", re.DOTALL)


@dataclass(frozen=True)
class DigitGroups:
    """A step that cuts every run of digits matching `pattern` into threes, counted from its end.

    A regular expression can say the same with a look-ahead over the rest of the run, but then takes
    quadratic time on a long one.
    """

    pattern: str


@dataclass(frozen=True)
class PreTokenizerRule:
    """Word splitting of one family of vocabularies.

    A word that is a token as a whole skips the merges where `ignores_merges` holds. Where `is_raw`
    holds, tokens are plain UTF-8 instead of the byte-level alphabet, and where `escapes_spaces` does,
    "▁" stands for a space in them. `adds_bos` is what holds where a file does not say.
    """

    steps: tuple[str | DigitGroups, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    is_raw: bool = False
    escapes_spaces: bool = False


def _characters(ranges: str) -> str:
    """Return the inside of a character class from hexadecimal code points and ranges."""
    return "".join("-".join(chr(int(end, 16)) for end in part.split("-")) for part in ranges.split())


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
"""Pattern of words in GPT-2, and in every byte-level step that names no other."""
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"


def _contraction_first(digits: str, word: str = _WORD, symbols: str = _SYMBOLS, rest: str = _LINES) -> str:
    return "|".join((_CONTRACTION, word, digits, symbols, rest))


_LLAMA3 = _contraction_first(r"\p{N}{1,3}")
_QWEN2 = _contraction_first(r"\p{N}")


def _cased(digits: str, contraction: str, symbols_end: str = r"[\r\n/]*", without: str = "") -> str:
    """Return the o200k shape: a word is capitals then small letters, so that camelCase splits."""
    upper, lower = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for case in (r"Lu}\p{Lt", "Ll"))
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
    return "|".join((words, digits, rf" ?[^\s\p{{L}}\p{{N}}]+{symbols_end}", _LINES))


_O200K = _cased(r"\p{N}{1,3}", _CONTRACTION + "?")
_CJK = f"[{_characters('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_ASCII_SYMBOL_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3_MAIN = _ASCII_SYMBOL_WORD + r"| ?[\p{P}\p{S}]+[\r\n]*|" + _LINES
_BLOOM = " ?[^(" + r"\s" + "|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
# (?<!\s) keeps the search linear: otherwise every space of a long run scans the rest of it in vain.
_TRAILING_SPACES = r"(?<!\s)\s+$"

_CASED_LETTERS = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1"
    " 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77"
    " 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE"
    " 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124"
    " 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3"
    " A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A"
    " 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_DEEPSEEK_PUNCTUATION = _characters("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_DEEPSEEK_CJK = f"[{_characters('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_YOUTU_SCRIPTS = "|".join(
    f"[{_characters(ranges)}]+"
    for ranges in (
        "AC00-D7A3 3131-318E",
        "FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F",
        "3105-312F",
        "4E00-9FA5 3040-309F 30A0-30FF",
    )
)
_AFMOE_SCRIPTS = _characters(
    "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F"
    " AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_JAIS2_SPACES = "|".join([*(rf"\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s"])


def _rule(*steps: str | DigitGroups, **options: bool) -> PreTokenizerRule:
    return PreTokenizerRule(steps, **options)


_RULES: dict[str, PreTokenizerRule] = {
    "default": _rule(r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", _THREE_DIGITS),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _rule(
        _LLAMA3, ignores_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": _rule(_LLAMA3),
    "jais-2": _rule(_contraction_first(r"\p{N}{1,3}", rest=r"\s*[\r\n]+|" + _JAIS2_SPACES)),
    "minicpm5": _rule(r"\p{N}{1,3}", _contraction_first(r"\p{N}+"), ignores_merges=True),
    "deepseek-llm": _rule(
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
        _TRAILING_SPACES,
        _DEEPSEEK_CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": _rule(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _rule(r"\p{N}{1,3}", _CJK, _DEEPSEEK3_MAIN),
    "spark2_5": _rule(r"\p{N}{1,3}", _CJK, _ASCII_SYMBOL_WORD + r"| ?[\p{P}\p{S}]+|[\r\n]|" + _SPACES, r"\p{N}"),
    "youtu": _rule(_YOUTU_SCRIPTS, _cased(r"\p{N}", _CONTRACTION + "?"), ignores_merges=True),
    "falcon": _rule(_PUNCTUATION, GPT2_PATTERN, _THREE_DIGITS),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _rule(r"\p{N}", GPT2_PATTERN),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en"
        " jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling"
    ): _rule(GPT2_PATTERN),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan solar-open megrez grok-2"): _rule(_QWEN2),
    "qwen35": _rule(
        _contraction_first(r"\p{N}", word=r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", symbols=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
    ),
    "ufakzeka": _rule("|".join((_WORD, r"\p{N}", _SYMBOLS, _LINES))),
    "poro-chat bloom gpt3-finnish": _rule(_BLOOM),
    "viking": _rule(_BLOOM, r"\p{N}"),
    "tekken": _rule(_cased(r"\p{N}", ""), ignores_merges=True, adds_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _rule(_O200K),
    "granite-embed-multi-97m": _rule(_O200K, ignores_merges=True),
    "tiny_aya cohere2moe": _rule(DigitGroups(r"(?<!\d)\d++(?!\w)"), _O200K),
    "kimi-k2": _rule(r"\p{Han}+|" + _cased(r"\p{N}{1,3}", _CONTRACTION + "?", r"[\r\n]*", without=r"&&[^\p{Han}]")),
    "superbpe": _rule(r"\p{N}+", DigitGroups(r"\d+")),
    "afmoe": _rule(DigitGroups(r"\p{N}+"), f"[{_AFMOE_SCRIPTS}]+", _DEEPSEEK3_MAIN),
    "bailingmoe bailingmoe2 llada-moe": _rule(
        "|".join((r"'(?i:[sdmt]|ll|ve|re)", _WORD, r"\p{N}", _SYMBOLS, r"\s*[\r\n]", _SPACES))
    ),
    "seed-coder": _rule(_contraction_first(r"\p{N}", symbols=r" ?[^\s\p{L}\p{N}]+")),
    "laguna": _rule(r"[^\n]+|\n+", _QWEN2),
    "exaone-moe": _rule(
        _contraction_first(
            r"\p{N}",
            word=r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            symbols=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            rest=r"\s*[\r\n]|" + _SPACES,
        )
    ),
    "chameleon": _rule(
        r"<sentinel:[0-9]+>",
        r"IMGIMG[A-I]{1,4}Z",
        r"[\t\n]|    |  ",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2_PATTERN,
        adds_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": _rule(r"[^\n]+|\n+", adds_bos=True, is_raw=True, escapes_spaces=True),
    "sarvam-moe": _rule(r"[^\n]+|\n+", is_raw=True, escapes_spaces=True),
    "whitespace": _rule(r"\S+", is_raw=True),
}
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names.split()}


def pre_tokenizer_rule(name: str | None, known: KnownVocabulary | None = None) -> PreTokenizerRule:
    """Return the rule of that name; warn and return the default where it is missing or unknown.

    known: the published vocabulary that it is, by which the warning says the right name.
    """
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    found = "missing" if name is None else f"{name[:40]!r}, which this version does not know"
    way_out = "Convert the model again with a current converter."
    if known is not None:
        way_out = (
            f"The vocabulary is {known.owner}: set tokenizer.ggml.pre={known.pre_tokenizer} (--set), or get a current "
            "conversion."
        )
    warnings.warn(
        f"tokenizer.ggml.pre is {found}; the default word splitting is used, so ids may differ from those the "
        f"model was trained with and its answers may be worse. {way_out}",
        TokenizerWarning,
        stacklevel=2,
    )
    return PRE_TOKENIZERS["default"]


def build_splitter(rule: PreTokenizerRule) -> Callable[[str], list[str]]:
    """Return the function that cuts a text into the words of that rule; they join to the text again."""
    from tokenizers import Regex, pre_tokenizers

    # Patterns between two groupings of digits run as one sequence.
    stages: list[tuple[pre_tokenizers.PreTokenizer, bool]] = []
    for groups_digits, steps in groupby(rule.steps, lambda step: isinstance(step, DigitGroups)):
        patterns = [step.pattern if isinstance(step, DigitGroups) else step for step in steps]
        cutters = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        if groups_digits:
            stages += [(cutter, True) for cutter in cutters]
        else:
            stages.append((pre_tokenizers.Sequence(cutters), False))

    def split(text: str) -> list[str]:
        words = [text]
        for cutter, groups_digits in stages:
            words = [word for whole in words for word, _ in cutter.pre_tokenize_str(whole)]
            if groups_digits:
                words = [group for word in words for group in _group_digits(word)]
        return words

    return split


def _group_digits(word: str) -> list[str]:
    """Cut a word that is all digits into threes from its end; return any other as it is."""
    if not all(unicodedata.category(character).startswith("N") for character in word):
        return [word]
    first = len(word) % 3 or 3
    return [word[:first], *(word[start : start + 3] for start in range(first, len(word), 3))]


FILL_IN_ROLES = ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")
"""Names in files; the last three are of older ones."""
_REPOSITORY = "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split()
_SEPARATOR = "<|file_sep|> <|file_separator|> <file_sep>".split()


class FillInTokens(NamedTuple):
    """Tokens by which a model for code fills in the text between two others."""

    prefix: int
    """Stands before the first text."""
    suffix: int
    """Stands before the second text."""
    middle: int
    """Stands before the text that is filled in."""
    repository: int | None = None
    """Stands before a project's name; None where the vocabulary has none."""
    separator: int | None = None
    """Stands before each file's name; None where the vocabulary has none."""

    def around(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The ids of a prompt for what stands between two texts of these. Source: arXiv 2207.14255 (PSM)."""
        return [self.prefix, *before, self.suffix, *after, self.middle]


def find_fill_in_tokens(special_ids: Mapping[str, int], role_ids: Mapping[str, int]) -> FillInTokens | None:
    """The tokens that a file names for it, or else those that are spelled so; None without all of the first three."""
    found: list[int] = []
    for role, old_role, spellings in zip(FILL_IN_ROLES[:3], FILL_IN_ROLES[3:], FILL_IN_SPELLINGS, strict=True):
        token_id = role_ids.get(role, role_ids.get(old_role, _spelled(spellings, special_ids)))
        if token_id is None:
            return None
        found.append(token_id)
    repository = role_ids.get("fim_rep", _spelled(_REPOSITORY, special_ids))
    prefix, suffix, middle = found
    return FillInTokens(prefix, suffix, middle, repository, role_ids.get("fim_sep", _spelled(_SEPARATOR, special_ids)))


def _spelled(spellings: list[str], special_ids: Mapping[str, int]) -> int | None:
    return next((special_ids[text] for text in spellings if text in special_ids), None)
