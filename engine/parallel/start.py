"""The program of every rank but 0: `start.py SOCKET RING`. It sends signs of life before the heavy imports."""

import sys
from pathlib import Path
from socket import socket
from threading import Thread

_ROOT = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    if _ROOT not in sys.path:  # run the same code as rank 0, wherever it is installed
        sys.path.insert(0, _ROOT)
    from engine.parallel.link import beat

    link = socket(fileno=int(sys.argv[1]))
    Thread(target=beat, args=(link,), daemon=True).start()

    from engine.parallel.follower import main

    main(link, int(sys.argv[2]))
