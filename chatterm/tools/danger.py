"""Detection of shell commands that always need approval.

This warns; it prevents nothing. A person reads the whole command in any case, and a marked command needs approval
every time, whatever rules exist. So it marks too much rather than too little.
"""

import re

from chatterm.terminal.sanitize import is_safe

_INVISIBLE = re.compile(
    "[\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e01ef]"
)
_SHELLS = r"(?:ba|da|z|k|c|tc|fi|a)?sh|python[\d.]*|perl|ruby|node|php|lua|awk"
_HIDES = "hides what it runs"
_WORD = r"(?<![\w./-])(?:[\w./~-]*/)?"
"""Start of a command's name, after an optional path: anywhere, for names that are rarely ordinary words."""
_BEFORE = r"env|exec|command|time|nice|timeout\s+\S+|then|do|else|if|while|!"
_HEAD = rf"(?:^|[;&|({{\n`]\s*|\b(?:{_BEFORE})\s+)(?:\w+=\S*\s+)*(?:[\w./~-]*/)?"
"""Start of a command's name where a command begins, for names that are also ordinary words."""


def _commands(anywhere: str, first: str = "") -> str:
    """Return an expression for commands named `anywhere`, or named `first` where a command begins."""
    found = [rf"{_WORD}(?:{anywhere})\b"] if anywhere else []
    return "|".join([*found, rf"{_HEAD}(?:{first})\b"] if first else found)


_REST = r"[^|;&\n]*"
_INSTALLERS = (
    r"pip[\d.]*|pipx|uvx?|npm|npx|pnpm|yarn|cargo|gem|go|make|docker|podman|kubectl|"
    r"apt|apt-get|dnf|yum|brew|snap|pacman"
)
_VARIABLES = r"LD_\w+|PYTHON\w+|NODE_OPTIONS|BASH_ENV|ENV|PATH|IFS|GIT_\w+|PAGER|EDITOR"
_UNDONE = (
    r"reset\s+--hard|clean\b|checkout\s+(?:--|\.)|restore\b|branch\s+-D|stash\s+(?:drop|clear)|"
    r"filter-branch|rebase"
)

