"""Options of `localinfer serve` about the responses and conversations that it keeps."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.grouped_help import Command
from localinfer.apps.cli.options import LoadOptions, byte_size, flag, option, options_group

if TYPE_CHECKING:
    from localinfer.storage.response_store import ResponseStoreOptions

_DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class KeptResponses:
    """What the server keeps. max_bytes: 0 for nothing, None for the default. days: None for the default."""

    max_bytes: int | None
    days: float | None

    def options(self, load: LoadOptions) -> "ResponseStoreOptions":
        """The options of the store; load: where the prompt cache is, beside which they are kept.

        Without a prompt cache on disk they are kept in memory: who wants no prompts on the disk wants none there.
        """
        from localinfer.storage.response_store import ResponseStoreOptions, responses_folder

        folder = responses_folder(load["disk_cache_folder"]) if load["disk_cache"] else None
        made: dict[str, Any] = {} if self.max_bytes is None else {"max_bytes": self.max_bytes}
        if self.days is not None:
            made["expiry_seconds"] = self.days * _DAY_SECONDS
        return ResponseStoreOptions(folder, **made)


def _size_or_nothing(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    return 0 if value is not None and value.strip() == "0" else byte_size(context, parameter, value)


def _gather(command: Command) -> Command:
    """Pass the options below as one record."""

    @functools.wraps(command)
    def call(*, no_store: bool, store_size: int | None, store_days: float | None, **values: Any) -> Any:
        return command(kept_responses=KeptResponses(0 if no_store else store_size, store_days), **values)

    return call


responses_options = options_group(
    flag("--no-store", "Keep no responses and conversations (previous_response_id, /v1/conversations)."),
    option(
        "--store-size",
        "SIZE",
        "Maximum size of those that are kept; 0: none. Default: 256MiB.",
        callback=_size_or_nothing,
    ),
    option(
        "--store-days",
        "N",
        "Delete those that were not used for so many days; 0: never. Default: 30.",
        type=click.FloatRange(min=0, max=36500),
    ),
    _gather,
)
