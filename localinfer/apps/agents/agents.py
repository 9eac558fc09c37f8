"""Settings of each coding agent for a model of this machine: one record per agent, with the version that was tried.

A value may name facts of the server in braces, such as `{model}`; one that is nothing else becomes the fact itself, a
number too. Variables and options of the process are preferred; files of the agent are written only where it takes a
setting in no other way.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localinfer.apps.agents.settings_files import FileSettings
from localinfer.apps.agents.settings_text import KeyPath, SettingsFormat
from localinfer.errors import RequestError

_FACT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class ServerFacts:
    """Facts of a server and its model that settings name."""

    url: str
    """Address of the server, without a path."""
    model: str
    """Id of the model."""
    context: int
    """Tokens that the model's context holds."""
    output: int
    """Most tokens of a reply."""
    compact: int
    """Tokens of a conversation from which on it is to be compacted."""
    key: str
    """Token of the server, or any text where it asks for none."""
    folder: str
    """Folder for files that localinfer writes for the agent."""


@dataclass(frozen=True)
class AgentFile:
    """Values in a file of the agent's own."""

    path: str
    """The file; `~` is the home folder, and a variable in braces with a default may begin it: `{VARIABLE:~/folder}`."""
    form: SettingsFormat
    """Its notation."""
    values: tuple[tuple[KeyPath, Any], ...]
    """Keys, from the outermost on, and the value of each."""


@dataclass(frozen=True)
class Agent:
    """An agent's program, and its settings."""

    name: str
    """As the command line has it."""
    title: str
    """Its own name."""
    program: str
    """Of the processes that are looked for in PATH."""
    install: str
    """Line that installs it."""
    tried: str
    """Version that these settings were tried with; empty where none was."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Variables of its process: texts, or objects that become JSON; an empty text takes a variable away."""
    arguments: tuple[str, ...] = ()
    """Options before those of the user."""
    made_files: Mapping[str, Any] = field(default_factory=dict)
    """Files in localinfer's own folder that options name: JSON values by name."""
    files: tuple[AgentFile, ...] = ()
    """Files of the agent."""
    least_context: int = 16_384
    """Tokens below which its instructions leave no room for a conversation."""
    note: str = ""
    """Advice to its user; empty for none."""


@dataclass(frozen=True)
class Plan:
    """Settings of an agent for one server."""

    environment: dict[str, str]
    """Variables that are set."""
    unset: tuple[str, ...]
    """Variables that are taken away."""
    arguments: tuple[str, ...]
    """Options before those of the user."""
    made_files: dict[Path, bytes]
    """Files of localinfer's own folder."""
    files: tuple[FileSettings, ...]
    """Values in files of the agent."""


def plan_of(agent: Agent, facts: ServerFacts, environment: Mapping[str, str]) -> Plan:
    """The settings of an agent with the facts of a server. environment: where the agent's folders may be named."""
    known = asdict(facts)
    filled = {name: _text(_filled(value, known)) for name, value in agent.environment.items()}
    return Plan(
        {name: value for name, value in filled.items() if value},
        tuple(name for name, value in filled.items() if not value),
        tuple(str(_filled(one, known)) for one in agent.arguments),
        {
            Path(facts.folder) / name: (json.dumps(_filled(value, known), indent=1) + "\n").encode()
            for name, value in agent.made_files.items()
        },
        tuple(
            FileSettings(
                _path(one.path, environment),
                one.form,
                tuple(
                    (tuple(str(_filled(key, known)) for key in keys), _filled(value, known))
                    for keys, value in one.values
                ),
            )
            for one in agent.files
        ),
    )


def find_agent(name: str) -> Agent:
    """The agent of a name. Raises: RequestError."""
    if name not in AGENTS:
        raise RequestError(f"there are no settings for an agent {name!r:.40}; there are {', '.join(AGENTS)}")
    return AGENTS[name]


