"""The tokenizer and chat template of a folder as GGUF metadata: tokenizer.json and the small files around it."""

import logging
from collections.abc import Iterator
from typing import Any

from localinfer.errors import TokenizerError
from localinfer.models.checkpoint.tokenizer_json import TokenizerJson
from localinfer.models.text.vocabulary import PREFIX
from localinfer.quant.checkpoint.folder import MAX_TOKENIZER_BYTES, CheckpointFolder

logger = logging.getLogger(__name__)

_TEMPLATE = "tokenizer.chat_template"
# GGUF has three keys for tokens that end a turn.
_END_ROLES = ("eos", "eot", "eom")


def read_tokenizer(folder: CheckpointFolder, vocab_size: int) -> dict[str, object]:
    """Return the tokenizer's metadata; a model of an unknown vocabulary gets only a key that says why.

    Raises: CorruptFileError if a file is damaged, TokenizerError if the vocabulary is of a kind that is not built.
    """
    document = folder.json("tokenizer.json", max_bytes=MAX_TOKENIZER_BYTES)
    if document is None:
        others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (folder.path / name).exists()]
        raise TokenizerError(
            f"{folder.path.name} has no tokenizer.json{f' (only {others[0]})' if others else ''}; wanted that form of "
            "the tokenizer. Save it again with a current version of its library, or use token ids only"
        )
    tokenizer = TokenizerJson(document, vocab_size)
    settings = folder.json("tokenizer_config.json") or {}
    generation = folder.json("generation_config.json") or {}
    metadata = dict(tokenizer.metadata)
    metadata |= _roles(tokenizer, settings, generation, folder.config)
    metadata |= _added_tokens(tokenizer, settings, metadata)
    metadata |= _templates(folder, settings)
    if tokenizer.strips_after_special:
        metadata[f"{PREFIX}strips_after_special"] = True
    return metadata


def _roles(
    tokenizer: TokenizerJson, settings: dict[str, Any], generation: dict[str, Any], config: dict[str, Any]
) -> dict[str, object]:
    roles: dict[str, object] = {}
    for role, key in (("bos", "bos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token_id = _token_id(tokenizer, settings, key)
        if token_id is None and role == "bos":
            token_id = next(_ids_in(config.get("bos_token_id")), None)
        if token_id is not None:
            roles[f"{PREFIX}{role}_token_id"] = token_id
    eos = _token_id(tokenizer, settings, "eos_token")
    ends = [] if eos is None else [eos]
    text_config = config.get("text_config")
    for source in (generation, config, text_config if isinstance(text_config, dict) else {}):
        ends += _ids_in(source.get("eos_token_id"))
    known = set(tokenizer.ids.values())
    ends = [token_id for token_id in dict.fromkeys(ends) if token_id in known]
    roles |= {f"{PREFIX}{role}_token_id": token_id for role, token_id in zip(_END_ROLES, ends, strict=False)}
    if len(ends) > len(_END_ROLES):
        roles[f"{PREFIX}end_of_generation_ids"] = ends
    return roles


def _token_id(tokenizer: TokenizerJson, settings: dict[str, Any], key: str) -> int | None:
    value = settings.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    return tokenizer.ids.get(text) if isinstance(text, str) else None


def _ids_in(value: object) -> Iterator[int]:
    values = value if isinstance(value, list) else [value]
    return iter([entry for entry in values if type(entry) is int])


def _added_tokens(tokenizer: TokenizerJson, settings: dict[str, Any], metadata: dict[str, object]) -> dict[str, object]:
    """What a text gets before and after it: as the post-processor says, else as tokenizer_config.json does."""
    around = tokenizer.added_around()
    added: dict[str, object] = {}
    for index, role in enumerate(("bos", "eos")):
        key = f"add_{role}_token"
        role_id = metadata.get(f"{PREFIX}{role}_token_id")
        if around is None:
            added[f"{PREFIX}{key}"] = settings.get(key) is True and role_id is not None
            continue
        found = [tokenizer.ids.get(text) for text in around[index]]
        if role_id is None and len(found) == 1 and found[0] is not None:
            # Nothing else names the token, but what stands before every text is what begins a text.
            added[f"{PREFIX}{role}_token_id"] = role_id = found[0]
        if found not in ([], [role_id]):
            raise TokenizerError(
                f"tokenizer.json: its post-processor adds {around[index]!r:.80} to every text; this version adds only "
                f"the {role} token. Use a GGUF file of the model, or run it with token ids only."
            )
        added[f"{PREFIX}{key}"] = bool(found)
    return added


def _templates(folder: CheckpointFolder, settings: dict[str, Any]) -> dict[str, object]:
    """The chat template from its own file, or from tokenizer_config.json: one text, or several by name."""
    text = folder.text("chat_template.jinja")
    value: object = text if text is not None else settings.get("chat_template")
    if value is None:
        value = (folder.json("chat_template.json") or {}).get("chat_template")
    if isinstance(value, str):
        return {_TEMPLATE: value}
    templates: dict[str, object] = {}
    for entry in value if isinstance(value, list) else []:
        match entry:
            case {"name": "default", "template": str(template)}:
                templates[_TEMPLATE] = template
            case {"name": "tool_use", "template": str(template)}:
                templates[f"{_TEMPLATE}.tool_use"] = template
            case {"name": name}:
                logger.warning("%s: the chat template %.40r is not used", folder.path.name, name)
    return templates
