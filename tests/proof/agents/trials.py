"""How each agent is asked without a terminal: the arguments that come behind `localinfer launch NAME --`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.proof.agents.stand_in import AGAIN, EDIT, LONG

FILLER = " ".join(f"word{index % 89}" for index in range(1200))
"""A text that fills a part of a small context."""


@dataclass(frozen=True)
class Trial:
    """What is installed of an agent, and its arguments for each part of the trial."""

    package: str
    """On the registry of npm, or of Python where `is_python` says so."""
    edit: tuple[str, ...]
    """Begins a session that edits the file."""
    resume: tuple[str, ...]
    """Asks a further question in the latest session."""
    interrupted: tuple[str, ...]
    """Asks for the long reply."""
    compact: tuple[str, ...] = ()
    """Compacts the latest session; empty where that cannot be asked for without a terminal."""
    compact_input: str = ""
    """Standard input of that, held open for a while."""
    typed: tuple[str, str] | None = None
    """Lines that are typed on a terminal for `resume` and `compact`, where these need one; empty for none."""
    compact_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables with which the agent compacts early."""
    compact_context: int = 0
    """Context of the model for that, where an agent compacts by itself at the next question; 0 for the whole."""
    home_files: Mapping[str, str] = field(default_factory=dict)
    """Files of its user's, by path in the home folder."""
    is_python: bool = False
    """True for a package of Python."""
    program: str = ""
    """Path of the program in its package, where npm does not link it."""
    has_tools: bool = True
    """False where edits are written in the text of replies."""


TRIALS: dict[str, Trial] = {
    "claude": Trial(
        "@anthropic-ai/claude-code",
        edit=("-p", EDIT, "--permission-mode", "acceptEdits"),
        resume=("-c", "-p", AGAIN),
        interrupted=("-c", "-p", LONG),
        compact=("-c", "-p", "/compact"),
    ),
    "codex": Trial(
        "@openai/codex",
        edit=("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", EDIT),
        resume=("exec", "--skip-git-repo-check", "resume", "--last", AGAIN),
        interrupted=("exec", "--skip-git-repo-check", "resume", "--last", LONG),
        compact=(
            "-c",
            "model_auto_compact_token_limit=1500",
            "exec",
            "--skip-git-repo-check",
            "resume",
            "--last",
            AGAIN,
        ),
    ),
    "opencode": Trial(
        "opencode-ai",
        edit=("run", EDIT),
        resume=("run", "-c", AGAIN),
        interrupted=("run", "-c", LONG),
        compact=("run", "-c", f"{FILLER} {AGAIN}"),
        compact_context=20_480,
    ),
    "aider": Trial(
        "aider-chat",
        edit=("--yes-always", "--no-git", "--no-pretty", "--message", EDIT, "notes.txt"),
        resume=("--yes-always", "--no-git", "--no-pretty", "--restore-chat-history", "--message", AGAIN, "notes.txt"),
        interrupted=("--yes-always", "--no-git", "--no-pretty", "--message", LONG),
        compact=(
            "--yes-always",
            "--no-git",
            "--no-pretty",
            "--restore-chat-history",
            "--max-chat-history-tokens",
            "64",
            "--message",
            AGAIN,
        ),
        is_python=True,
        has_tools=False,
    ),
    "cline": Trial(
        "cline",
        edit=(EDIT,),
        resume=("-i", "--id", "{session}"),
        interrupted=(LONG,),
        compact=("-i", "--id", "{session}"),
        typed=(AGAIN, "/compact"),
    ),
    "goose": Trial(
        "@aaif/goose-binary-linux-x64",
        edit=("run", "-n", "trial", "-t", EDIT),
        resume=("run", "-r", "-n", "trial", "-t", AGAIN),
        interrupted=("run", "-r", "-n", "trial", "-t", LONG),
        compact=("run", "-r", "-n", "trial", "-t", AGAIN),
        compact_environment={"GOOSE_AUTO_COMPACT_THRESHOLD": "0.01"},
        program="@aaif/goose-binary-linux-x64/bin/goose",
    ),
    "pi": Trial(
        "@earendil-works/pi-coding-agent",
        edit=("-p", EDIT),
        resume=("-c", "-p", AGAIN),
        interrupted=("-c", "-p", LONG),
        compact=("-c", "--mode", "rpc"),
        compact_input='{"type": "compact"}\n',
        home_files={".pi/agent/settings.json": '{"compaction": {"keepRecentTokens": 16}}\n'},
    ),
    "continue": Trial(
        "@continuedev/cli",
        edit=("-p", EDIT, "--auto"),
        resume=("-p", AGAIN, "--auto", "--resume"),
        interrupted=("-p", LONG, "--auto", "--resume"),
        compact=("-p", "/compact", "--auto", "--resume"),
    ),
    "copilot": Trial(
        "@github/copilot",
        edit=("-p", EDIT, "--allow-all-tools"),
        resume=("--continue", "-p", AGAIN),
        interrupted=("--continue", "-p", LONG),
        compact=("--continue",),
        # The first Enter says that the folder is trusted.
        typed=("", "\n/compact"),
    ),
}
