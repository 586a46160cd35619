"""Compile the kernels so that a processor with AVX2 runs all variants except the one for bf16, for tests.

    python -m tests.engine.native.emulated build/emulated.so
    CHATTERM_TEST_LIBRARY=build/emulated.so pytest tests/engine/native

It takes two cores two minutes, so CI tests the variants that its machine runs. A variant that uses another instruction
does not compile: add it to `emulated.h`.
"""

import sys
from pathlib import Path

from engine.kernels.native import compile as compiling

_AVX2 = compiling.VARIANTS["avx2"]
_INCLUDED = ("-Wno-psabi", "-include", str(Path(__file__).with_name("emulated.h")))


def compile_emulated(out: Path) -> Path:
    """Compile the library to `out` and return it. Raises CompileError."""
    compiling.VARIANTS["avxvnni"] = (*_AVX2, *_INCLUDED)
    del compiling.VARIANTS["avx512bf16"]  # nothing emulates instructions for bf16
    compiling.VARIANTS["avx512"] = (*_AVX2, "-DEMULATES_AVX512", *_INCLUDED)
    return compiling.compile_library(out, ("-DCT_EMULATED",))


if __name__ == "__main__":
    try:
        print(compile_emulated(Path(sys.argv[1])))
    except compiling.CompileError as error:
        sys.exit(f"The kernels were not built: {error}.")
