"""The table of the methods of a Backend that are called by name."""

from typing import Any

import pytest

from chatterm.backends.backend import Backend, Document, EngineError, Exchange
from chatterm.backends.calls import KINDS, arguments_type
from chatterm.ipc.messages import pack, unpack

LOOKED_AT = {"model", "info", "last", "used_tokens", "options", "figures", "notes", "waiting", "made_title"}
"""What is only read."""


def test_every_method_of_the_protocol_has_a_kind() -> None:
    members = {name for name in vars(Backend) if not name.startswith("_")}
    assert members == {*KINDS} | LOOKED_AT | {"has_loaded", "close"}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("stop", (None,)),
        ("send", ("Name a river.",)),
        ("resume", ()),
        ("candidates", ("Which?", 3)),
        ("load_path", ([Exchange(1, None, "hi", "ho")],)),
        ("configure", ({"system": None, "documents": (Document("paper", "A text."),)},)),
    ],
)
def test_arguments_come_through_the_wire_as_they_were(method: str, arguments: tuple[Any, ...]) -> None:
    assert unpack(pack(arguments), arguments_type(method)) == arguments


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("send", (3,)),
        ("send", ()),
        ("send", ("a", "b")),
        ("resume", ("a",)),
        ("load_path", ([{"user": "hi"}],)),
        ("configure", ({"think": "sometimes"},)),
        ("configure", ("on",)),
    ],
)
def test_other_arguments_are_refused_in_one_line(method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(EngineError) as caught:
        unpack(pack(arguments), arguments_type(method))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "method", sorted(name for name, kind in KINDS.items() if kind not in ("load", "aside"))
)
def test_the_arguments_and_the_result_of_every_call_can_be_decoded(method: str) -> None:
    with pytest.raises(EngineError):
        unpack(pack("no arguments"), arguments_type(method))
    result = getattr(Backend, method).__annotations__["return"]
    if KINDS[method] not in ("immediate", "answer", "several"):
        with pytest.raises(EngineError):
            unpack(pack(1.5), result)
