"""Fuzz one target: `python -m tests.proof.fuzz NAME --minutes M [--seed S] [--jobs J]`, from the repository's root.

`--case FILE` runs one input alone, such as a finding, and says what came of it. Ends with status 1 after a finding.
"""

import argparse
import sys
from pathlib import Path

from tests.proof.fuzz.campaign import Campaign
from tests.proof.fuzz.findings import FOUND, Finding, read
from tests.proof.fuzz.target import Target, find_target, target_names
from tests.proof.fuzz.worker_process import WorkerProcess


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof.fuzz", description=__doc__)
    parser.add_argument("name", help=f"the target: {', '.join(target_names())}")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long")
    parser.add_argument("--cases", type=int, help="end after so many inputs")
    parser.add_argument("--seed", type=int, default=0, help="with one job the same seed gives the same inputs")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--case", type=Path, help="run this input alone")
    parser.add_argument("--found", type=Path, help="folder for findings, instead of tests/proof/fuzz/found/NAME")
    parser.add_argument("--progress", action="store_true", help="a line a minute, also where there is no terminal")
    options = parser.parse_args(arguments)
    try:
        target = find_target(options.name)
    except LookupError as error:
        parser.error(str(error))
    if options.case is not None:
        return run_one(target, options.case)
    folder = FOUND / target.name if options.found is None else options.found
    campaign = Campaign(
        target,
        seed=options.seed,
        jobs=options.jobs,
        seconds=60 * options.minutes,
        most_cases=options.cases,
        folder=folder,
        told=_tell,
    )
    says_more = options.progress or sys.stdout.isatty()
    try:
        campaign.run((lambda: print(minute_line(campaign), flush=True)) if says_more else None)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print(table(campaign))
    return 1 if campaign.findings else 0


def run_one(target: Target, path: Path) -> int:
    """Run the input in a file, in a worker of its own."""
    with WorkerProcess(target) as worker:
        report = worker.run(read(path))
    if report.kind:
        print(f"finding: {report.kind} at {report.place or 'no line of ours'}\n{report.text}")
        return 1
    print(f"{report.outcome}\npeak: {report.peak >> 10} KiB more than before")
    return 0


def minute_line(campaign: Campaign) -> str:
    """What there is so far, in one line."""
    counts = campaign.counts
    return (
        f"{campaign.elapsed / 60:5.1f} min  {counts.cases:8,} cases  {len(counts.lines):6,} lines  "
        f"{counts.kept:5,} kept  {len(campaign.findings)} findings"
    )


def table(campaign: Campaign) -> str:
    """All counts, after a campaign."""
    counts = campaign.counts
    rows = [
        ("target", campaign.target.name),
        ("seed", str(campaign.seed)),
        ("minutes", f"{campaign.elapsed / 60:.1f}"),
        ("cases", f"{counts.cases:,}"),
        ("cases per second", f"{counts.cases / max(campaign.elapsed, 1e-9):.1f}"),
        ("lines of localinfer that ran", f"{len(counts.lines):,}"),
        ("kinds of messages and results", f"{len(counts.details):,}"),
        ("inputs kept for mutation", f"{counts.kept:,}"),
        ("most memory of a case", f"{counts.largest_peak / (1 << 20):.1f} MiB"),
        *((outcome, f"{count:,}") for outcome, count in sorted(counts.outcomes.items())),
        ("findings", f"{len(campaign.findings)} (seen again {counts.repeated:,} times)"),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [f"  {kind} at {place or '?'}: {path}" for (kind, place), (_, path) in campaign.findings.items()]
    return "\n".join(lines)


def _tell(finding: Finding, path: Path) -> None:
    text = "\n".join(f"    {line}" for line in finding.text.splitlines()[-40:])
    told = f"finding: {finding.kind} at {finding.place or '?'}: {path} ({len(finding.data)} bytes)\n{text}"
    # A fault may quote half characters, which no terminal takes.
    print(told.encode("utf-8", "backslashreplace").decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
