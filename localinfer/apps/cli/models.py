"""The commands `localinfer pull`, `list`, `rm`, `show` and `warmup`: models on this machine."""

import json
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localinfer.apps.cli.options import COUNT, device_option, flag, model_argument, model_option, option, takes_config
from localinfer.errors import LocalinferError, RequestError
from localinfer.terminal import Progress, describe_duration, neutralise_controls, with_time_left

if TYPE_CHECKING:
    from localinfer.storage.hub.installed import InstalledModel


@click.command("pull")
@click.argument("model", metavar="ORG/REPO[:QUANT]")
@flag("--no-mmproj", "Leave out the file by which a model reads pictures or sounds.")
def pull_command(model: str, no_mmproj: bool) -> None:
    """Download a model from the Hugging Face hub.

    QUANT is a quantization of its GGUF files, such as Q4_K_M, which is preferred if none is given; a repository without
    GGUF files is pulled as a folder of safetensors. A pull that was stopped resumes. Gated models need `hf auth login`
    once.
    """
    from localinfer.storage.hub.places import Places
    from localinfer.storage.hub.pull import pull_model, read_reference

    def say(line: str) -> None:
        click.echo(neutralise_controls(line), err=True)

    reference = read_reference(model)
    try:
        with Progress() as progress:
            report = with_time_left(lambda stage, done, total: progress(neutralise_controls(stage), done, total))
            record = pull_model(reference, Places.of_user(), with_encoders=not no_mmproj, say=say, progress=report)
    except KeyboardInterrupt:
        say(
            f"stopped; what has arrived is kept: `localinfer pull {reference}` continues from there, `localinfer list` "
            "shows it"
        )
        raise
    click.echo(neutralise_controls(record.name))
    if sys.stdout.isatty():
        say(f"try it: localinfer chat -m {record.name}")


@click.command("list")
@flag("-a --all show_all", "Also models of Ollama, LM Studio and the Hugging Face cache, with paths.")
@flag("--architectures", "List the architectures that run, and those that do not, in place of models.")
@flag("--json as_json", "Print one JSON array; with --architectures one object.")
def list_command(show_all: bool, architectures: bool, as_json: bool) -> None:
    """List the models on this machine by the names that -m takes.

    Those that cannot be used, such as unfinished pulls, are named with the reason on standard error.
    """
    if architectures:
        if show_all:
            raise click.UsageError("--all lists models and --architectures kinds of them: pass one of the two")
        click.echo(_architectures(as_json))
        return
    from localinfer.storage.hub.installed import find_installed, find_pulled
    from localinfer.storage.hub.places import Places

    places = Places.of_user()
    models = find_installed(places) if show_all else find_pulled(places)
    if as_json:
        records = [asdict(model) | {"path": str(model.path)} for model in models]
        click.echo(json.dumps(records, ensure_ascii=False))
        return
    sound = [model for model in models if not model.problem]
    for line in _table(sound, with_paths=show_all):
        click.echo(neutralise_controls(line))
    for model in models:
        if model.problem:
            kind = "unfinished" if model.is_unfinished else "broken"
            click.echo(neutralise_controls(f"{kind}: {model.name}: {model.problem}"), err=True)
    if not models:
        where = "" if show_all else "; `localinfer list --all` shows those of other programs"
        click.echo(f"no models here yet: `localinfer pull org/repo` brings one{where}", err=True)


@click.command("rm")
@click.argument("name", metavar="NAME")
def rm_command(name: str) -> None:
    """Delete a model that was pulled, or the files of an unfinished pull.

    Models of other programs are never touched.
    """
    from localinfer.storage.hub.places import Places
    from localinfer.storage.hub.pull import remove_model

    click.echo(neutralise_controls(remove_model(name, Places.of_user())))


def _architectures(as_json: bool) -> str:
    """The kinds of models that run, and those that are known and do not, with the reason."""
    from localinfer.models.checkpoint.families import FAMILIES, NOT_RUN_TYPES
    from localinfer.models.decoder.architectures import ARCHITECTURES, NOT_RUN

    found: dict[str, tuple[str, Collection[str], Mapping[str, str]]] = {
        "gguf": ("general.architecture of GGUF files", ARCHITECTURES, NOT_RUN),
        "folders": ("model_type of Hugging Face folders", FAMILIES, NOT_RUN_TYPES),
    }
    if as_json:
        return json.dumps({key: {"run": sorted(run), "not_run": others} for key, (_, run, others) in found.items()})
    lines = []
    for title, run, others in found.values():
        lines += [f"{title}: {len(run)} run", *_wrapped(", ".join(sorted(run))), ""]
        lines.append(f"{title}: known, and not run")
        for reason in sorted(set(others.values())):
            lines += _wrapped(f"{', '.join(sorted(name for name in others if others[name] == reason))}: {reason}")
        lines.append("")
    return "\n".join(lines[:-1])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _table(models: "Sequence[InstalledModel]", *, with_paths: bool) -> list[str]:
    from localinfer.storage.hub.variants import describe_size

    rows = [["NAME", "QUANT", "SIZE", "LAST USED", *(["FROM", "PATH"] if with_paths else [])]]
    for model in models:
        used = "" if model.last_used is None else datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d %H:%M")
        row = [model.name, model.quant or "", describe_size(model.num_bytes), used]
        rows.append([*row, model.source, str(model.path)] if with_paths else row)
    if len(rows) == 1:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def known_models() -> list[str]:
    """Names that -m takes: models that were pulled, or that other programs keep here; none if they cannot be read."""
    from localinfer.storage.hub.installed import find_installed
    from localinfer.storage.hub.places import Places

    places = Places.of_user()
    try:
        models = find_installed(places)
    except (LocalinferError, OSError):
        return []
    return [model.name for model in models if not model.problem]


