"""What counts as the head of a response, however its bytes come."""

import pytest

from models.hub import response_head
from models.hub.response_head import Head

FINAL = b"HTTP/1.1 200 OK\r\nX: y\r\n\r\n"
INTERIM = b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("data", [FINAL, INTERIM + FINAL, INTERIM * 3 + FINAL, FINAL.replace(b"\r", b"")])
def test_a_head_is_limited_from_its_first_byte_to_its_last(
    data: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(response_head, "monotonic", lambda: now)
    head = Head()
    for _ in range(2):  # the connection is used again
        assert head.limit(None) is None
        head.sent()
        assert head.limit(9.0) == 9.0, "a model may read a prompt for minutes"
        for at in range(0, len(data) - 1, size):
            head.read(data[at : min(at + size, len(data) - 1)])
        now += 20.0
        assert head.limit(None) == pytest.approx(10.0)
        assert head.limit(3.0) == 3.0
        now += 20.0
        assert 0 < (head.limit(3.0) or 0) < 0.1
        head.read(data[-1:] + b"the body\n\n")
        assert head.limit(None) is None
        head.read(b"HTTP/1.1 2")
        assert head.limit(None) is None
