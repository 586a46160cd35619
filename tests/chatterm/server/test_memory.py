"""What the engine process has freed goes back to the system."""

import subprocess
import sys

import pytest

_PROGRAM = """
import threading
from chatterm.server.process.memory import _trim, give_back
from benchmarks.load import own_bytes

def work():
    kept = [bytes(1000) for _ in range(200_000)]
    last.append(bytes(1000))

last = []
for thread in [threading.Thread(target=work) for _ in range(3)]:
    thread.start()
    thread.join()
before = own_bytes()
give_back()
print(_trim() is not None, before - own_bytes())
"""


def test_memory_that_threads_have_freed_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    can, given = done.stdout.split()
    if can != "True":
        pytest.skip("the allocator of this system has no malloc_trim")
    assert int(given) > 50 * 2**20
