"""The line that tells of an error."""

from engine.execute.faults import first_line


class CompilationError(Exception):
    """As Triton's, which cannot be made without source code."""


def test_the_first_line_of_an_error_is_told_and_its_type_where_it_has_none() -> None:
    assert first_line(RuntimeError(" no memory left.\nmore about it")) == "no memory left"
    assert first_line(RuntimeError()) == "RuntimeError()"
    assert len(first_line(RuntimeError("x" * 1000))) == 200


def test_of_a_kernel_that_does_not_compile_the_reason_is_told_and_not_the_source() -> None:
    error = CompilationError("at 3:4:\n    x = y + None\n        ^\nunsupported operand\n")
    assert first_line(error) == "unsupported operand"
