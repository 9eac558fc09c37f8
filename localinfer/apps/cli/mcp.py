"""The `localinfer mcp` command."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from localinfer.apps.cli.help import GroupedCommand
from localinfer.apps.cli.options import LoadOptions, load_options, load_with, takes_config

if TYPE_CHECKING:
    from localinfer.llm import LLM


@click.command("mcp", cls=GroupedCommand)
@load_options
@takes_config()
def mcp_command(options: LoadOptions) -> None:
    """Serve a model to an agent, as tools of the Model Context Protocol.

    An agent starts this command, and speaks with it by standard input and output. The tools are chat, complete,
    tokenize and embed. Needs `pip install 'localinfer[mcp]'`. For an agent's configuration:

    {"mcpServers": {"localinfer": {"command": "localinfer", "args": ["mcp", "-m", "MODEL"]}}}
    """
    from localinfer.storage.hub.installed import find_model
    from localinfer.system.extras import require

    require("mcp", "`localinfer mcp`")
    for name in ("model", "draft"):
        if options[name] is not None:
            # A name that means nothing is an error of the command line, not of a call.
            find_model(options[name])
    serve_model(lambda stopping: load_with(options, stopping=stopping))


def serve_model(load: "Callable[[threading.Event], LLM]") -> None:
    """Serve a model until standard input ends. load: loads it, and gives up once the event is set."""
    import asyncio

    from localinfer.apps.mcp.server import ModelServer

    asyncio.run(ModelServer(load).run())
