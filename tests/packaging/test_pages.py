"""README.md, the pages in docs/ and those beside the results: everything they refer to exists."""

import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ["chatterm", "engine", "models", "benchmarks", "docs", "tests"]
README = ROOT / "README.md"
DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")])
PAGES = [README, ROOT / "examples" / "README.md", *DOCS]


def text_of(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(((?!https?:)[^)\s]+)\)", text_of(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def test_anchors_are_made_of_headings(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# `/api/chat` and `x_y`\n## [Same](there.md) thing\n```\n# no heading\n```\n## Same thing\n"
    )
    assert anchors(page) == {"apichat-and-x_y", "same-thing", "same-thing-1"}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.is_file() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_files_that_a_page_names_are_there() -> None:
    """Check full paths, and sources named by the end of their path: `disk.py`, `remote/address.py`, `*_avx2.h`."""
    files = [
        *ROOT.glob("*.py"),
        *(path for room in [*ROOMS, "examples"] for path in (ROOT / room).rglob("*.*")),
    ]
    there = [f"/{path.relative_to(ROOT).as_posix()}" for path in files]
    missing = []
    for page in PAGES:
        text = text_of(page)
        whole = re.findall(rf"`((?:{'|'.join(ROOMS)})/[\w./-]+)`", text)
        missing += [f"{page.name}: {name}" for name in whole if not (ROOT / name).exists()]
        sources = re.findall(r"`([\w./*-]+\.(?:py|cpp|h))`", text)
        missing += [
            f"{page.name}: {name}"
            for name in sources
            if not any(fnmatch(path, f"*/{name}") for path in there)
        ]
    assert missing == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached = [README]
    for page in reached:
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.is_file() and target not in reached:
                reached.append(target)
    assert set(DOCS) <= set(reached)
