"""Options of generations that do not name them: what a program, a user or the model's file sets for all of them."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from localinfer.arguments import check_number
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.models.text.tokenizer import Tokenizer

_OF_REPLIES = ("thinking", "thinking_budget", "template_variables")
"""Those that only chats have; the prompt depends on them too."""
_OF_ONE_GENERATION = ("constraint", "prediction", "owner", "cache_salt")


class DefaultOptions:
    """Checked defaults, and options completed by them."""

    def __init__(self) -> None:
        self.values: Mapping[str, Any] = MappingProxyType({})
        """By name; none until they are set."""

    def set(self, options: Mapping[str, Any], tokenizer: "Tokenizer | None") -> None:
        """Check defaults, and take them in place of those before. Raises: RequestError."""
        from localinfer.generation.chat.reply import check_template_variables
        from localinfer.generation.options import check_options

        thinking = options.get("thinking")
        if not isinstance(thinking, bool | None):
            raise RequestError(f"thinking is {thinking!r:.60}; give True, False, or None", field="thinking")
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("max_tokens", "thinking_budget"):
            check_number(name, given.get(name), 0, none="for no limit")
        of_one = sorted(given.keys() & set(_OF_ONE_GENERATION))
        if of_one:
            raise RequestError(f"{', '.join(of_one)} belongs to one generation, and not to all; give it to each")
        check_options({name: given[name] for name in given if name not in _OF_REPLIES}, tokenizer)
        if variables := check_template_variables(given.pop("template_variables", None)):
            given["template_variables"] = MappingProxyType(dict(variables))
        self.values = MappingProxyType(given)

    def of_generation(self, options: Mapping[str, Any], *, in_chat: bool = False) -> dict[str, Any]:
        """The options of one generation."""
        names = [name for name in self.values if in_chat or name not in _OF_REPLIES]
        return self._completed(options, names)

    def of_reply(self, options: Mapping[str, Any]) -> Any:
        """The options that the prompt of a chat depends on."""
        return self._completed(options, [name for name in _OF_REPLIES if name in self.values])

    def _completed(self, options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Options with the defaults of these names that they do not give."""
        made = {**{name: self.values[name] for name in names}, **options}
        before, own = self.values.get("template_variables"), options.get("template_variables")
        if "template_variables" in names and before is not None and isinstance(own, Mapping):
            made["template_variables"] = {**before, **own}
        return made
