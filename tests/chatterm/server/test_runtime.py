"""Where a server is found: one for each user, in a folder that is closed to others."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chatterm.ipc import runtime as places
from chatterm.ipc.runtime import connect, has_socket, is_own, listen, socket_path
from engine.errors import EngineError


def test_the_folder_and_the_socket_are_closed_to_others(runtime: Path) -> None:
    runtime.rmdir()
    assert not has_socket()
    assert connect() is None
    with listen() as listener:
        assert runtime.stat().st_mode & 0o777 == 0o700
        assert socket_path().stat().st_mode & 0o777 == 0o600
        assert has_socket()
        peer = connect()
        assert peer is not None
        with peer, listener.socket.accept()[0] as other:
            assert is_own(other)
    assert not has_socket()


def test_there_is_one_server(runtime: Path) -> None:
    with listen(), pytest.raises(EngineError, match="is already running"), listen():
        pass
    with listen():  # the first one is gone
        pass


def test_what_a_killed_server_left_behind_is_found_out_and_removed(runtime: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(socket_path()))
    stale.close()
    assert has_socket()
    assert connect() is None
    with listen():
        peer = connect()
        assert peer is not None
        peer.close()


def test_a_folder_that_others_may_enter_is_refused(runtime: Path) -> None:
    runtime.chmod(0o755)
    with pytest.raises(EngineError, match="chmod 700"), listen():
        pass
    assert connect() is None


def test_a_folder_that_is_none_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime / "link").symlink_to(runtime)
    monkeypatch.setenv("CHATTERM_RUNTIME", str(runtime / "link"))
    with pytest.raises(EngineError, match="not a folder of yours"), listen():
        pass
    (runtime / "file").touch()
    monkeypatch.setenv("CHATTERM_RUNTIME", str(runtime / "file"))
    with pytest.raises(EngineError), listen():
        pass


def test_a_name_that_is_too_long_for_a_socket(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATTERM_RUNTIME", str(runtime / ("x" * 120)))
    with listen():
        path = socket_path()
        assert len(os.fsencode(path)) < 104
        peer = connect()
        assert peer is not None
        peer.close()
    path.with_name("engine.lock").unlink()
    path.parent.rmdir()


@pytest.fixture
def on_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Unix sockets, as on Windows."""
    monkeypatch.setattr(places, "has_unix_sockets", lambda: False)


@pytest.mark.usefixtures("on_a_port")
def test_without_unix_sockets_both_sides_of_a_port_show_who_they_are(runtime: Path) -> None:
    with listen() as listener, ThreadPoolExecutor(1) as pool:
        assert listener.socket.getsockname()[0] == "127.0.0.1"
        assert socket_path().stat().st_mode & 0o777 == 0o600
        connecting = pool.submit(connect)
        with listener.socket.accept()[0] as other:
            assert other.recv(64) == listener.asked
            other.sendall(listener.reply)
            peer = connecting.result()
        assert peer is not None
        peer.close()
        assert len({listener.asked, listener.reply}) == 2
        connecting = pool.submit(connect)  # now somebody else listens there
        with listener.socket.accept()[0] as other:
            other.sendall(bytes(len(listener.reply)))
            assert connecting.result() is None
    assert not has_socket()


@pytest.mark.usefixtures("on_a_port")
@pytest.mark.parametrize(
    "said", ["", "1", "1 aa bb", "99999 aa bb", "x y z", "1 " + "a" * 64 + " " + "b" * 64]
)
def test_a_file_that_names_no_server(said: str, runtime: Path) -> None:
    socket_path().write_text(said)
    assert connect() is None
    with listen():  # it is replaced
        pass
