"""Markdown laid out as lines, at once and while it streams."""

import re
from threading import Event, get_ident
from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it.token import Token

from chatterm.markdown import highlight
from chatterm.markdown.blocks import parser, token_lines
from chatterm.markdown.document import Document
from chatterm.markdown.lines import Line, chop, elided, line_cells, line_text, wrap
from chatterm.markdown.table import table_lines
from tests.fresh import examples

SAMPLE = """\
# Title

A paragraph with **strong *and nested* words**, `code` and a
soft break.

1. one
2. two

   still two
   - nested
     - deeper

- loose

- list

> quoted **text**
> - with a list

| left | right |
|:-----|------:|
| a    |     1 |
| 漢字 | 22 |

```python
def f(x):
    '''doc

    string'''
    return x + 1
```

---

Setext
======

    indented code

A note[^1], \\( x^2 \\) and [a name][two].

\\[
x = y
+ z
\\]

[^1]: the *first*
goes on
[two]: https://example.com/two
[^3]: third
- a list

$$
a_1 * b_1
$$

- [x] done
- [ ] a<br>task with <b>*bold*</b>, $y_1$ and $5

Term
: what it is
: and

: more

The end with a [link](https://example.com/).
"""


def markdown_lines(source: str, width: int) -> list[Line]:
    return token_lines(parser().parse(source), width)


def texts(lines: list[Line]) -> list[str]:
    return [line_text(line).rstrip() for line in lines]


def shown(source: str, width: int = 60) -> str:
    return "\n".join(texts(markdown_lines(source, width)))


def styles_of(source: str, text: str) -> set[str]:
    return {s for line in markdown_lines(source, 60) for t, names in line if text in t for s in names.split()}


COPY = "copy".rjust(59)
"""The head of a code block without a language."""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("two\nlines  \nbroken", "two lines\nbroken"),
        ("- a\n- b\n  - c", "• a\n• b\n  ◦ c"),
        ("9. a\n10. b", " 9. a\n10. b"),
        ("> a\n> b", "▎ a b"),
        ("a\n\n---\n\nb", "a\n\n" + "─" * 60 + "\n\nb"),
        ("```\na\n\n  b\n```", COPY + "\n a\n\n   b"),
        ("```py\nx\n```", " py" + COPY[3:] + "\n x"),
        ("<div>html</div> <i> stays", "<div>html</div> <i> stays"),
        ("<B>bold *and*</B><br/>H<sub>2</sub>O, x<sup>2</sup>, <kbd>q</kbd>", "bold and\nH₂O, x², q"),
        ("| a |\n|---|\n| one<br>two |", "a\n───\none\ntwo"),
        ("- [ ] open\n- [x] done **it**\n- [y] no", "☐ open\n☑ done it\n• [y] no"),
        ("1. [X] done\n2. [ ]", "1. ☑ done\n2. [ ]"),
        ("term *a*\n: one\n: two\n\nterm b\n\n: three", "term a\n  one\n  two\n\nterm b\n  three"),
        ("![alt](http://x/y.png)", "[image: alt] (http://x/y.png)"),
        ("a\\*b &amp; c", "a*b & c"),
        ("so \\( a^2 \\) and \\[ *b* \\bad{c} \\], $$*d*$$", "so a² and \\[ *b* \\bad{c} \\], *d*"),
        ("text\n\\[\n*a*\n- b\n\\]\nmore", "text\n\n  *a*\n  - b\n\nmore"),
        ("text\n\\[\n\\bad a\n- b\n\\]\nmore", "text\n\n\\[\n\\bad a\n- b\n\\]\n\nmore"),
        (
            "a[^12] b[^x]\n\n[^12]: *note*\nof two lines\n[2]: http://x/",
            "a¹² b[x]\n\n¹² note of two lines\n[2]: http://x/",
        ),
        ("\\( never closed", "( never closed"),
    ],
)
def test_blocks(source: str, expected: str) -> None:
    assert shown(source) == expected


def test_styles() -> None:
    assert styles_of("a **b *c* d** `e` ~~f~~", "c") == {"strong", "em"}
    assert styles_of("a **b *c* d** `e` ~~f~~", "e") == {"code-inline"}
    assert styles_of("## Head **x**", "x") == {"heading", "strong"}
    headings = [styles_of(f"{'#' * level} Head", "Head") for level in (1, 2, 3, 4)]
    assert headings == [{"heading", "title"}, {"heading"}, {"strong"}, {"strong", "em"}]
    assert "code-keyword" in styles_of("```python\nreturn 1\n```", "return")
    assert styles_of("```nolanguage\nreturn 1\n```", "return") == {"code"}


def test_a_table_has_aligned_columns() -> None:
    assert texts(markdown_lines("| a | n |\n|---|--:|\n| x | 1 |\n| **yy** | 22 |", 40)) == [
        "a     n",
        "───────",
        "x     1",
        "yy   22",
    ]


def test_a_link_shows_where_it_leads() -> None:
    assert shown("[text](https://example.com/a)") == "text (https://example.com/a)"
    assert shown("<https://example.com/a>") == "https://example.com/a"
    assert (
        shown("[https://bank.example](https://evil.example)") == "https://bank.example (https://evil.example)"
    )


