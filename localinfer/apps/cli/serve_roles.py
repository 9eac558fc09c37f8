"""The options of `localinfer serve` for prefill and decode in processes of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from localinfer.apps.cli.options import COUNT, option, options_group_of
from localinfer.apps.cli.serve_operation import read_tokens
from localinfer.errors import RequestError
from localinfer.system.folders import expand_home

if TYPE_CHECKING:
    from localinfer.apps.server.transport.settings import HandoverOptions, Role
    from localinfer.llm import LLM


@dataclass(frozen=True)
class RoleOptions:
    """What the options below were given."""

    role: "Role" = "both"
    prefill_server: tuple[str, ...] = ()
    prefill_threshold: int | None = None
    prefill_deadline: float | None = None
    prefill_token_file: str | None = None

    def handover(self, load: Mapping[str, Any]) -> "HandoverOptions":
        """The server's role. load: options with which its models are loaded. Raises: RequestError."""
        from localinfer.apps.server.transport.settings import HandoverOptions, PrefillAddress

        if self.role != "both" and not load.get("disk_cache", True):
            raise RequestError(
                f"--role {self.role} hands prompts over in the folder of the prompt cache; leave out --no-disk-cache"
            )
        if self.role != "both" and load.get("kv_window") is not None:
            raise RequestError(
                f"--kv-window keeps no whole prompt, so none can be handed over; leave it out, or --role {self.role}"
            )
        for name, value in (
            ("--prefill-threshold", self.prefill_threshold),
            ("--prefill-deadline", self.prefill_deadline),
            ("--prefill-token-file", self.prefill_token_file),
        ):
            if value is not None and self.role != "decode":
                raise RequestError(f"{name} is of use to a server of --role decode only; leave it out")
        given: dict[str, Any] = {"threshold": self.prefill_threshold, "deadline_seconds": self.prefill_deadline}
        if self.prefill_token_file is not None:
            given["token"] = read_tokens(expand_home(self.prefill_token_file))[0].value
        return HandoverOptions(
            role=self.role,
            servers=tuple(PrefillAddress(name) for name in self.prefill_server),
            **{name: value for name, value in given.items() if value is not None},
        )

    def prepared(self, llm: "LLM") -> "LLM":
        """A loaded model whose prompts can be handed over: its weights are hashed now, not beside the first streams.

        Raises: RequestError if it keeps none on disk.
        """
        if self.role != "both" and "completion" in llm.capabilities:
            llm.handover_fingerprint()
        return llm

    def described(self, handover: "HandoverOptions") -> str | None:
        """What the user is told of the role, None where there is nothing to tell."""
        if self.role == "prefill":
            return "this server computes prompts for decode servers, and generates no text"
        if self.role == "decode":
            names = ", ".join(server.name for server in handover.servers)
            return f"prompts of {handover.threshold} tokens and more are computed by {names}"
        return None


role_options = options_group_of(
    RoleOptions,
    "roles",
    option(
        "--role",
        None,
        "prefill: compute prompts for other servers; decode: have long prompts computed by them.",
        type=click.Choice(["prefill", "decode", "both"]),
        default="both",
    ),
    option(
        "--prefill-server",
        "URL",
        "With --role decode: http://HOST:PORT or unix:PATH of a server of --role prefill; may be repeated. All share "
        "--disk-cache-folder.",
        multiple=True,
    ),
    option(
        "--prefill-threshold",
        "N",
        "Compute prompts of fewer tokens that are not cached here. Default: 256.",
        type=COUNT,
    ),
    option(
        "--prefill-deadline",
        "SECONDS",
        "Compute a prompt here that is not there after so long. Default: 120.",
        type=click.FloatRange(min=0, min_open=True),
    ),
    option("--prefill-token-file", "FILE", "File with the token that the prefill servers want, on its first line."),
)
