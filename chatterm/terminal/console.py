"""The keyboard of a Windows console, which termios does not know."""


def console_keys() -> str:
    """Take the keys that were pressed and not read yet, without waiting; return "" on other systems."""
    try:
        import msvcrt
    except ImportError:
        return ""
    keys = ""
    while msvcrt.kbhit():  # type: ignore[attr-defined, unused-ignore]
        keys += msvcrt.getwch()  # type: ignore[attr-defined, unused-ignore]
    return keys