@pytest.mark.parametrize("address", ["javascript:alert(1)", "file:///etc/passwd", "data:text/html,x"])
def test_an_address_that_does_something_is_no_link(address: str) -> None:
    source = f"[click]({address})"
    assert shown(source) == source


@given(
    st.text(alphabet=st.sampled_from(" \n\t*_`#>-|[]()!1.)abc漢é👩=~\\&;"), max_size=300), st.integers(8, 50)
)
@examples(300)
def test_no_line_is_wider_than_the_screen(source: str, width: int) -> None:
    # Deep nesting keeps a few columns for text whatever the width: 16 is the narrowest that is promised.
    for line in markdown_lines(source, max(width, 40)):
        assert line_cells(line) <= max(width, 40) or line_text(line)[:1] in " ▎•◦▪"
    for line in wrap([(source, "")], width):
        assert line_cells(line) <= width


ANY_CHARACTER = st.characters(codec=None) | st.sampled_from("\x1b\x07…漢👩\u200d\u0301")


@given(st.text(alphabet=ANY_CHARACTER, max_size=200), st.integers(2, 30))
def test_chopping_loses_nothing(text: str, width: int) -> None:
    lines = chop([(text, "x")], width)
    assert "".join(map(line_text, lines)) == text
    assert all(line_cells(line) <= width for line in lines)
    assert len(wrap([(text, "")], width)) <= len(text) + 1


GUESSES = st.lists(
    st.tuples(
        st.text(alphabet=st.sampled_from(" \n\t*_`#>-|[]()!1.)abc漢👩\u200d\u0301&;"), max_size=90),
        st.booleans(),
    )
)


@given(GUESSES, st.integers(40, 60))
@examples(100)
def test_what_was_guessed_changes_nothing_but_its_style(pieces: list[tuple[str, bool]], width: int) -> None:
    plain, tinted = Document(), Document()
    for text, guessed in pieces:
        plain.append(text)
        tinted.append(text, guessed=guessed)
    shown = tinted.lines(width)
    assert [line_text(line) for line in shown] == [line_text(line) for line in plain.lines(width)]
    styles = {style for line in shown for _, style in line}
    assert any(guessed for _, guessed in pieces) or not any("guessed" in style for style in styles)


def test_what_was_guessed_is_found_in_what_is_shown() -> None:
    document = Document()
    pieces = (
        "See **wor",
        "ld** and `co",
        "de`.\n\n- a li",
        "st\n\n```py\nx = 1\n\ty",
        " = 2\n```\n\n| a | a |\n|---|---|\n| o |",
        " o |",
    )
    for number, text in enumerate(pieces):
        document.append(text, guessed=number % 2 == 1)
    shown = [(text, "guessed" in style.split()) for line in document.lines(60) for text, style in line]
    for pair in (
        ("wor", False),
        ("ld", True),
        (" and ", True),
        ("co", True),
        ("de", False),
        ("a li", False),
        ("st", True),
        ("x", True),
        ("    ", True),
        ("o", False),
        ("o", True),
    ):
        shown = shown[shown.index(pair) + 1 :]


def test_what_was_guessed_stays_marked_where_an_endless_block_is_cut() -> None:
    for opening, word, closing in (
        ("", "word ", ""),
        ("```\n", "word\n", "```"),
        ("| a |\n|---|\n", "| word |\n", ""),
    ):
        document = Document(opening)
        for number in range(1500):
            document.append(word, guessed=number % 3 == 0)
        document.append(closing)
        runs = [run for line in document.lines(60) for run in line]
        counts = [
            sum(text.count("word") for text, style in runs if ("guessed" in style) is wanted)
            for wanted in (True, False)
        ]
        assert counts == [500, 1000]


_PIECES = (
    "- ",
    "- [x] ",
    ": ",
    "> ",
    "<b>",
    "</b>",
    "<sup>",
    "</sup>",
    "$",
    "1. ",
    "# ",
    "## ",
    "[{}]: ",
    "[^{}]: ",
    "    ",
    "\n",
    "\n",
    "\n\n",
    " ",
    "*",
    "**",
    "_",
    "`",
    "```\n",
    "```{}\n",
    "$$",
    "$$\n",
    "\\(",
    "\\)",
    "\\[",
    "\\]\n",
    "[{}]",
    "[{}][{}]",
    "({})",
    "|",
    "<{}>",
    "~~",
    "---\n",
    "===\n",
    "{}",
    "{}",
    "{} ",
)


@given(st.lists(st.sampled_from(_PIECES), max_size=30))
@examples(200)
def test_no_word_vanishes(pieces: list[str]) -> None:
    words = iter(f"w{number}w" for number in range(100))
    source = "".join(
        "".join(part + (next(words) if "{" in part else "") for part in re.split(r"(?=\{\})", piece)).replace(
            "{}", ""
        )
        for piece in pieces
    )
    # Letters that are raised count, too.
    said = normalize("NFKC", "".join(line_text(line) for line in Document(source).lines(500)))
    assert [word for word in re.findall(r"w\d+w", source) if word not in said] == []


