"""The `localinfer warmup` command."""

import click

from localinfer.apps.cli.config_option import takes_config
from localinfer.apps.cli.options import COUNT, device_option, model_option, option
from localinfer.terminal import Progress, describe_duration


@click.command("warmup")
@model_option
@takes_config()
@device_option("Where the model will be computed; auto: the GPU, if there is one.")
@option("--kv-type", "TYPE", "KV cache element type that it will be loaded with, as for chat.", default="f16")
@option("--kv-window", "N", "Also what --kv-window of chat needs.", type=COUNT)
@option("--draft", "MODEL", "Also what a draft model needs.")
def warmup_command(model: str | None, device: str, kv_type: str, kv_window: int | None, draft: str | None) -> None:
    """Compile what a model needs, so that its first start is as fast as any other.

    Its weights are not read. Models of the same architecture and quantization share what is compiled, once per machine
    and version.
    """
    import localinfer
    from localinfer.storage.hub.find import find_model

    path, drafting = (None if name is None else find_model(name) for name in (model, draft))
    with Progress() as progress:
        done = localinfer.warm_up(
            path, device=device, kv_type=kv_type, kv_window=kv_window, draft=drafting, progress=progress
        )
    if done.num_compiled:
        click.echo(
            f"compiled {done.num_compiled} of {done.num_kernels} kernels in {describe_duration(done.seconds)}"
            + ("" if done.is_kept else ", for this process only: there is no folder to keep them in")
        )
    else:
        click.echo(f"all {done.num_kernels} kernels are compiled")