def _filled(value: Any, known: Mapping[str, Any]) -> Any:
    """A value with facts in place of their names in braces; other braces stay."""
    if isinstance(value, Mapping):
        return {str(_filled(key, known)): _filled(one, known) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_filled(one, known) for one in value]
    if not isinstance(value, str):
        return value
    if (whole := _FACT.fullmatch(value)) and whole[1] in known:
        return known[whole[1]]
    return _FACT.sub(lambda found: str(known.get(found[1], found[0])), value)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def _path(text: str, environment: Mapping[str, str]) -> Path:
    found = re.fullmatch(r"\{(\w+):([^}]*)\}(.*)", text)
    if found is not None:
        text = (environment.get(found[1]) or found[2]) + found[3]
    home = environment.get("HOME") or str(Path.home())
    return Path(home + text[1:] if text.startswith("~/") else text)


_PROVIDER = "localinfer"
_OPENCODE = {
    "model": f"{_PROVIDER}/{{model}}",
    "small_model": f"{_PROVIDER}/{{model}}",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        _PROVIDER: {
            "npm": "@ai-sdk/openai-compatible",
            "name": _PROVIDER,
            "options": {"baseURL": "{url}/v1", "apiKey": "{key}", "timeout": False},
            "models": {
                "{model}": {
                    "name": "{model}",
                    "tool_call": True,
                    "limit": {"context": "{context}", "output": "{output}"},
                    "cost": {"input": 0, "output": 0},
                }
            },
        }
    },
}
_CODEX_MODEL = {
    "slug": "{model}",
    "display_name": "{model}",
    "description": "A model of this machine.",
    "default_reasoning_level": "medium",
    "supported_reasoning_levels": [{"effort": "medium", "description": "As the model does by itself."}],
    "shell_type": "shell_command",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 0,
    "base_instructions": (
        "You are a coding agent that runs in a terminal and shares a folder with its user. Read the files that matter "
        "before you change them, change as little as the task needs, keep the style of what is there, and check your "
        "work by running what the project has for it. Change files with apply_patch, and use the shell for everything "
        "else; search with rg where it is installed. Never undo changes that are not yours. Go on until the task is "
        "done, then say briefly what you did, with paths and lines; if something cannot be done, say what is missing."
    ),
    "supports_reasoning_summaries": False,
    "support_verbosity": False,
    "apply_patch_tool_type": "freeform",
    "truncation_policy": {"mode": "bytes", "limit": 10_000},
    "supports_parallel_tool_calls": True,
    "context_window": "{context}",
    "auto_compact_token_limit": "{compact}",
    "experimental_supported_tools": [],
    "input_modalities": ["text"],
}

