"""Compile the native kernels into one shared library beside their sources.

    python engine/kernels/native/compile.py

The package's build calls `compile_library`. This module uses only the standard library and nothing of this project.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_DOTPROD = "-march=armv8.2-a+dotprod"
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
VARIANTS = {
    "portable": (),
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "dotprod": (_DOTPROD,),
    "i8mm": (f"{_DOTPROD}+i8mm",),
}
"""Compiler flags of each kernel variant, for x86-64 or ARM. What the compiler does not know is left out."""

PROBE = """
#if !defined(__AVX2__) && !defined(__ARM_FEATURE_DOTPROD)
#error
#endif
"""


class CompileError(Exception):
    """Raised if there is no compiler or it failed; the text is one line for people."""


def library_name() -> str:
    """Return the file name of the library on this system."""
    return f"chatterm_native.{'dylib' if sys.platform == 'darwin' else 'so'}"


def source_hash() -> str:
    """Return a hash that identifies the state of the sources."""
    digest = hashlib.sha256()
    for path in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"), FOLDER / "compile.py"]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def find_compiler() -> str:
    """Return the C++ compiler: CXX, or the first of the usual names. Raises CompileError."""
    if sys.platform == "win32":
        raise CompileError("the native kernels are not built on Windows")
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise CompileError("there is no C++ compiler (c++, g++ or clang++)")


def compile_library(out: Path | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Compile everything to `out` (default: beside the sources) with `extra` flags; return it. Raises CompileError."""
    target = out or FOLDER / library_name()
    compiler = find_compiler().split()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        known = [v for v, flags in VARIANTS.items() if not flags or _accepts(compiler, flags, folder)]
        have = [f"-DCT_HAVE_{variant.upper()}" for variant in known]
        units = [(FOLDER / f"kernels_{variant}.cpp", VARIANTS[variant]) for variant in known]
        others = sorted(path for path in FOLDER.glob("*.cpp") if not path.stem.startswith("kernels_"))
        units += [(path, (*have, f'-DCT_SOURCE_HASH="{source_hash()}"')) for path in others]

        def build(unit: tuple[Path, tuple[str, ...]]) -> str:
            source, flags = unit
            made = str(folder / f"{source.stem}.o")
            _run([*compiler, *FLAGS, *flags, *extra, "-c", str(source), "-o", made])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(build, units))
        # Written beside the target and renamed, so that a process with the old library open keeps it.
        linked = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _run([*compiler, *FLAGS, *extra, "-shared", "-pthread", *objects, "-o", str(linked)])
            linked.replace(target)
        finally:
            linked.unlink(missing_ok=True)
    return target


def _accepts(compiler: list[str], flags: tuple[str, ...], folder: Path) -> bool:
    probe = folder / "probe.cpp"
    probe.write_text(PROBE)
    command = [*compiler, *flags, "-Werror", "-c", str(probe), "-o", str(folder / "probe.o")]
    return subprocess.run(command, capture_output=True).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CompileError(f"{command[0]} failed: {(errors or ['no message'])[0][:300]}")


if __name__ == "__main__":
    try:
        print(compile_library())
    except CompileError as error:
        sys.exit(f"The native kernels were not built: {error}.")