def test_elided() -> None:
    assert elided("abcdef", 6) == "abcdef"
    assert elided("abcdefg", 6) == "abcde…"


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(20, 90))
@examples(60)
def test_streaming_ends_with_what_a_whole_document_gives(cuts: list[int], width: int) -> None:
    grown = Document()
    start = 0
    for size in cuts:
        grown.append(SAMPLE[start : start + size])
        grown.lines(width)
        start += size
    grown.append(SAMPLE[start:])
    assert texts(grown.lines(width)) == texts(Document(SAMPLE).lines(width))
    assert texts(grown.lines(width - 5)) == texts(Document(SAMPLE).lines(width - 5))


def test_streamed_a_character_at_a_time() -> None:
    grown = Document()
    for character in SAMPLE:
        grown.append(character)
        grown.lines(50)
    assert texts(grown.lines(50)) == texts(markdown_lines(SAMPLE, 50))


ENDLESS = {
    "paragraph": "word " * 4000,
    "word": "x" * 20_000,
    "code": "```python\n" + "x = f(1)  # note\n" * 1200,
    "list": "- an item\n" * 2000,
    "table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 2000,
    "nothing": "\n" * 20_000,
}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters each call of the parser has read, from now on."""
    found: list[int] = []

    def measured(source: str) -> list[Token]:
        found.append(len(source))
        return parse(source)

    parse = parser().parse
    monkeypatch.setattr(parser(), "parse", measured)
    return found


@pytest.mark.parametrize("kind", ENDLESS)
def test_the_cost_of_a_piece_does_not_grow_with_the_answer(kind: str, sizes: list[int]) -> None:
    source, grown = ENDLESS[kind], Document()
    for start in range(0, len(source), 200):
        grown.append(source[start : start + 200])
        sizes.clear()
        lines = grown.lines(80)
        assert sum(sizes) < 3 * 2048
    said = "".join(line_text(line) for line in lines)
    for character, count in {"x": source.count("x"), "w": source.count("w"), "2": source.count("2")}.items():
        assert said.count(character) == count


def test_a_step_through_a_long_answer_parses_little(sizes: list[int]) -> None:
    document, steps, is_done = Document("It tells of **rivers**, `code` and the sea.\n\n" * 500), 0, False
    while not is_done:
        sizes.clear()
        is_done, steps = document.step(80), steps + 1
        assert sum(sizes) <= 2 * 4096
    assert 4 < steps < 20


CELL = st.text(alphabet=st.sampled_from("abcdé漢 -`*"), max_size=24).map(str.strip)
"""As markdown-it gives them."""


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), min_size=1, max_size=5)
    ),
    st.integers(2, 70),
)
@examples(150)
def test_a_table_of_any_width_breaks_no_word_that_a_line_holds(rows: list[list[str]], width: int) -> None:
    cells = [[[(cell, "")] for cell in row] for row in rows]
    lines = table_lines(cells, ["left", "right", "center"], width)
    assert all(line_cells(line) <= width for line in lines)
    said = [line_text(line) for line in lines]
    # Ideographs may break anywhere; a word is also what stands before the colon of a record.
    words = {
        w
        for row in rows
        for cell in row
        for w in re.findall(r"[^\s漢]+", cell)
        if line_cells([(w, "")]) < width
    }
    assert [word for word in words if not any(word in line for line in said)] == []
    shown = "".join(said)
    assert all(shown.count(c) >= sum(cell.count(c) for row in rows for cell in row) for c in "abcdé漢")


def test_a_narrow_table_wraps_at_spaces_and_a_narrower_one_is_records() -> None:
    source = "| name | what it is |\n|---|---|\n| first | some longer words |\n| second | short |"
    assert texts(markdown_lines(source, 18)) == [
        "name     what it",
        "         is",
        "──────────────────",
        "first    some",
        "         longer",
        "         words",
        "╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌",
        "second   short",
    ]
    assert texts(markdown_lines(source, 14)) == [
        "name: first",
        "what it is:",
        "some longer",
        "words",
        "╌╌╌╌╌╌╌╌╌╌╌╌╌╌",
        "name: second",
        "what it is:",
        "short",
    ]
    assert "╌" not in shown(source, 60)


def test_a_diff_is_coloured() -> None:
    source = "```diff\n@@ -1 +1 @@ f\n-old\n+new\n same\n```"
    assert "code-removed" in styles_of(source, "-old")
    assert "code-added" in styles_of(source, "+new")
    assert "code-name" in styles_of(source, "@@ -1")
    assert styles_of(source, "same") == {"code"}


def test_a_code_block_waits_in_pieces_for_its_language_to_be_prepared_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, where = Event(), list[int]()

    def made(language: str) -> None:
        gate.wait()
        where.append(get_ident())

    monkeypatch.setattr(highlight, "_made", made)
    document = Document("Before.\n\n```slow-language\nx = 1\n```\n\nBehind.\n")
    assert not any(document.step(40) for _ in range(5))
    gate.set()
    assert texts([list(line) for line in document.lines(40)])[-1] == "Behind."
    assert document.step(40)
    assert where
    assert get_ident() not in where
