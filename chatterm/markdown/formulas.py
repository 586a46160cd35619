r"""Formulas as Unicode: `\frac{a}{b} \le x^2` becomes `a/b ≤ x²`.

What cannot be shown this way stays as it was written.
"""

import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from chatterm.markdown.preparing import thread

if TYPE_CHECKING:
    from pylatexenc.macrospec import LatexContextDb

_LONGEST = 1000
"""Maximum characters of a formula that is converted: longer ones would hold up the screen."""
_SPACING = {"between-macro-and-chars": False, "between-latex-constructs": False, "after-comment": False}
_SPACES = re.compile(r"(?<=\S)[ \t]{2,}")
_RELATION = re.compile(r"[ \t]*([=<>:!]*[=<>≤≥≠≈≡≅∼∝∈∉⊂⊆→←↦⇒⟹⟺]+)(?![ᵃ-ᵿ])[ \t]*")
_OPERATOR = re.compile(r"[ \t]+([±∓×·])[ \t]*")
"""pylatexenc drops the space between two macros."""
_OPERAND = re.compile(r"[\w.′'\u0300-\u036f⁰-₟ᵃ-ᵿ]*(\([^()]*\))?|.")
_OUTSIDE = (r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")

_NORMAL = "0123456789+-−=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVWαβγδεθιφχ'′"
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵅᵝᵞᵟᵋᶿᶥᵠᵡ′′"
_LOWERED = dict(
    zip(
        "0123456789+-−=()aehijklmnoprstuvxβγρφχ",
        "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ",
        strict=True,
    )
)
_SCRIPTS = {"^": dict(zip(_NORMAL, _RAISED, strict=True)), "_": _LOWERED}

# Texts of macros by their number of arguments; pylatexenc knows most letters, operators and accents.
_FONTS = (
    "text textrm textnormal mbox mathrm mathit mathsf mathtt operatorname mathop boldsymbol bm pmb textbf textit emph "
    "underline smash substack"
)
_WRAPPING = dict.fromkeys(_FONTS.split(), "%s")
_WRAPPING |= {
    "boxed": "[%s]",
    "pmod": " (mod %s)",
    "tag": "  (%s)",
    "xrightarrow": "→[%s]",
    "xleftarrow": "←[%s]",
}
_NAMES = (
    "log ln lg exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh det dim ker lim liminf limsup max min "
    "sup inf gcd deg arg hom Pr argmax argmin"
)
_SIZES = (
    "displaystyle textstyle limits nolimits nonumber notag big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl "
    "Biggr bigm middle"
)
_SYMBOLS = {name: name for name in _NAMES.split()} | dict.fromkeys(_SIZES.split(), "\u2060")
_SYMBOLS |= {
    "colon": ":",
    "implies": "⟹",
    "iff": "⟺",
    "impliedby": "⟸",
    "bmod": " mod ",
    "dotsc": "…",
    "dotsb": "⋯",
}
_SYMBOLS |= {"lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "lt": "<", "gt": ">", "\\": "\n"}
_SYMBOLS |= {"quad": "  ", "qquad": "    ", ",": " ", ";": " ", ":": " ", "!": "\u2060"}
_FRACTIONS = "frac dfrac tfrac cfrac".split()  # noqa: SIM905
_ABOVE = "overset stackrel".split()  # noqa: SIM905
_ROWS = "aligned align align* gathered gather gather* equation equation* split cases multline multline*"
_LINES = _ROWS.split()
_MATRICES = "matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix".split()  # noqa: SIM905


def is_ready() -> bool:
    """Return whether formulas can be converted at once. If not, that is being prepared."""
    return _converter().done()


@lru_cache(maxsize=512)
def as_unicode(source: str) -> str:
    r"""Return a formula in Unicode, without what begins and ends it: `\(`, `\[`, `$` or `$$`.

    What has no such form, and what is not closed, is returned unchanged. Wait until `is_ready`.
    """
    ends = next(((a, b) for a, b in _OUTSIDE if source.startswith(a)), None)
    if ends is None or not source.endswith(ends[1]) or not len("".join(ends)) < len(source) <= _LONGEST:
        return source
    try:
        shown = _converter().result()(source[len(ends[0]) : -len(ends[1])].strip())
    except (_UnknownError, RecursionError, ValueError, IndexError, AttributeError, TypeError):
        return source
    return shown if shown.strip() else source


class _UnknownError(Exception):
    """Raised for a macro that has no known text."""


@lru_cache(maxsize=1)
def _converter() -> "Future[Callable[[str], str]]":
    return thread().submit(_made)


def _made() -> Callable[[str], str]:
    """Return the function that converts; importing what it needs takes 100 ms."""
    from pylatexenc import latex2text, latexwalker

    grammar = _grammar()
    to_text = latex2text.LatexNodes2Text(
        _words(), math_mode="text", strict_latex_spaces=_SPACING, keep_comments=True
    )

    def convert(source: str) -> str:
        walker = latexwalker.LatexWalker(source, latex_context=grammar, tolerant_parsing=False)
        try:
            nodes = walker.get_latex_nodes(parsing_state=walker.make_parsing_state(in_math_mode=True))[0]
        except latexwalker.LatexWalkerError as error:
            raise _UnknownError from error
        text = to_text.nodelist_to_text(nodes).replace("\u2060", "")
        lines = _OPERATOR.sub(r" \1 ", _RELATION.sub(r" \1 ", text)).split("\n")
        return "\n".join(kept for line in lines if (kept := _SPACES.sub(" ", line).strip()))

    return convert


def _grammar() -> "LatexContextDb":
    """Return how many arguments each macro takes."""
    from pylatexenc.latexwalker import get_default_latex_context_db
    from pylatexenc.macrospec import MacroStandardArgsParser, SpecialsSpec, std_environment, std_macro

    macros = [std_macro(name, False, 2) for name in (*_FRACTIONS, *_ABOVE, "binom")]
    macros += [std_macro(name, False, 1) for name in (*_WRAPPING, "left", "right")]
    scripts = [SpecialsSpec(mark, args_parser=MacroStandardArgsParser("{")) for mark in _SCRIPTS]
    grammar = get_default_latex_context_db()
    environments = [std_environment(name, None, is_math_mode=True) for name in (*_LINES, *_MATRICES)]
    grammar.add_context_category("formulas", macros, environments, scripts, prepend=True)
    return grammar


def _words() -> "LatexContextDb":
    """Return the text of each macro. What is not known raises _UnknownError."""
    from pylatexenc.latex2text import (
        EnvironmentTextSpec,
        MacroTextSpec,
        SpecialsTextSpec,
        get_default_latex_context_db,
    )

    texts: dict[str, str | Callable[..., str]] = {**_WRAPPING, **_SYMBOLS, "sqrt": _root, "binom": _binomial}
    texts |= dict.fromkeys(_FRACTIONS, _fraction) | dict.fromkeys(_ABOVE, _above)
    texts |= {"left": _delimiter, "right": _delimiter}
    environments = [EnvironmentTextSpec(name, _rows) for name in _LINES]
    environments += [EnvironmentTextSpec(name, _matrix) for name in _MATRICES]
    words = get_default_latex_context_db().filter_context(
        keep_categories=["latex-base", "latex-approximations", "nonascii-specials", "advanced-symbols"]
    )
    words.add_context_category(
        "formulas",
        [MacroTextSpec(name, text) for name, text in texts.items()],
        environments,
        [*(SpecialsTextSpec(mark, _script) for mark in _SCRIPTS), SpecialsTextSpec("&", " ")],
        prepend=True,
    )
    words.set_unknown_macro_spec(MacroTextSpec("", _unknown))
    words.set_unknown_environment_spec(EnvironmentTextSpec("", _unknown))
    return words


def _unknown(node: Any) -> str:
    raise _UnknownError


def _arguments(node: Any, l2tobj: Any) -> list[str]:
    """Return the text of each argument; empty for an optional one that is not given."""
    given = node.nodeargd.argnlist
    return [l2tobj.nodelist_to_text([one] if one is not None else []).strip() for one in given]


def _in_brackets(text: str) -> str:
    """Return a text as one operand."""
    return text if _OPERAND.fullmatch(text) else f"({text})"


def _fraction(node: Any, l2tobj: Any) -> str:
    above, below = map(_in_brackets, _arguments(node, l2tobj))
    return f"{above}/{below}"


def _binomial(node: Any, l2tobj: Any) -> str:
    return "C({}, {})".format(*_arguments(node, l2tobj))


def _root(node: Any, l2tobj: Any) -> str:
    degree, of = _arguments(node, l2tobj)
    return f"{raised('^', degree) if degree else ''}√{_in_brackets(of)}"


def _above(node: Any, l2tobj: Any) -> str:
    over, under = _arguments(node, l2tobj)
    return f"{under}{raised('^', over)}"


def _delimiter(node: Any, l2tobj: Any) -> str:
    (mark,) = _arguments(node, l2tobj)
    return mark if mark != "." else ""


def _script(node: Any, l2tobj: Any) -> str:
    return raised(node.specials_chars, *_arguments(node, l2tobj))


def raised(mark: str, text: str) -> str:
    """Return a superscript (`^`) or a subscript (`_`), in letters of that height where Unicode has them all."""
    small = _SCRIPTS[mark]
    if all(letter in small for letter in text):
        return "".join(small[letter] for letter in text)
    return f"{mark}{text}" if len(text) == 1 else f"{mark}({text})"


def _cells(node: Any, l2tobj: Any) -> list[list[str]]:
    rows: list[list[list[Any]]] = [[[]]]
    for one in node.nodelist:
        if getattr(one, "specials_chars", "") == "&":
            rows[-1].append([])
        elif getattr(one, "macroname", "") == "\\":
            rows.append([[]])
        else:
            rows[-1][-1].append(one)
    return [[l2tobj.nodelist_to_text(cell).strip() for cell in row] for row in rows if row != [[]]]


def _rows(node: Any, l2tobj: Any) -> str:
    """Return a line for each row."""
    mark = "{ " if node.environmentname == "cases" else ""
    lines = [("  " if mark else " ").join(filter(None, row)) for row in _cells(node, l2tobj)]
    return "\n" + "\n".join(mark + line for line in lines if line)


def _matrix(node: Any, l2tobj: Any) -> str:
    return "[" + "; ".join("  ".join(row) for row in _cells(node, l2tobj)) + "]"
