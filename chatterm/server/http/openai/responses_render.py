"""/v1/responses: renders answers, whole or as events."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from chatterm.server.http.answer_state import AnswerItem, AnswerState, Likelihoods, Part, Thought, Totals
from chatterm.server.http.errors import error_object
from chatterm.server.http.openai.chat import logprob_object
from chatterm.server.http.openai.common import new_id
from chatterm.server.http.sse import event
from chatterm.server.service import Logprob, RequestError
from chatterm.tool_calls.reader import AnswerText, CallArguments, CallBegan, CallEnded

_PREFIX = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}


@dataclass(slots=True)
class _Item:
    """One item of the output."""

    said: AnswerItem
    id: str
    call_id: str

    @classmethod
    def of(cls, said: AnswerItem) -> "_Item":
        """Wrap an item, with new ids."""
        return cls(said, new_id(_PREFIX[said.kind]), new_id("call_"))

    @property
    def status(self) -> str:
        return "incomplete" if self.said.is_cut else "completed"


@dataclass(slots=True)
class ResponseRenderer:
    """Renders the items of an answer as events, or as one response."""

    model: str
    echo: Mapping[str, Any]
    """The fields that are repeated from the request."""
    logprobs: bool
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: int = field(default_factory=lambda: int(time.time()))
    _number: int = 0
    _items: list[_Item] = field(default_factory=list)
    _is_open: bool = False
    _likelihoods: tuple[Logprob, ...] = ()

    def begin(self, totals: Totals) -> list[bytes]:
        response = self._response("in_progress", None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def piece(self, state: AnswerState, parts: Sequence[Part]) -> list[bytes]:
        events: list[bytes] = []
        for part in parts:
            match part:
                case Likelihoods(tokens):
                    self._likelihoods += tokens
                case Thought(text):
                    events += self._more(state, "reasoning", text)
                case AnswerText(text):
                    events += self._more(state, "message", text)
                case CallBegan():
                    events += self._open(state)
                case CallArguments(_, text):
                    events.append(
                        self._event("response.function_call_arguments.delta", **self._where(), delta=text)
                    )
                case CallEnded():
                    events += self._close()
                case _:
                    pass
        return events

    def end(self, states: Sequence[AnswerState], totals: Totals) -> list[bytes]:
        status = _status(states[0])
        events = [] if self._items else self._more(states[0], "message", "")
        events += self._close()
        response = self._response(status, self._usage(states, totals))
        return [*events, self._event(f"response.{status}", response=response)]

    def failed(self, error: RequestError) -> list[bytes]:
        said = {"code": error.code or error.kind, "message": error.message}
        if self._is_open:
            self._items[-1].said.is_cut = True
        response = {**self._response("failed", None), "error": said}
        return [
            self._event("error", **said, param=error.param, error=error_object(error)["error"]),
            self._event("response.failed", response=response),
        ]

    def whole(self, states: Sequence[AnswerState], totals: Totals) -> bytes:
        self._items = list(map(_Item.of, states[0].items))
        return msgspec.json.encode(self._response(_status(states[0]), self._usage(states, totals)))

    # -- items

    def _more(self, state: AnswerState, kind: str, text: str) -> list[bytes]:
        """Render more text of an item of this kind: the open one, or a new one."""
        events: list[bytes] = []
        if not self._is_open or self._items[-1].said.kind != kind:
            events += self._open(state)
        if kind == "reasoning":
            name, more = "response.reasoning_text.delta", {}
        else:
            found, self._likelihoods = self._likelihoods, ()
            name, more = "response.output_text.delta", {"logprobs": [logprob_object(one) for one in found]}
        events.append(self._event(name, **self._where(), content_index=0, delta=text, **more))
        return events

    def _open(self, state: AnswerState) -> list[bytes]:
        """Close the open item and announce the next one."""
        events = self._close()
        place = len(self._items)
        self._items.append(_Item.of(state.items[place]))
        self._is_open = True
        said = state.items[place]
        empty = replace(self._items[-1], said=AnswerItem(said.kind, name=said.name))
        shown = self._object(empty, "in_progress")
        if said.kind == "function_call":
            return [*events, self._event("response.output_item.added", output_index=place, item=shown)]
        shown["content"] = []
        part = self._part(empty)
        return [
            *events,
            self._event("response.output_item.added", output_index=place, item=shown),
            self._event("response.content_part.added", **self._where(), content_index=0, part=part),
        ]

    def _close(self) -> list[bytes]:
        if not self._is_open:
            return []
        self._is_open = False
        item, where = self._items[-1], self._where()
        said = item.said
        if said.kind == "function_call":
            done = {"name": said.name, "arguments": said.text}
            events = [self._event("response.function_call_arguments.done", **where, **done)]
        else:
            thinks = said.kind == "reasoning"
            name = "response.reasoning_text.done" if thinks else "response.output_text.done"
            more = {} if thinks else {"logprobs": [logprob_object(one) for one in said.logprobs]}
            events = [
                self._event(name, **where, content_index=0, text=said.text, **more),
                self._event("response.content_part.done", **where, content_index=0, part=self._part(item)),
            ]
        place = where["output_index"]
        item_object = self._object(item, item.status)
        return [*events, self._event("response.output_item.done", output_index=place, item=item_object)]

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    def _part(self, item: _Item) -> dict[str, Any]:
        text = item.said.text
        if item.said.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = [logprob_object(one) for one in item.said.logprobs] if self.logprobs else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _object(self, item: _Item, status: str) -> dict[str, Any]:
        said = item.said
        if said.kind == "function_call":
            return {
                "type": "function_call",
                "id": item.id,
                "call_id": item.call_id,
                "name": said.name,
                "arguments": said.text,
                "status": status,
            }
        if said.kind == "reasoning":
            return {
                "type": "reasoning",
                "id": item.id,
                "summary": [],
                "content": [self._part(item)],
                "status": status,
            }
        return {
            "type": "message",
            "id": item.id,
            "role": "assistant",
            "content": [self._part(item)],
            "status": status,
        }

    # -- the response

    def _event(self, name: str, /, **data: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": name, "sequence_number": number, **data}, name)

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": [self._object(item, item.status) for item in self._items],
            "usage": usage,
            **self.echo,
        }

    def _usage(self, states: Sequence[AnswerState], totals: Totals) -> dict[str, Any]:
        used = states[0].usage
        completion = used.completion_tokens if used is not None else 0
        return {
            "input_tokens": totals.prompt_tokens,
            "input_tokens_details": {"cached_tokens": totals.cached_tokens},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens if used is not None else 0},
            "total_tokens": totals.prompt_tokens + completion,
        }


def _status(state: AnswerState) -> str:
    return "incomplete" if state.is_incomplete else "completed"
