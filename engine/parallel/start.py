"""What every rank but the first runs: `start.py SOCKET RING`. It says that it lives before it imports what is heavy."""

import sys
from pathlib import Path
from socket import socket
from threading import Thread

_ROOT = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    if _ROOT not in sys.path:  # the code of rank 0, wherever that came from
        sys.path.insert(0, _ROOT)
    from engine.parallel.link import beat

    link = socket(fileno=int(sys.argv[1]))
    Thread(target=beat, args=(link,), daemon=True).start()

    from engine.parallel.follower import main

    main(link, int(sys.argv[2]))
