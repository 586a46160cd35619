"""The tests of the kernels once more, against a library with the address and the undefined-behaviour sanitizer.

CHATTERM_CASES=all pytest tests/engine/native/test_sanitizers.py    more cases, and all variants that this machine runs
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.native import compile as compiling
from engine.kernels.native import library as native
from tests.covering import ALL
from tests.engine.native.conftest import LIBRARY

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
SANITIZERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g1",
    "-Og",  # a third of the time of -O1
)

OVERREAD = """
import sys
from pathlib import Path
import numpy as np
from engine.kernels.native.library import Matrix, Pool, open_library
pool = Pool(1, open_library(Path(sys.argv[1])))
rows, x, out = np.zeros((99, 340), np.uint8), np.ones(320, np.float32), np.zeros(100, np.float32)
matrix = Matrix(rows.ctypes.data, 340, 8, 100, 320)
with pool.held() as handle:
    pool.library.functions.ct_products(handle, pool.library.best, matrix, 1, x.ctypes.data, out.ctypes.data)
"""
"""A product with one row more than there are."""


def runtime(compiler: str) -> Path:
    """The sanitizer's own library, which must be loaded before everything else; else a skip."""
    for name in ("libasan.so", "libclang_rt.asan-x86_64.so", "libclang_rt.asan-aarch64.so"):
        asked = [*compiler.split(), f"-print-file-name={name}"]
        found = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
        if found.is_absolute() and found.exists():
            return found
    pytest.skip(f"{compiler} comes without the address sanitizer")


def sanitized(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library with sanitizers, kept until the sources change: each variant takes a while.

    It has the portable one and the best one of this machine. To try all cases it has every one that works here, but not
    avx512 where avx512bf16 is the same code and more.
    """
    if native.problem() is None:
        works = list(native.library().variants)
        chosen = [name for name in works if name != "avx512" or "avx512bf16" not in works]
        if not ALL:
            chosen = [name for name in works if name in (works[0], works[-1])]
        monkeypatch.setattr(compiling, "VARIANTS", {name: compiling.VARIANTS[name] for name in chosen})
    told = compiling.source_hash(), compiling.find_compiler(), SANITIZERS, list(compiling.VARIANTS)
    state = hashlib.sha256(repr(told).encode())
    kept: Path = ROOT / "build" / "sanitized" / f"{state.hexdigest()[:16]}.so"
    if not kept.exists():
        shutil.rmtree(kept.parent, ignore_errors=True)
        kept.parent.mkdir(parents=True)
        compiling.compile_library(kept, SANITIZERS)
    return kept


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the sanitizers are preloaded, as Linux does it"
)
@pytest.mark.skipif(LIBRARY in os.environ, reason="this is the inner run")
def test_the_tests_of_the_kernels_pass_under_sanitizers(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        preload = runtime(compiling.find_compiler())
        built = sanitized(monkeypatch)
    except compiling.CompileError as error:
        pytest.skip(f"the kernels cannot be compiled with sanitizers: {error}")
    environment = os.environ | {
        LIBRARY: str(built),
        "LD_PRELOAD": str(preload),
        # Python leaks by design, and what it allocates at the start is not freed.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "CHATTERM_FRESH": "1:0",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        "-p",
        "tests.engine.native.few_cases",  # what is wrong with memory hardly depends on pairs of values
        f"--ignore={FOLDER / 'test_dealing.py'}",  # which has a program of its own
        str(FOLDER),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1200)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert "passed" in done.stdout
    assert "runtime error" not in output
    # It would have seen a row that is not there.
    command = [sys.executable, "-c", OVERREAD, str(built)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