EXIT_FINDINGS = 1


@click.command("show")
@model_argument("model")
@flag("--tensors", "List every tensor.")
@flag("--ops", "List the ops that the model computes, without running it.")
@flag("--verify", "Check every weight, vocabulary, template, settings and output; exit status 1 for findings.")
@option(
    "--certificate", "FILE", "Compare bit for bit with what `localinfer certify` wrote; exit status 1 for differences."
)
@flag("--json as_json", "Print one JSON object, with all metadata.")
@click.pass_context
def show_command(
    context: click.Context, model: str, tensors: bool, ops: bool, verify: bool, certificate: str | None, as_json: bool
) -> None:
    """Show the contents of a GGUF file or a Hugging Face folder.

    For a quantized folder, also how its matrices are stored, and the types that they run as.
    """
    from localinfer.apps.show.describe import describe_file, render_json, render_text
    from localinfer.terminal import Progress

    description = describe_file(model, ops=ops)
    verification = None
    if verify:
        from localinfer.apps.show.verify import verify_model

        with Progress() as progress:
            verification = verify_model(model, progress, certificate)
    elif certificate is not None:
        from localinfer.apps.show.verify import verify_certificate

        with Progress() as progress:
            verification = verify_certificate(model, certificate, progress)
    render = render_json if as_json else render_text
    click.echo(render(description, tensors=tensors, verification=verification))
    if verification is not None and verification.findings:
        context.exit(EXIT_FINDINGS)


@click.command("certify")
@model_argument("model")
@option("-o --output", "FILE", "Write the certificate to FILE.", required=True)
def certify_command(model: str, output: str) -> None:
    """Write digests of a model and of what it computes, to compare other copies and machines with.

    `localinfer show MODEL --certificate FILE` makes the comparison, bit for bit, on any CPU; with --verify beside all
    other checks.
    """
    from localinfer.apps.show.certificate import certify
    from localinfer.system.files import OutputFile, check_output
    from localinfer.terminal import Progress

    check_output(output, inputs=(model,))
    with Progress() as progress:
        made = certify(model, progress)
    with OutputFile(output) as file:
        file.write(made.write())
    click.echo(f"{made.model}: {len(made.tensors)} tensors, {len(made.settings)} settings, {len(made.outputs)} probes")


@click.command("warmup")
@model_option
@takes_config()
@device_option("Where the model will be computed; auto: the GPU, if there is one.")
@option("--kv-type", "TYPE", "KV cache element type of later loads, as for chat.", default="f16")
@option("--kv-window", "N", "Also for this --kv-window of later loads.", type=COUNT)
@option("--draft", "MODEL", "Also for this draft model.")
@option("--packs", "FOLDER", "Compile all kernels into packs for other machines instead; without a model.")
def warmup_command(
    model: str | None, device: str, kv_type: str, kv_window: int | None, draft: str | None, packs: str | None
) -> None:
    """Compile what a model needs, so that its first start is as fast as any other.

    Its weights are not read. Models of the same architecture and quantization share what is compiled, once per machine
    and version.

    With --packs every kernel is compiled for the common levels of this kind of CPU, for minutes. A wheel can carry the
    packs (see docs/apps.md), or LOCALINFER_KERNEL_PACKS names their folder to machines with the same version.
    """
    import localinfer
    from localinfer.storage.hub.installed import find_model

    if packs is not None:
        _write_packs(packs)
        return

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


def _write_packs(folder: str) -> None:
    """Make packs of kernels in a folder, and say which."""
    from localinfer.kernels.jit import packs

    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{folder} cannot be made: {error.strerror or error}; name another folder") from error
    with Progress() as progress:
        for written, count in packs.build(path, progress):
            click.echo(f"{written}: {count} kernels, {written.stat().st_size / 1e6:.1f} MB")