_RECORDS = (
    Agent(
        name="claude",
        title="Claude Code",
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        tried="2.1.332",
        environment={
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "{key}",
            "ANTHROPIC_API_KEY": "",
            "CLAUDE_CODE_USE_BEDROCK": "",
            "CLAUDE_CODE_USE_VERTEX": "",
            "ANTHROPIC_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_FABLE_MODEL": "{model}",
            "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context}",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context}",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{output}",
            # A line that counts requests, at the very beginning of the prompt.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            # A CPU reads the first prompt for minutes.
            "API_TIMEOUT_MS": "3600000",
        },
        # The folder, its branch and changed files go behind what all sessions share.
        arguments=("--exclude-dynamic-system-prompt-sections",),
        least_context=49_152,
    ),
    Agent(
        name="codex",
        title="Codex",
        program="codex",
        install="npm install -g @openai/codex",
        tried="0.171.0",
        environment={"LOCALINFER_API_KEY": "{key}"},
        arguments=(
            "-m",
            "{model}",
            "-c",
            f'model_provider="{_PROVIDER}"',
            "-c",
            # By this name it asks the server for compactions, and not the model for a summary.
            f'model_providers.{_PROVIDER}.name="OpenAI"',
            "-c",
            f'model_providers.{_PROVIDER}.base_url="{{url}}/v1"',
            "-c",
            f'model_providers.{_PROVIDER}.wire_api="responses"',
            "-c",
            f'model_providers.{_PROVIDER}.env_key="LOCALINFER_API_KEY"',
            "-c",
            f"model_providers.{_PROVIDER}.stream_idle_timeout_ms=3600000",
            "-c",
            "model_context_window={context}",
            "-c",
            "model_auto_compact_token_limit={compact}",
            "-c",
            "model_catalog_json='{folder}/codex-models.json'",
            "-c",
            'web_search="disabled"',
            "-c",
            "check_for_update_on_startup=false",
            "-c",
            "analytics.enabled=false",
        ),
        made_files={"codex-models.json": {"models": [_CODEX_MODEL]}},
    ),
    Agent(
        name="opencode",
        title="OpenCode",
        program="opencode",
        install="npm install -g opencode-ai",
        tried="1.18.33",
        environment={
            "OPENCODE_CONFIG_CONTENT": _OPENCODE,
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
    ),
    Agent(
        name="aider",
        title="aider",
        program="aider",
        install="python -m pip install aider-chat",
        tried="0.86.2",
        environment={"OPENAI_API_KEY": "{key}", "OPENAI_API_BASE": "{url}/v1"},
        arguments=(
            "--model",
            "openai/{model}",
            "--weak-model",
            "openai/{model}",
            "--editor-model",
            "openai/{model}",
            "--model-metadata-file",
            "{folder}/aider-models.json",
            "--no-show-model-warnings",
            "--no-check-update",
            "--no-show-release-notes",
            "--no-analytics",
            "--timeout",
            "3600",
        ),
        made_files={
            "aider-models.json": {
                "openai/{model}": {
                    "max_tokens": "{output}",
                    "max_input_tokens": "{context}",
                    "max_output_tokens": "{output}",
                    "input_cost_per_token": 0,
                    "output_cost_per_token": 0,
                    "litellm_provider": "openai",
                    "mode": "chat",
                }
            }
        },
        least_context=8192,
    ),
    Agent(
        name="goose",
        title="goose",
        program="goose",
        install="npm install -g @aaif/goose-binary-linux-x64",
        tried="1.52.0",
        environment={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": "{model}",
            "GOOSE_FAST_MODEL": "{model}",
            "GOOSE_CONTEXT_LIMIT": "{context}",
            "GOOSE_MAX_TOKENS": "{output}",
            "GOOSE_TELEMETRY_ENABLED": "false",
            "GOOSE_DISABLE_KEYRING": "1",
            "OPENAI_HOST": "{url}",
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": "{key}",
            "OPENAI_TIMEOUT": "3600",
        },
    ),
    Agent(
        name="cline",
        title="Cline",
        program="cline",
        install="npm install -g cline",
        tried="3.0.65",
        environment={
            "CLINE_PROVIDER_SETTINGS_PATH": "{folder}/cline/providers.json",
            "CLINE_NO_AUTO_UPDATE": "1",
        },
        arguments=("-P", "openai-compatible", "-m", "{model}"),
        made_files={
            "cline/providers.json": {
                "version": 1,
                "lastUsedProvider": "openai-compatible",
                "modes": {},
                "providers": {
                    "openai-compatible": {
                        "settings": {
                            "provider": "openai-compatible",
                            "apiKey": "{key}",
                            "model": "{model}",
                            "baseUrl": "{url}/v1",
                        },
                        "updatedAt": "2026-01-01T00:00:00.000Z",
                        "tokenSource": "manual",
                    }
                },
            },
            "cline/models.json": {
                "version": 1,
                "providers": {
                    "openai-compatible": {
                        "provider": {
                            "name": _PROVIDER,
                            "baseUrl": "{url}/v1",
                            "defaultModelId": "{model}",
                        },
                        "models": {
                            "{model}": {
                                "id": "{model}",
                                "name": "{model}",
                                "contextWindow": "{context}",
                                "maxInputTokens": "{context}",
                                "maxTokens": "{output}",
                                "capabilities": ["streaming", "tools"],
                            }
                        },
                    }
                },
            },
        },
    ),
    Agent(
        name="pi",
        title="pi",
        program="pi",
        install="npm install -g @earendil-works/pi-coding-agent",
        tried="1.6.0",
        environment={"PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0", "PI_OFFLINE": "1"},
        arguments=("--provider", _PROVIDER, "--model", "{model}"),
        files=(
            AgentFile(
                "{PI_CODING_AGENT_DIR:~/.pi/agent}/models.json",
                "json",
                (
                    (
                        ("providers", _PROVIDER),
                        {
                            "baseUrl": "{url}/v1",
                            "api": "openai-completions",
                            "apiKey": "{key}",
                            "models": [
                                {
                                    "id": "{model}",
                                    "name": "{model}",
                                    "reasoning": False,
                                    "input": ["text"],
                                    "contextWindow": "{context}",
                                    "maxTokens": "{output}",
                                    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                                }
                            ],
                        },
                    ),
                ),
            ),
        ),
        least_context=8192,
    ),
    Agent(
        name="continue",
        title="Continue",
        program="cn",
        install="npm install -g @continuedev/cli",
        tried="1.5.47",
        environment={"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"},
        arguments=("--config", "{folder}/continue.yaml"),
        # JSON is YAML too.
        made_files={
            "continue.yaml": {
                "name": _PROVIDER,
                "version": "1.0.0",
                "schema": "v1",
                "models": [
                    {
                        "name": "{model}",
                        "provider": "openai",
                        "model": "{model}",
                        "apiBase": "{url}/v1",
                        "apiKey": "{key}",
                        "useResponsesApi": False,
                        "roles": ["chat", "edit", "apply", "summarize"],
                        "capabilities": ["tool_use"],
                        "defaultCompletionOptions": {"contextLength": "{context}", "maxTokens": "{output}"},
                        "requestOptions": {"timeout": 3_600_000},
                    }
                ],
            }
        },
    ),
    Agent(
        name="copilot",
        title="Copilot CLI",
        program="copilot",
        install="npm install -g @github/copilot",
        tried="1.0.102",
        environment={
            "COPILOT_PROVIDER_BASE_URL": "{url}/v1",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_API_KEY": "{key}",
            "COPILOT_MODEL": "{model}",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": "{context}",
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "{output}",
            "COPILOT_OFFLINE": "true",
            "COPILOT_AUTO_UPDATE": "false",
        },
        least_context=32_768,
    ),
    Agent(
        name="zed",
        title="Zed",
        program="zed",
        install="curl -f https://zed.dev/install.sh | sh",
        tried="",
        environment={"LOCALINFER_API_KEY": "{key}"},
        arguments=("--foreground",),
        files=(
            AgentFile(
                "{XDG_CONFIG_HOME:~/.config}/zed/settings.json",
                "json",
                (
                    (
                        ("language_models", "openai_compatible", _PROVIDER),
                        {
                            "api_url": "{url}/v1",
                            "available_models": [
                                {
                                    "name": "{model}",
                                    "display_name": "{model}",
                                    "max_tokens": "{context}",
                                    "max_output_tokens": "{output}",
                                    "capabilities": {
                                        "tools": True,
                                        "images": False,
                                        "parallel_tool_calls": True,
                                        "prompt_cache_key": False,
                                    },
                                }
                            ],
                        },
                    ),
                    (("agent", "default_model"), {"provider": _PROVIDER, "model": "{model}"}),
                ),
            ),
        ),
        note="on no package registry, so it was not tried; its settings follow its documentation",
    ),
)

AGENTS: dict[str, Agent] = {one.name: one for one in _RECORDS}
"""All agents by name."""
