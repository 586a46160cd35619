"""/v1/models and /tokenize."""

from typing import Any

from msgspec import Struct

from chatterm.server.http.fields import Table, wrong
from chatterm.server.http.limits import Limits
from chatterm.server.http.openai.common import ChatMessagePart, parse_messages
from chatterm.server.service import ServedModel, Service


def model_object(model: ServedModel, limits: Limits) -> dict[str, Any]:
    """Return the object of a model. `max_model_len` is vLLM's name."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "chatterm",
        "root": model.name,
        "parent": None,
        "max_model_len": limits.room(model.context_length),
        "loaded": model.loaded,
    }


class TokenizeRequest(Struct):
    """A request to /tokenize."""

    model: str
    prompt: str | None = None
    messages: list[ChatMessagePart] | None = None
    return_token_strs: bool = False


TOKENIZE = Table(
    TokenizeRequest,
    {
        **dict.fromkeys(("add_special_tokens", "add_generation_prompt"), (True,)),
        "continue_final_message": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "tools": ([],),
    },
)


async def tokenized(
    given: TokenizeRequest, model: ServedModel, service: Service, limits: Limits
) -> dict[str, Any]:
    """Return the tokens of a text or a conversation. Raises RequestError."""
    if (given.prompt is None) == (given.messages is None):
        raise wrong("prompt", "Give either prompt or messages.")
    text = given.prompt if given.prompt is not None else parse_messages(given.messages or [])
    ids = await service.tokenize(model.name, text)
    texts = await service.token_texts(model.name, ids) if given.return_token_strs else None
    room = limits.room(model.context_length)
    return {"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": texts}
