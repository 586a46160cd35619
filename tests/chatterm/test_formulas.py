"""Formulas that a model writes in LaTeX, shown in Unicode."""

from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatterm.markdown import formulas
from chatterm.markdown.document import Document
from chatterm.markdown.formulas import as_unicode
from chatterm.markdown.lines import line_text
from tests.fresh import examples


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (r"a^2+b^2=c^2", "a²+b² = c²"),
        (r"x = \frac{-b \pm \sqrt{b^2-4ac}}{2a}", "x = (-b ± √(b²-4ac))/2a"),
        (r"\int_{0}^{\infty} e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2}", "∫₀^∞ e^(-x²) dx = (√π)/2"),
        (r"\sum_{i=1}^{n} i = \frac{n(n+1)}{2}", "∑ᵢ₌₁ⁿ i = n(n+1)/2"),
        (r"\text{loss} = -\log p(y \mid x)", "loss = -log p(y | x)"),
        (r"\mathrm{softmax}\left(\frac{QK^T}{\sqrt{d_k}}\right)V", "softmax(QKᵀ/(√dₖ))V"),
        (r"\lim_{x\to 0}\frac{\sin x}{x}=1", "lim_(x → 0)(sin x)/x = 1"),
        (r"\left.\frac{df}{dx}\right|_{x=0}", "df/dx|ₓ₌₀"),
        (r"\forall x \in \mathbb{R},\ \exists y", "∀ x ∈ ℝ, ∃ y"),
        (r"\begin{pmatrix} a & b \\ c & d \end{pmatrix}", "[a b; c d]"),
        (r"\begin{aligned} x &= 1 \\ y &= \sqrt[3]{2} \end{aligned}", "x = 1\ny = ³√2"),
        (r"y = \begin{cases} 1 & x>0 \\ 0 & \text{else} \end{cases}", "y =\n{ 1 x > 0\n{ 0 else"),
        (r"\binom{n}{k} \equiv \boxed{42} \pmod{5}", "C(n, k) ≡ [42] (mod 5)"),
        (r"\hat{y}_{ij} \approx \mathbf{w}\cdot\vec{x}", "ŷᵢⱼ ≈ 𝐰·x⃗"),
        (r"100\% \le \lVert v \rVert_2", "100% ≤ ‖ v ‖₂"),
    ],
)
def test_a_formula(source: str, expected: str) -> None:
    for before, after in (r"\[", r"\]"), (r"\( ", r" \)"), ("$$", "$$"), ("$", "$"):
        assert as_unicode(f"{before}{source}{after}") == expected


@pytest.mark.parametrize(
    "source",
    [
        r"\(\unheardof{x}\)",
        r"\(a^{\)",
        r"\(\begin{tikzpicture}a\end{tikzpicture}\)",
        r"\(\input{/etc/passwd}\)",
        r"\[x = 1",
        r"\(\)",
        r"\(" + "{" * 450 + "}" * 450 + r"\)",
        r"\(" + "x+" * 600 + r"x\)",
    ],
    ids=lambda source: source[:20],
)
def test_what_cannot_be_shown_so_stays_as_it_was_written(source: str) -> None:
    assert as_unicode(source) == source


_WRITTEN = r"\frac \sqrt \sum \left \right ( ) [ ] { } ^ _ & \\ \begin{cases} \end{cases} \text x 2 % # ~ ' \, é 漢 $"
_PIECES = _WRITTEN.split()


@given(st.lists(st.sampled_from(_PIECES) | st.text(max_size=3), max_size=12))
@examples(150)
def test_any_formula_is_shown(pieces: list[str]) -> None:
    source = rf"\({' '.join(pieces)}\)"
    assert as_unicode(source).strip()


@pytest.mark.parametrize(
    "text", ["It costs $5, not $10 or $12.50.", "$HOME/$USER and $x/$y", "between $3 and $4=", "a $ b_c $ d"]
)
def test_dollars_that_enclose_no_formula(text: str) -> None:
    assert [line_text(line) for line in Document(text).lines(80)] == [text]


def test_a_formula_waits_in_pieces_for_what_converts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Event()

    def made() -> object:
        gate.wait()
        return lambda source: "shown"

    monkeypatch.setattr(formulas, "_made", made)
    formulas._converter.cache_clear()
    as_unicode.cache_clear()
    try:
        document = Document("Before.\n\n- so $a^7$\n\nBehind.\n")
        assert not any(document.step(40) for _ in range(5))
        gate.set()
        assert [line_text(line) for line in document.lines(40)][2] == "• so shown"
    finally:
        formulas._converter.cache_clear()
        as_unicode.cache_clear()
