"""Options of generations that do not name them: what a program, a user or the model's file sets for all of them."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from localinfer.arguments import check_number
from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.generation.chat_model import ChatModel
    from localinfer.models.load.loader import Model

_OF_REPLIES = ("thinking", "thinking_budget", "template_variables")
"""Those that only chats have; the prompt depends on them too."""
_OF_ONE_GENERATION = ("constraint", "prediction", "owner", "cache_salt")


class DefaultOptions:
    """The part of an `LLM` that completes the options of a generation."""

    if TYPE_CHECKING:
        _model: Model
        _chat_model: ChatModel | None

    _defaults: Mapping[str, Any] = MappingProxyType({})

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options by name that hold where a generation does not name them; none until they are set."""
        return self._defaults

    @property
    def recommended_sampling(self) -> dict[str, float | int]:
        """The sampling options that the model's file recommends."""
        from localinfer.engine.sampling.params import file_sampling

        return file_sampling(self._model.file.metadata, name=self._model.file.path.name)

    @property
    def can_think(self) -> bool:
        """Whether a chat may be asked to reason first: the model's template has reasoning, which is learned of it."""
        return self._chat_model is not None and self._chat_model.formats.reasoning is not None

    def set_defaults(self, **options: Any) -> None:
        """Let options hold for every generation from now on that does not name them, in place of those set before.

        options: of GenerationOptions, such as `llm.recommended_sampling`, which is what the file recommends; and
        `thinking`, `thinking_budget` and `template_variables`, which hold for chats: a chat's own variables are added
        to them, name by name. A generation that gives None for one has the library's own default.
        Raises: RequestError for what is no such option, and for a value that it cannot have.
        """
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
        check_options({name: given[name] for name in given if name not in _OF_REPLIES}, self._model.tokenizer)
        if variables := check_template_variables(given.pop("template_variables", None)):
            given["template_variables"] = MappingProxyType(dict(variables))
        self._defaults = MappingProxyType(given)

    def _with_defaults(self, options: Mapping[str, Any], *, in_chat: bool = False) -> dict[str, Any]:
        """The options of one generation."""
        names = [name for name in self._defaults if in_chat or name not in _OF_REPLIES]
        return self._completed(options, names)

    def _with_reply_defaults(self, options: Mapping[str, Any]) -> Any:
        """The options that the prompt of a chat depends on."""
        return self._completed(options, [name for name in _OF_REPLIES if name in self._defaults])

    def _completed(self, options: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Options with the defaults of these names that they do not give."""
        made = {**{name: self._defaults[name] for name in names}, **options}
        before, own = self._defaults.get("template_variables"), options.get("template_variables")
        if "template_variables" in names and before is not None and isinstance(own, Mapping):
            made["template_variables"] = {**before, **own}
        return made
