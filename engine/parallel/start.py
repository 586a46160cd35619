"""The program of every rank but 0: `start.py SOCKET RING PLATFORM`. It sends signs of life before the heavy imports."""

import ctypes
import signal
import sys
from pathlib import Path
from socket import socket
from threading import Thread

_ROOT = str(Path(__file__).resolve().parents[2])
_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if _ROOT not in sys.path:  # run the same code as rank 0, wherever it is installed
        sys.path.insert(0, _ROOT)
    from engine.parallel.link import beat

    if sys.argv[3] == "linux":
        # While this process is stopped it cannot see that the socket is closed. If rank 0 has ended already, it will.
        # On other systems `ranks._start` relies on the signals for an orphaned process group. Here the group may not be
        # orphaned: its new parent may be in the same session, such as the first process of a container.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    link = socket(fileno=int(sys.argv[1]))
    Thread(target=beat, args=(link,), daemon=True).start()

    from engine.parallel.follower import main

    main(link, int(sys.argv[2]))
