"""Format amounts for display."""


def bytes_text(count: float) -> str:
    """Format bytes in units of a thousand: "999 B", "61 kB", "98 MB", "1.2 GB"."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 9.95 and unit not in ("B", "kB") else f"{value:.0f} {unit}"


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: "1 token", "1,204 tokens", "2 branches"."""
    if count != 1:
        noun += "es" if noun.endswith(("s", "sh", "ch", "x")) else "s"
    return f"{count:,} {noun}"
