"""Requests to a connected server other than tool calls; its responses are bounded and not trusted."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from chatterm.terminal.sanitize import is_safe, one_line
from chatterm.tools.mcp.catalog import (
    MOST,
    Offers,
    ServerPrompt,
    ServerResource,
    parse_prompt,
    parse_resource,
)
from chatterm.tools.output import bounded
from chatterm.tools.tool import ToolError

if TYPE_CHECKING:
    from mcp import Client

T = TypeVar("T")
MOST_TEXT = 100_000
"""The longest text of a prompt or a resource, in characters."""
_MOST_PAGES = 10
_MOST_VALUES = 50


async def list_pages(
    page_of: Callable[[str | None], Awaitable[Any]], items: str, made: Callable[[Any], T | None], most: int
) -> list[T]:
    """Fetch a paginated list and return up to `most` of its `items`, parsed by `made`, without those it rejects."""
    found: list[T] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await page_of(cursor)
        found += [one for told in getattr(page, items)[: 4 * most] if (one := made(told)) is not None]
        cursor = page.next_cursor
        if not cursor or len(found) >= most:
            break
    return found[:most]


async def offers(client: "Client") -> Offers:
    """Fetch the server's prompts and resources, as far as it supports them."""
    able = client.server_capabilities
    prompts: list[ServerPrompt] = []
    resources: list[ServerResource] = []
    if getattr(able, "prompts", None) is not None:
        prompts = await list_pages(lambda c: client.list_prompts(cursor=c), "prompts", parse_prompt, MOST)
    if getattr(able, "resources", None) is not None:
        resources = await list_pages(
            lambda c: client.list_resources(cursor=c), "resources", parse_resource, MOST
        )
        resources += await list_pages(
            lambda c: client.list_resource_templates(cursor=c), "resource_templates", parse_resource, MOST
        )
    return Offers(tuple(prompts), tuple(resources[:MOST]))


async def prompt(client: "Client", name: str, arguments: Mapping[str, str]) -> str:
    """Fetch a prompt's messages as one text. Raises ToolError if it is empty."""
    found = await client.get_prompt(name, dict(arguments))
    messages = list(found.messages)[:100]
    with_roles = any(message.role != "user" for message in messages)
    parts = []
    for message in messages:
        said = content_text([message.content], MOST_TEXT)
        parts.append(f"{message.role.title()}: {said}" if with_roles else said)
    text = bounded("\n\n".join(parts), MOST_TEXT).strip()
    if not text:
        raise ToolError(f"The prompt {one_line(name, 60)} is empty.")
    return text


async def resource(client: "Client", uri: str) -> str:
    """Fetch the text of a resource. Raises ToolError if it has none."""
    found = await client.read_resource(uri)
    texts = (getattr(one, "text", None) for one in list(found.contents)[:100])
    parts = [str(text) for text in texts if text is not None]
    if not parts:
        raise ToolError(f"{one_line(uri, 200)} is not text.")
    return bounded("\n\n".join(parts), MOST_TEXT)


async def values(
    client: "Client", name: str, argument: str, begun: str, given: Mapping[str, str]
) -> list[str]:
    """Fetch completions of a prompt's argument; [] if the server does not support them."""
    from mcp.types import PromptReference

    if getattr(client.server_capabilities, "completions", None) is None:
        return []
    reference = PromptReference(type="ref/prompt", name=name)
    asked = {"name": argument, "value": begun}
    found = await client.complete(reference, asked, dict(given) or None)
    offered = [str(value) for value in found.completion.values[:1_000]]
    return [value for value in offered if 0 < len(value) <= 200 and is_safe(value) and value.isprintable()][
        :_MOST_VALUES
    ]


def content_text(content: Sequence[Any], most: int | None = None) -> str:
    """Return content as text, with placeholders for what is not text."""
    parts: list[str] = []
    for block in list(content)[:1_000]:
        match getattr(block, "type", ""):
            case "text":
                parts.append(str(block.text))
            case "image" | "audio":
                parts.append(f"[{block.type}, {one_line(str(block.mime_type), 60)}, not shown]")
            case "resource":
                parts.append(str(getattr(block.resource, "text", None) or "[data, not shown]"))
            case "resource_link":
                parts.append(f"[resource {one_line(str(block.uri), 200)}]")
            case _:
                parts.append("[something that is not text]")
    text = "\n".join(parts)
    return bounded(text) if most is None else bounded(text, most)


def structured_text(value: Any) -> str:
    return bounded(json.dumps(value, ensure_ascii=False)) if value is not None else ""