_RULES: tuple[tuple[str, str], ...] = (
    (_commands("sudo|doas|pkexec|run0", "su"), "runs with other permissions"),
    (rf"{_WORD}rm\b{_REST}\s-{{1,2}}\w*[rRf]", "deletes without asking"),
    (_commands("rm|rmdir|unlink|shred|truncate|srm"), "deletes"),
    (rf"{_WORD}find\b[^|;\n]*-(?:delete|exec|execdir|ok)\b", "deletes what it finds, or runs commands on it"),
    (_commands("xargs", "parallel"), "runs commands on what it reads"),
    (rf"\|\s*(?:\S*/)?(?:env\s+|exec\s+|command\s+)*(?:{_SHELLS})\b", "runs what another program prints"),
    (rf"{_WORD}(?:{_SHELLS})\b{_REST}<\s*\(", "runs what another program prints"),
    (_commands("eval", "source") + r"|(?:^|[;&|(]\s*)\.\s", "runs text as a command"),
    (rf"{_WORD}(?:{_SHELLS})\s+(?:-\w*\s+)*-\w*[ce]\b", "runs text as a command"),
    (
        _commands(r"dd|mkfs[\w.]*|fdisk|parted|wipefs|mkswap|umount|losetup", "mount"),
        "changes disks or mounts",
    ),
    (r"/dev/(?:sd|nvme|hd|vd|mem|kmem|disk|mapper|tcp|udp)", "uses a device"),
    (
        rf"{_WORD}git\b{_REST}\bpush\b{_REST}(?:\s-\w*f|--force|--delete|--mirror|\s\+)",
        "rewrites or deletes what is published",
    ),
    (rf"{_WORD}git\b{_REST}\bpush\b", "publishes"),
    (rf"{_WORD}git\b{_REST}\b(?:{_UNDONE})", "discards or rewrites work in git"),
    (rf"{_WORD}git\b{_REST}(?:\s-c\s|\bconfig\b)", "changes what git runs"),
    (_commands("chmod|chown|chgrp|chattr|setfacl|setcap"), "changes permissions"),
    (
        _commands("pkill|killall|shutdown|reboot|poweroff|systemctl", "kill|halt|service|init"),
        "ends programs",
    ),
    (_commands("crontab|nohup|setsid|disown|tmux", "at|batch|screen"), "leaves a process running"),
    (_commands("ssh|scp|sftp|rsync|nc|ncat|netcat|socat|telnet|curl|wget", "ftp|https?"), "uses the network"),
    (_commands("", _INSTALLERS), "runs code from elsewhere, or installs"),
    (_commands("mv|cp|tee|sponge", "ln|install|rename"), "may overwrite files"),
    (rf"{_WORD}(?:sed|perl)\b{_REST}\s-\w*i", "changes files in place"),
    (rf"{_WORD}tar\b{_REST}(?:\s-?\w*x|--extract)|{_WORD}(?:unzip|7z|cpio)\b", "may overwrite files"),
    (r"(?:^|[^<>&\d])[\d&]*>{1,2}\|?(?!\s*(?:&\d|/dev/null\b))|<>", "writes into a file"),
    (_commands("", "export|alias|unalias|trap|exec|ulimit|umask|set"), "changes the shell"),
    (rf"\b(?:{_VARIABLES})=", "changes what programs run"),
    (r"\$\(|`|<\(|>\(", "runs a command within the command"),
    (r"\$\{?\w*IFS|\$'|\$\"|\\x[0-9a-fA-F]|\\[0-7]{3}|base64|xxd|\bprintf\b[^|;]*\|", _HIDES),
    (r"(?:^|[;&|(]\s*)[\"']?\$", _HIDES),
    (
        r"(?:^|[\s=:<>\"'({,])(?:~|\$\{?HOME|\.\.(?:/|\s|$|[;&|)\"'])|/(?!dev/null\b)\w)",
        "names a path outside the folder",
    ),
    (r"\.ssh|\.gnupg|\.aws|\.netrc|\.env\b|id_rsa|id_ed25519|credentials|/etc/shadow", "may read secrets"),
    (r":\s*\(\s*\)\s*\{|\w+\s*\(\s*\)\s*\{", "defines a function"),
    (r"(?:^|[^&])&(?:\s*$|\s*[^&>\d\s])", "leaves a process running"),
    (r"<<", "feeds text to a program"),
)
_COMPILED = tuple((re.compile(expression), what) for expression, what in _RULES)
_NAME = re.compile(r"(?:^|[;&|(\n]\s*)(\S+)")
_BUILT = re.compile(r"[\\'\"$*?\[{]")


def dangers(command: str) -> tuple[str, ...]:
    """Return the reasons why `command` always needs approval, each once; () if there are none."""
    found = (
        ["has characters that cannot be seen"] if not is_safe(command) or _INVISIBLE.search(command) else []
    )
    for text in (command, _unquoted(command)):
        found += [what for expression, what in _COMPILED if expression.search(text)]
    if any(_BUILT.search(name) for name in _NAME.findall(command)):
        found.append(_HIDES)  # a name with quotes in it, or built by expansion
    if "deletes without asking" in found:
        found = [what for what in found if what != "deletes"]
    return tuple(dict.fromkeys(found))


def revealed(text: str) -> str:
    """Return `text` with invisible characters written out, as `<U+200B>`."""
    return _INVISIBLE.sub(lambda match: f"<U+{ord(match[0]):04X}>", text)


def _unquoted(command: str) -> str:
    """Remove quotes, backslashes and line continuations as the shell does: `r\\m` and `r''m` are `rm`."""
    return re.sub(r"[\\'\"]", "", re.sub(r"\\\r?\n", "", command))
