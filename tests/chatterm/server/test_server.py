"""The server itself: who may ask, clients that go away or dawdle, bounds, the end."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from select import select

import httpx
import pytest

from chatterm.server.http import keys as keys_module
from chatterm.server.http.app import make_app
from chatterm.server.http.dependencies import check_extra
from chatterm.server.http.keys import ApiKeys, read_keys, read_on_hangup
from chatterm.server.http.limits import Limits
from chatterm.server.http.web import listen
from chatterm.server.service import Health, RequestError
from engine.errors import EngineError
from tests.chatterm.server.fake import FakeService, serving
from tests.counting import PATIENCE, until

CHAT = "/v1/chat/completions"
LONG = {"model": "tiny", "messages": [{"role": "user", "content": "word " * 20_000}], "stream": True}
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}]}


@pytest.fixture(scope="module")
def running():
    with serving(FakeService(), Limits(body_bytes=1_000_000, header_bytes=8192)) as server:
        yield server


@pytest.fixture
def impatient():
    """A server that waits for nobody."""
    with serving(FakeService(), Limits(body_s=0.3, header_s=0.3, write_s=0.3)) as server:
        yield server


@pytest.fixture
def service(running):
    running.service.__init__()
    return running.service


def test_a_client_that_goes_away_ends_its_answer(running, service):
    service.pause_s = 0.001
    with httpx.stream("POST", running.url + CHAT, json=LONG) as response:
        lines = response.iter_lines()
        next(lines)
        assert service.running == 1
    until(lambda: service.closed == 1 and service.running == 0)


def test_a_client_that_goes_away_before_the_answer_ends_it_too(running, service):
    service.pause_s = 0.001
    body = json.dumps({**LONG, "stream": False}).encode()
    connection = raw(running, head("Content-Type: application/json\r\n", len(body)) + body)
    until(lambda: service.running == 1)
    connection.close()
    until(lambda: service.closed == 1 and service.running == 0)


def raw(running, data):
    """A connection that has sent this."""
    found = socket.create_connection(("127.0.0.1", running.port))
    found.sendall(data)
    return found


def head(extra="", length=10):
    return f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{extra}\r\n".encode()


def test_headers_that_never_end_and_bodies_that_never_come_are_cut_off(impatient):
    slow = raw(impatient, b"POST / HTTP/1.1\r\nHost: localhost\r\n")
    silent = raw(impatient, b"")
    bodiless = raw(impatient, head() + b"{")
    for connection in (slow, silent, bodiless):
        connection.settimeout(PATIENCE)
    end = time.monotonic() + PATIENCE
    with suppress(OSError):
        while not select([slow], [], [], 0.02)[0]:  # one byte after the other, until it is cut off
            slow.sendall(b"a")
            assert time.monotonic() < end
    assert not received(slow)
    assert not received(silent)
    assert b"408" in received(bodiless)


def received(connection):
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    connection.close()
    return data


def test_a_client_that_reads_nothing_is_cut_off(impatient):
    connection = stuck(impatient)
    until(lambda: impatient.service.closed == 1 and impatient.service.running == 0)
    assert 0 < impatient.service.said < 20_000
    connection.close()


def stuck(running):
    """A connection that has asked for much and reads nothing."""
    body = json.dumps({**LONG, "logprobs": True, "top_logprobs": 20}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", running.port))
    connection.sendall(head(length=len(body)) + body)
    return connection


def test_a_client_that_reads_nothing_keeps_nobody_waiting_once_the_engine_has_finished():
    service = FakeService(is_quick=True)
    with serving(service, Limits(running=1, waiting=0)) as running, closing(stuck(running)):
        until(lambda: service.running == 1)
        assert httpx.post(running.url + CHAT, json=HELLO).status_code == 200
        assert service.running == 1
        with closing(stuck(running)):  # what is unread takes memory: more of it would be too much
            until(lambda: service.running == 2)
            assert httpx.post(running.url + CHAT, json=HELLO).status_code == 429


def test_sizes_are_bounded(running, service):
    assert httpx.post(running.url + CHAT, content=b"x" * 1_000_001).status_code == 413
    chunks = (b"x" * 100_000 for _ in range(20))
    assert httpx.post(running.url + CHAT, content=chunks).status_code == 413
    assert (
        received(raw(running, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000))[9:12]
        == b"400"
    )
    assert httpx.post(running.url + CHAT, content=b"[" * 100_000).status_code == 400
    assert service.asked == []


def in_chunks(body):
    return b"%x\r\n%b\r\n" % (len(body), body)


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("path", "status"), [(CHAT, 413), ("/v1/embeddings", 404)])
def test_who_sends_all_of_a_refused_request_before_reading_gets_to_read_why(
    running, is_chunked, path, status
):
    part = b"x" * 2**20
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {16 * len(part)}"
    start = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode()
    with closing(raw(running, start)) as connection:
        for _ in range(16):  # more than the buffers of both sockets hold
            connection.sendall(in_chunks(part) if is_chunked else part)
        connection.sendall(b"0\r\n\r\n" if is_chunked else b"")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer[9:12] == b"%d" % status
    assert b"connection: close" in answer
    assert b'"error"' in answer


def test_who_never_stops_sending_is_cut_off_by_size_and_by_time():
    def sent(connection, part, pause_s):
        """How much could be sent, until there is no connection."""
        size = 0
        with suppress(OSError):
            while size < 10**9:
                connection.sendall(part)
                size += len(part)
                time.sleep(pause_s)
        connection.close()
        return size

    with serving(FakeService(), Limits(body_bytes=1000, refused_bytes=10**7)) as running:
        assert 10**7 < sent(raw(running, head(length=10**12)), b"x" * 2**20, 0.0) < 10**9
    with serving(FakeService(), Limits(body_bytes=1000, body_s=0.2)) as running:
        connection = raw(running, head(length=10**12))
        assert b"413" in connection.recv(65536)
        assert 0 < sent(connection, b"x", 0.01) < 10**9


def test_who_still_sends_a_refused_request_does_not_hold_up_the_end():
    with serving(FakeService(), Limits(body_bytes=1000, body_s=3600, shutdown_s=3600)) as running:
        connection = raw(running, head(length=10**12))
        assert b"413" in connection.recv(65536)
    connection.close()


def test_paths_that_do_not_exist_and_methods_that_do_not_fit(running):
    found = httpx.post(running.url + "/v1/embeddings", json={})
    assert (found.status_code, found.json()["error"]["code"]) == (404, "unknown_url")
    refused = httpx.get(running.url + CHAT)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert httpx.delete(running.url + "/api/tags").json()["error"].startswith("/api/tags")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "", "[::1"])
def test_a_name_that_was_made_point_here_is_refused(running, host):
    assert httpx.get(running.url + "/v1/models", headers={"Host": host}).status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:9", "LOCALHOST:80"])
def test_names_of_this_machine_are_fine(running, host):
    assert httpx.get(running.url + "/v1/models", headers={"Host": host}).status_code == 200


def test_web_pages_are_kept_out(running, service):
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    found = httpx.post(running.url + CHAT, content=json.dumps(HELLO), headers=headers)
    assert found.status_code == 403
    assert httpx.options(running.url + CHAT, headers=headers).status_code == 403
    assert httpx.get(running.url + "/v1/models", headers={"Origin": "null"}).status_code == 403
    assert service.asked == []
    same = httpx.get(running.url + "/v1/models", headers={"Origin": running.url})
    assert same.status_code == 200
    assert not [name for name in same.headers if name.startswith("access-control")]


def test_a_key():
    with serving(FakeService(), keys=ApiKeys({"secret": "", "other": "alice"})) as running:
        url = running.url + "/v1/models"
        for given in (
            None,
            "secret",
            "Bearer",
            "Bearer secre",
            "Bearer secret2",
            "Basic secret",
            "Bearer \xff",
        ):
            headers = {} if given is None else {"Authorization": given.encode("latin-1")}
            found = httpx.get(url, headers=headers)
            assert found.status_code == 401
            assert found.headers["www-authenticate"] == "Bearer"
        assert (
            httpx.get(url, headers={"Authorization": "Bearer secret", "Host": "my.proxy"}).status_code == 200
        )
        assert httpx.get(url, headers={"Authorization": "bearer other"}).status_code == 200
        assert httpx.get(running.url + "/health").status_code == 200
        assert "error" in httpx.get(running.url + "/api/tags").json()


def test_another_host_needs_a_key():
    app = make_app(FakeService())
    for host in ("0.0.0.0", "192.0.2.1", "example.org", "::"):
        with pytest.raises(EngineError, match="api-key-file"):
            listen(app, host, 0)
    first = listen(app, "127.0.0.1", 0)
    with pytest.raises(EngineError, match="Choose another --port"):
        listen(app, "127.0.0.1", first.getsockname()[1])
    first.close()


def test_the_queue_is_bounded_and_says_when_to_come_back():
    with serving(FakeService(pause_s=0.001), Limits(running=1, waiting=0)) as running:
        with httpx.stream("POST", running.url + CHAT, json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            refused = httpx.post(running.url + CHAT, json=HELLO)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        until(lambda: running.service.running == 0)
        until(lambda: httpx.post(running.url + CHAT, json=HELLO).status_code == 200)


def test_an_engine_that_hangs_is_given_up_on(monkeypatch):
    monkeypatch.setattr("chatterm.server.http.endpoint.LATE_S", 0.1)
    with serving(FakeService(pause_s=60), Limits(request_s=0.1)) as running:
        found = httpx.post(running.url + CHAT, json=HELLO)
        assert (found.status_code, found.json()["error"]["code"]) == (504, "timeout")
        assert running.service.running == 0


def test_an_engine_that_breaks_in_the_middle_is_told_in_the_stream(running, service):
    async def breaks(request, finished):
        async for piece in FakeService()._pieces(request):
            yield piece
            if len(request.messages) and piece.__class__.__name__ == "Delta":
                raise RequestError(500, "server_error", "The engine has stopped; try again.")

    service.generate = breaks
    lines = httpx.post(running.url + CHAT, json={**HELLO, "stream": True}).text.split("\n\n")
    assert json.loads(lines[-3][6:])["error"]["message"].startswith("The engine has stopped")
    assert lines[-2] == "data: [DONE]"
    assert httpx.post(running.url + CHAT, json=HELLO).status_code == 500
    ollama = httpx.post(running.url + "/api/chat", json=HELLO).text.strip().split("\n")
    assert json.loads(ollama[-1]) == {"error": "The engine has stopped; try again."}
    del service.generate


def test_a_mistake_of_ours_is_a_500_that_tells_nothing(running, service, caplog):
    def mistake(request, index):
        raise KeyError("a secret of the inside")

    service.say = mistake
    found = httpx.post(running.url + CHAT, json=HELLO)
    assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in found.text
    assert "secret" in caplog.text


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/api/chat"])
def test_streams_end_with_an_error_when_the_server_stops(path):
    body = {**LONG, "input": "word " * 20_000} if path == "/v1/responses" else LONG
    body = {
        name: value for name, value in body.items() if name != ("messages" if "input" in body else "input")
    }
    with serving(FakeService(pause_s=0.001), Limits(shutdown_s=0.1)) as running:
        with httpx.stream("POST", running.url + path, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            running.stop()
            text = "\n".join(lines)
        assert "shutting down" in text
        running.thread.join(PATIENCE)
        assert running.service.running == 0


def test_a_stream_says_that_it_is_still_there(monkeypatch):
    monkeypatch.setattr("chatterm.server.http.sse.QUIET_S", 0.01)
    service = FakeService(say=lambda request, index: [("answer", "one two three")], pause_s=0.1)
    with serving(service) as running:
        text = httpx.post(running.url + CHAT, json={**HELLO, "stream": True}, timeout=30).text
    assert ": still there\n\n" in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (Health(False), "not running"),
        (Health(True, heard_s=60.0), "not answered for 60 s"),
        (Health(True, busy_s=99.0), "in the same step for 99 s"),
    ],
)
def test_a_server_that_lives_may_not_be_ready(running, service, known, said):
    for path in ("/health", "/health/ready", "/health/live"):
        assert httpx.get(running.url + path).json() == {"status": "ok"}
    service.known = known
    assert httpx.get(running.url + "/health/live").status_code == 200
    for path in ("/health", "/health/ready"):
        found = httpx.get(running.url + path)
        assert (found.status_code, said in found.json()["reason"]) == (503, True)
    refused = httpx.post(running.url + CHAT, json=HELLO)
    assert (refused.status_code, said in refused.json()["error"]["message"]) == (503, True)
    assert int(refused.headers["retry-after"]) >= 1
    assert "\nchatterm:ready 0\n" in httpx.get(running.url + "/metrics").text


def test_tokenize(running, service):
    found = httpx.post(
        running.url + "/tokenize", json={"model": "tiny", "prompt": "a bc", "return_token_strs": True}
    ).json()
    assert found == {"count": 2, "max_model_len": 4096, "tokens": [1, 2], "token_strs": ["<1>", "<2>"]}
    assert httpx.post(running.url + "/tokenize", json={**HELLO, "model": "tiny"}).json()["count"] == 2
    assert httpx.post(running.url + "/tokenize", json={"model": "tiny"}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {**HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 2**31}, "max_output_tokens"),
        ("/api/chat", {**HELLO, "options": {"num_predict": 2**31}}, "num_predict"),
    ],
)
def test_the_length_of_an_answer_is_refused_by_its_own_name(running, path, body, named):
    refused = httpx.post(running.url + path, json=body)
    assert refused.status_code == 400
    assert named in refused.text
    assert '"max_tokens' not in refused.text


def test_metrics_are_what_prometheus_reads(running, service):
    for _ in range(2):
        httpx.post(running.url + CHAT, json=HELLO)
    page = httpx.get(running.url + "/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = {}
    kinds = {}
    for line in page.text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert kinds.setdefault(name, kind) == kind
        elif not line.startswith("#"):
            found = re.fullmatch(r'([a-z0-9_:]+)(\{(?:[a-z_]+="[^"]*",?)+\})? (\S+)', line)
            assert found, line
            values[found[1] + (found[2] or "")] = float(found[3])
    label = '{model_name="tiny"}'
    assert values[f"vllm:kv_cache_usage_perc{label}"] == 0.25
    assert values[f"vllm:prefix_cache_hits_total{label}"] == 5
    assert values[f"vllm:time_to_first_token_seconds_count{label}"] >= 2
    assert values['vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="tiny"}'] >= 2
    assert values['vllm:request_success_total{finished_reason="stop",model_name="tiny"}'] >= 2
    assert values[f'chatterm:http_requests_total{{path="{CHAT}",status="200"}}'] >= 2


def test_many_connections_at_once(running, service):
    found = []

    def ask(number):
        body = {**HELLO, "messages": [{"role": "user", "content": f"Number {number}"}]}
        with httpx.Client() as client:
            for _ in range(3):
                answer = client.post(running.url + CHAT, json=body, timeout=60).json()
                found.append((number, answer["choices"][0]["message"]["content"]))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted((number, f"Number {number}") for number in range(10) for _ in range(3))


def test_keys_are_read_from_a_file(tmp_path, caplog):
    path = tmp_path / "key"
    path.write_text("a-long-secret\n\n# The other one.\nalice  her-secret\n")
    for mode, is_told in ((0o600, False), (0o640, True)):
        path.chmod(mode)
        assert read_keys(path) == {"a-long-secret": "", "her-secret": "alice"}
        assert ("Others can read" in caplog.text) is is_told
    for wrong, said in (
        ("", "There is no key"),
        ("a-long-secret\nshort", "Line 2 .* at least 8"),
        ("two words here", "Line 1 .* at least 8"),
        ("a-long-secret\nbob a-long-secret", "Line 2 .* repeats"),
    ):
        path.write_text(wrong)
        with pytest.raises(EngineError, match=said):
            read_keys(path)
    with pytest.raises(EngineError, match="cannot be read"):
        read_keys(tmp_path / "nothing")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs SIGHUP")
def test_keys_are_read_again_on_a_hangup(tmp_path, caplog, monkeypatch):
    path = tmp_path / "key"
    path.write_text("a-long-secret\n")
    path.chmod(0o600)
    keys, read = ApiKeys(read_keys(path)), []
    monkeypatch.setattr(keys_module, "read_keys", lambda path: read.append(path) or read_keys(path))

    async def hang_up(text):
        before = len(read)
        read_on_hangup(path, keys)
        path.write_text(text)
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(PATIENCE):
            while len(read) == before:
                await asyncio.sleep(0)

    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    try:
        asyncio.run(hang_up("alice another-secret\n"))
        assert (keys.name_of(b"another-secret"), keys.name_of(b"a-long-secret")) == ("alice", None)
        asyncio.run(hang_up("short\n"))
        assert keys.name_of(b"another-secret") == "alice"
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        asyncio.run(left_alone(path, keys))
    finally:
        signal.signal(signal.SIGHUP, earlier)
    assert "The keys from before stay in use." in caplog.text


async def left_alone(path, keys):
    """Under nohup the signal stays ignored."""
    read_on_hangup(path, keys)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_what_is_not_installed_is_named(monkeypatch):
    check_extra()
    monkeypatch.setattr("chatterm.server.http.dependencies.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"starlette, uvicorn, httptools;.*chatterm\[server\]"):
        check_extra()


def test_the_server_brings_no_torch():
    program = "import sys, chatterm.server.http.app, chatterm.server.http.web; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
