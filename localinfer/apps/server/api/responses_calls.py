"""Calls of tools as items of the API of responses: made from what a model writes, and as the model reads them again.

A kind of tool that a client runs itself has items of its own, whose members are made from the arguments of a function.
A call that was cut off is never one that could be run: its item is `incomplete`, and has of its action nothing.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from localinfer.apps.server.replies.message_fields import FunctionCall
from localinfer.apps.server.replies.tool_fields import CallKind, CustomInput, ToolName, joined_name
from localinfer.apps.server.transport.http import unsupported
from localinfer.generation.chat.custom_tools import PATCH_BEGIN, PATCH_END, custom_arguments

Item = dict[str, Any]
_OPERATIONS = {
    "create_file": "*** Add File: ",
    "update_file": "*** Update File: ",
    "delete_file": "*** Delete File: ",
}
"""Type of an operation of `apply_patch_call` -> how its part of a patch begins."""


class CallItem:
    """The item of one call of a function, while its arguments come.

    Events are pairs of a name behind `response.` and members beside the item's place.
    """

    kind = "function_call"
    prefix = "fc"

    def __init__(self, tool: ToolName, call_id: str | None) -> None:
        self._tool = tool
        self._call_id = call_id

    def members(self) -> Item:
        """The members of the item before anything of its arguments is known."""
        named = {"name": self._tool.name, "arguments": ""}
        return {"call_id": self._call_id, **named, **self._namespace}

    @property
    def _namespace(self) -> Item:
        return {} if self._tool.namespace is None else {"namespace": self._tool.namespace}

    def push(self, item: Item, text: str) -> Iterator[tuple[str, Item]]:
        """Take the next part of the arguments' JSON."""
        yield "function_call_arguments.delta", {"delta": text}

    def close(self, item: Item, text: str, *, is_whole: bool) -> Iterator[tuple[str, Item]]:
        """Put the whole into the item. text: all of the arguments' JSON. is_whole: they were not cut off."""
        item["arguments"] = text
        yield "function_call_arguments.done", {"name": item["name"], "arguments": text}


class CustomCallItem(CallItem):
    """The item of one call of a custom tool."""

    kind = "custom_tool_call"
    prefix = "ctc"

    def __init__(self, tool: ToolName, call_id: str | None) -> None:
        super().__init__(tool, call_id)
        self._input = CustomInput()

    def members(self) -> Item:
        return {"call_id": self._call_id, "name": self._tool.name, "input": "", **self._namespace}

    def push(self, item: Item, text: str) -> Iterator[tuple[str, Item]]:
        if made := self._input.push(text):
            yield "custom_tool_call_input.delta", {"delta": made}

    def close(self, item: Item, text: str, *, is_whole: bool) -> Iterator[tuple[str, Item]]:
        if rest := self._input.rest():
            yield "custom_tool_call_input.delta", {"delta": rest}
        item["input"] = self._input.text
        yield "custom_tool_call_input.done", {"input": item["input"]}


