"""Converts an editor's prompts to text for a model, and events to updates for an editor. Pure but for attaching."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from acp import schema

from chatterm.backends.backend import EngineError, Exchange, FinishReason, Outcome, ToolCall, ToolResult
from chatterm.conversation.attachments import attach
from chatterm.terminal.sanitize import cleaned, one_line, visible
from chatterm.tools.arguments import parsed
from chatterm.tools.policy import Answer, choice_text, choices
from chatterm.tools.tool import Effect, ToolError, ToolPlan

Update = Any
"""One of the SDK's session updates."""

_KINDS: dict[Effect, schema.ToolKind] = {
    "read": "read",
    "write": "edit",
    "run": "execute",
    "fetch": "fetch",
    "server": "other",
}
_GRANTS: dict[Answer, schema.PermissionOptionKind] = {
    "no": "reject_once",
    "once": "allow_once",
    "session": "allow_always",
    "always": "allow_always",
}
_STOPS: dict[FinishReason, schema.StopReason] = {
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CONTEXT_FULL: "max_tokens",
    FinishReason.REPETITION: "max_tokens",
    FinishReason.CANCELLED: "cancelled",
}
_MOST_SHOWN = 20_000
"""The most characters of a result sent to an editor; the model gets all of it."""


def to_message(blocks: Iterable[Any], folder: Path) -> str:
    """Join a prompt into one message: its words, then its attached files, which are read from the disk.

    Raises EngineError for content that is not supported, and for a file that cannot be attached.
    """
    words: list[str] = []
    files: list[str] = []
    for block in blocks:
        match block.type:
            case "text":
                words.append(cleaned(block.text))
            case "resource_link":
                name, path = _named(block.uri)
                words.append(name)
                if path is not None:
                    files += _file(path, folder)
            case "resource":
                name, _ = _named(block.resource.uri)
                text = getattr(block.resource, "text", None)
                if text is None:
                    raise EngineError(f"{name} is not text; only text can be attached here.")
                words.append(name)
                files.append(f"{name}:\n{fence_text(cleaned(text))}")
            case other:
                raise EngineError(f"A prompt may contain text and files; {one_line(other, 20)} is neither.")
    message = "".join(words).strip()
    if not message:
        raise EngineError("The prompt is empty; write something.")
    return "\n\n".join([message, *dict.fromkeys(files)])


def _named(uri: str) -> tuple[str, Path | None]:
    """Return the display name of an address, and the local file it points to; None for other addresses."""
    try:
        parts = urlsplit(uri) if len(uri) < 8_000 else None
    except ValueError:  # such as "http://[x"
        parts = None
    if parts is None or parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return one_line(uri, 200), None
    path = unquote(parts.path)
    return one_line(path, 200), Path(path)


def _file(path: Path, folder: Path) -> Sequence[str]:
    if '"' in str(path) or "\n" in str(path) or "\0" in str(path):
        raise EngineError(
            f"{one_line(str(path), 200)} cannot be attached: its name contains a quotation mark or a line break."
        )
    end = "/" if path.is_dir() else ""
    return attach(f'@"{path}{end}"', folder, fetches=False).blocks


