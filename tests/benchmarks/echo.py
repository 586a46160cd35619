"""A program that answers workloads at once: the seconds it reports are the number of requested tokens."""

import sys

from benchmarks.peers.serving import Workload, answer, replies


def seconds(work: Workload) -> float:
    if work.at_once == 0:
        raise ValueError("nobody may run\nand more")
    return float(work.generated)


if __name__ == "__main__":
    if "--broken" in sys.argv:
        sys.exit(3)
    lines = replies()
    print("this is no answer")
    answer(lines, {"arguments": sys.argv[1:]}, seconds)