class ShellCallItem(CallItem):
    """The item of one call of a shell, which is known when it is whole."""

    prefix = "sh"
    _action: Mapping[str, Any] = {"commands": [], "timeout_ms": None, "max_output_length": None}

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The type of the item."""
        return f"{self._tool.kind}_call"

    def members(self) -> Item:
        return {"call_id": self._call_id, "action": dict(self._action)}

    def push(self, item: Item, text: str) -> Iterator[tuple[str, Item]]:
        return iter(())

    def close(self, item: Item, text: str, *, is_whole: bool) -> Iterator[tuple[str, Item]]:
        if is_whole:
            item["action"] |= json.loads(text)
        return iter(())


class LocalShellCallItem(ShellCallItem):
    """The item of one call of a local shell."""

    prefix = "lsh"
    _action = {"type": "exec", "command": [], "env": {}}


class PatchCallItem(CallItem):
    """The item of one call of `apply_patch`: one operation, whose diff comes letter by letter."""

    kind = "apply_patch_call"
    prefix = "apc"

    def __init__(self, tool: ToolName, call_id: str | None) -> None:
        super().__init__(tool, call_id)
        self._input = CustomInput()
        self._held = ""
        self._is_in_diff = False

    def members(self) -> Item:
        return {"call_id": self._call_id, "operation": None}

    def push(self, item: Item, text: str) -> Iterator[tuple[str, Item]]:
        self._held += self._input.push(text)
        if item["operation"] is None:
            begin, _, behind = self._held.removeprefix(PATCH_BEGIN).partition("\n")
            if not self._held.startswith(PATCH_BEGIN) or "\n" not in self._held[len(PATCH_BEGIN) :]:
                return
            for kind, mark in _OPERATIONS.items():
                if begin.startswith(mark):
                    diff = {} if kind == "delete_file" else {"diff": ""}
                    item["operation"] = {"type": kind, "path": begin.removeprefix(mark), **diff}
            self._held = behind
        if item["operation"] is not None and (made := self._certain()) and "diff" in item["operation"]:
            item["operation"]["diff"] += made
            yield "apply_patch_call_operation_diff.delta", {"delta": made}

    def _certain(self) -> str:
        """Text that is held, but for a last line that may be the end of the patch."""
        start = self._held.rfind("\n") + 1
        if not self._held[start:].startswith(PATCH_END) and not PATCH_END.startswith(self._held[start:]):
            start = len(self._held)
        made, self._held = self._held[:start], self._held[start:]
        return made

    def close(self, item: Item, text: str, *, is_whole: bool) -> Iterator[tuple[str, Item]]:
        if item["operation"] is not None and "diff" in item["operation"]:
            yield "apply_patch_call_operation_diff.done", {"diff": item["operation"]["diff"]}


_ITEMS: Mapping[CallKind, type[CallItem]] = {
    "function": CallItem,
    "custom": CustomCallItem,
    "shell": ShellCallItem,
    "local_shell": LocalShellCallItem,
    "apply_patch": PatchCallItem,
}


def call_item(tool: ToolName, call_id: str | None) -> CallItem:
    """The item of a call that begins."""
    return _ITEMS[tool.kind](tool, call_id)


CALLS = ("function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call")
"""Types of items that are calls which the client runs; behind each, `_output` is the type of its result."""


def read_call(kind: str, item: Mapping[str, Any], path: str) -> FunctionCall:
    """A call as the model wrote it. Raises: ApiError for one that has nothing to run."""
    match kind, item:
        case "function_call", {"name": str(name)}:
            arguments = item.get("arguments")
            return FunctionCall(joined_name(item.get("namespace"), name), arguments)
        case "custom_tool_call", {"name": str(name)}:
            return FunctionCall(joined_name(item.get("namespace"), name), custom_arguments(item.get("input") or ""))
        case "local_shell_call" | "shell_call", {"action": dict(action)}:
            given = {name: value for name, value in action.items() if value not in (None, {}) and name != "type"}
            return FunctionCall(kind.removesuffix("_call"), json.dumps(given, ensure_ascii=False))
        case "apply_patch_call", {"operation": {"type": str(type_), "path": str(name)} as operation}:
            diff = operation.get("diff") or ""
            diff += "\n" if diff and not diff.endswith("\n") else ""
            patch = f"{PATCH_BEGIN}{_OPERATIONS.get(type_, '*** Update File: ')}{name}\n{diff}{PATCH_END}"
            return FunctionCall("apply_patch", custom_arguments(patch))
    raise unsupported(f"{path} is of type {kind!r:.40} and has nothing that is called; give its name or action", path)


def read_output(kind: str, output: Any, status: object) -> Any:
    """The result of a call as text, where it has a shape of its own; content as it is otherwise."""
    match kind:
        case "shell_call_output" if isinstance(output, list):
            return "\n".join(_shell_text(one) for one in output if isinstance(one, Mapping))
        case "apply_patch_call_output":
            return output or ("done" if status != "failed" else "failed")
    return output


def _shell_text(output: Mapping[str, Any]) -> str:
    outcome = output.get("outcome")
    parts = [str(output[name]) for name in ("stdout", "stderr") if output.get(name)]
    match outcome:
        case {"type": "timeout"}:
            parts.append("(it ran out of time)")
        case {"exit_code": int(code)} if code or not parts:
            parts.append(f"(exit code {code})")
    return "\n".join(parts)


_HOSTED: Mapping[str, str] = {
    "web_search_call": "action",
    "file_search_call": "queries results",
    "code_interpreter_call": "code outputs",
    "computer_call": "action actions",
    "computer_call_output": "",
    "image_generation_call": "",
    "mcp_list_tools": "server_label error",
    "mcp_approval_request": "server_label name arguments",
    "mcp_approval_response": "approve reason",
    "mcp_call": "server_label name arguments output error",
    "tool_search_call": "arguments",
    "tool_search_output": "tools",
    "additional_tools": "tools",
    "program": "code",
    "program_output": "result",
}
"""Items of tools that a server runs -> the members that the model is shown of them; pictures are none."""


def hosted_text(kind: str, item: Mapping[str, Any]) -> str | None:
    """A call of a tool that another server ran, or its result, as text; None for items of other types."""
    members = _HOSTED.get(kind)
    if members is None:
        return None
    shown = {name: item[name] for name in members.split() if item.get(name) is not None}
    return f"[{kind}] {json.dumps(shown, ensure_ascii=False)}" if shown else f"[{kind}]"
