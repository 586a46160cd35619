"""The cgroups, of v1 and of v2, that limit this process (man 7 cgroups)."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")


def groups(controller: str, proc: Path = PROC) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process's `controller`, from its own outwards.

    Raises ValueError or IndexError if the system's files are not in the format of the manual.
    """
    own: dict[str, PurePosixPath] = {}
    for line in lines(proc / "self/cgroup"):  # 4:memory:/user.slice, or 0::/user.slice for v2
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            own["cgroup" if controllers else "cgroup2"] = PurePosixPath(path)
    for line in lines(proc / "self/mountinfo"):
        mount, _, kind = (part.split() for part in line.partition(" - "))
        if kind[0] not in own or (kind[0] == "cgroup" and controller not in kind[2].split(",")):
            continue
        root, at, group = mount[3], Path(mount[4]), own[kind[0]]
        # In a container, the path may be that of the group on the host, or lead outside of what is mounted: "/../..".
        inside = group.relative_to(root) if group.is_relative_to(root) and ".." not in group.parts else ""
        folder = at / inside
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(at)))


def lines(path: Path) -> list[str]:
    """Return the lines of a file of the system; an empty list if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
