"""A sandbox for commands, where bubblewrap is installed: no network, read-only files, its own process tree."""

import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_HIDDEN = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".config", ".netrc", ".npmrc", ".pypirc"),
    *(".git-credentials", ".password-store", ".mozilla", ".thunderbird", ".local/share"),
    *(".bash_history", ".zsh_history", ".python_history"),
)
"""Paths in a person's home that no command of a model needs to see."""
_PROBE_S = 5.0


@cache
def program() -> str | None:
    """Return the path of bubblewrap if it works here: some systems install it but forbid its use."""
    found = shutil.which("bwrap")
    if found is None:
        return None
    try:
        probe = [found, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"]
        done = subprocess.run(
            probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found if done.returncode == 0 else None


def confined(bwrap: str, folder: Path, command: Sequence[str], home: Path, may_write: bool) -> list[str]:
    """Return the command line that runs `command` in `folder`, which is writable only if `may_write`."""
    given = [bwrap, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    # Hide /run: the sockets of services there work without a network.
    for place in ("/tmp", "/run", "/var/tmp"):
        if Path(place).is_dir() and not Path(place).is_symlink():
            given += ["--tmpfs", place]
    for name in _HIDDEN:
        path = home / name
        if path.is_symlink() or not path.exists() or folder == path or path in folder.parents:
            continue
        given += ["--tmpfs", str(path)] if path.is_dir() else ["--ro-bind", "/dev/null", str(path)]
    given += ["--bind" if may_write else "--ro-bind", str(folder), str(folder), "--chdir", str(folder)]
    given += ["--unshare-all", "--new-session", "--die-with-parent", "--cap-drop", "ALL", "--"]
    return [*given, *command]