def fence_text(text: str, language: str = "") -> str:
    """Put text in a code fence that nothing in it can close, so that an editor shows it literally."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    return f"{fence}{language}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}"


# --- updates ---


def said(kind: str, text: str) -> Update:
    """Return the update for a piece of an answer, or of the thinking before it."""
    block = schema.TextContentBlock(type="text", text=visible(text))
    if kind == "reasoning":
        return schema.AgentThoughtChunk(session_update="agent_thought_chunk", content=block)
    return schema.AgentMessageChunk(session_update="agent_message_chunk", content=block)


def replay(path: Iterable[Exchange]) -> Iterator[Update]:
    """Yield the updates that show a saved conversation to an editor that opens it."""
    asked: list[ToolCall] = []
    for exchange in path:
        if exchange.results:
            for number, result in enumerate(exchange.results):
                yield _call_update(f"{exchange.id}-{number}", result, str(result.state))
        else:
            block = schema.TextContentBlock(type="text", text=visible(exchange.user))
            yield schema.UserMessageChunk(session_update="user_message_chunk", content=block)
        if exchange.reasoning:
            yield said("reasoning", exchange.reasoning)
        if exchange.text:
            yield said("answer", exchange.text)
        asked = exchange.calls
    for number, call in enumerate(asked):  # calls without results
        yield _call_update(
            f"open-{number}", ToolResult(call.name, call.arguments, "It was not run."), "stopped"
        )


def _call_update(id: str, result: ToolResult, state: str) -> Update:
    return schema.ToolCallStart(
        session_update="tool_call",
        tool_call_id=id,
        title=call_title(result.name, result.arguments),
        status="completed" if state == "done" else "failed",
        content=[_text(fence_text(visible(result.text[:_MOST_SHOWN])))],
        raw_input=call_input(result),
    )


def started(id: str, call: ToolCall, plan: ToolPlan, folder: Path) -> Update:
    """Return the update for a planned call that is not approved yet."""
    return schema.ToolCallStart(session_update="tool_call", **_described(id, call, plan, folder))


def to_allow(id: str, call: ToolCall, plan: ToolPlan, why: str, folder: Path) -> schema.ToolCallUpdate:
    """Return the description of a call for a permission request, with all its arguments and `why` it needs one."""
    described = _described(id, call, plan, folder)
    why = f"Caution: {' · '.join(plan.dangers)}" if plan.dangers else why
    return schema.ToolCallUpdate(**{**described, "content": [_text(why), *described["content"]]})


def _described(id: str, call: ToolCall, plan: ToolPlan, folder: Path) -> dict[str, Any]:
    rows = "\n".join(visible(text) for text, _ in plan.shown)
    is_diff = any(tone in ("added", "removed") for _, tone in plan.shown)
    has_place = plan.effect == "write" or plan.tool == "read_file"
    return {
        "tool_call_id": id,
        "title": call_title(plan.tool, plan.subject),
        "kind": "search" if plan.tool == "search" else _KINDS[plan.effect],
        "status": "pending",
        "content": [_text(fence_text(rows, "diff" if is_diff else ""))],
        "locations": [schema.ToolCallLocation(path=str(folder / plan.subject))] if has_place else None,
        "raw_input": call_input(call),
    }


def unplanned(id: str, call: ToolCall, why: str) -> Update:
    """Return the update for a call that could not be planned; `why` is the reason."""
    return schema.ToolCallStart(
        session_update="tool_call",
        tool_call_id=id,
        title=call_title(call.name, call.arguments),
        status="failed",
        content=[_text(fence_text(visible(why)))],
    )


def progress(id: str, status: schema.ToolCallStatus, text: str | None = None) -> Update:
    """Return the update for the progress of a call; `text` is its output so far."""
    content = None if text is None else [_text(fence_text(visible(text)))]
    return schema.ToolCallProgress(
        session_update="tool_call_update", tool_call_id=id, status=status, content=content
    )


def finished(id: str, result: ToolResult) -> Update:
    return progress(id, "completed" if result.state == "done" else "failed", result.text[:_MOST_SHOWN])


def call_title(tool: str, subject: str) -> str:
    """Describe a call in one line. The subject is in ticks, to set a model's text apart from the editor's own."""
    subject = one_line(subject, 120).replace("`", "'")
    return f"{one_line(tool, 60)} `{subject}`" if subject else one_line(tool, 60)


def call_input(call: ToolCall | ToolResult) -> Any:
    try:
        found = parsed(call.arguments)
        json.dumps(found, allow_nan=False)
    except (ToolError, ValueError):
        return None
    return found


def permission_options(plan: ToolPlan) -> list[schema.PermissionOption]:
    """Return the answers a person can choose from; the last one is no."""
    answers = sorted(choices(plan), key=lambda answer: answer == "no")
    return [
        schema.PermissionOption(
            option_id=answer, name=one_line(choice_text(plan, answer), 200), kind=_GRANTS[answer]
        )
        for answer in answers
    ]


def stop_reason(outcome: Outcome | None) -> schema.StopReason:
    reason = outcome.finish_reason if outcome is not None else None
    return _STOPS.get(reason, "end_turn") if reason is not None else "cancelled"


def to_usage(outcome: Outcome | None) -> schema.Usage | None:
    """Return the token counts of an answer."""
    if outcome is None:
        return None
    stats = outcome.stats
    return schema.Usage(
        total_tokens=stats.prompt_tokens + stats.generated_tokens,
        input_tokens=stats.prompt_tokens,
        output_tokens=stats.generated_tokens,
        thought_tokens=stats.reasoning_tokens,
        cached_read_tokens=stats.cached_tokens,
    )


def _text(text: str) -> Any:
    return schema.ContentToolCallContent(
        type="content", content=schema.TextContentBlock(type="text", text=text)
    )
