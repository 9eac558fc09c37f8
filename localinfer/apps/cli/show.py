"""`localinfer show`: what a model's file holds, and with `--verify` what is wrong with it."""

import click

from localinfer.apps.cli.options import flag, model_argument

EXIT_FINDINGS = 1


@click.command("show")
@model_argument("model")
@flag("--tensors", "List every tensor.")
@flag("--ops", "List the ops that the model computes, without running it.")
@flag("--verify", "Check every weight, vocabulary, template, settings and output; exit status 1 for findings.")
@flag("--json as_json", "Print one JSON object, with all metadata.")
@click.pass_context
def show_command(context: click.Context, model: str, tensors: bool, ops: bool, verify: bool, as_json: bool) -> None:
    """Show the contents of a GGUF file or a Hugging Face folder.

    Of a quantized folder also how its matrices are stored and what they run as.
    """
    from localinfer.apps.show.describe import describe_file, render_json, render_text
    from localinfer.terminal import Progress

    description = describe_file(model, ops=ops)
    verification = None
    if verify:
        from localinfer.apps.show.verify import verify_model

        with Progress() as progress:
            verification = verify_model(model, progress)
    render = render_json if as_json else render_text
    click.echo(render(description, tensors=tensors, verification=verification))
    if verification is not None and verification.findings:
        context.exit(EXIT_FINDINGS)
