"""Loading a checkpoint: seconds, compared with reading its files from the page cache, and peak memory.

    python benchmarks/load.py --shapes 0.6B 8B --json benchmarks/results/load.json
    python benchmarks/load.py --shapes tiny --device cpu             without a GPU, to try the program out
    python benchmarks/load.py --folder DIR                           an existing checkpoint

Without --folder, a random checkpoint with the exact shapes of Qwen3 is written first, in shards, and deleted at the
end. Everything is measured in a fresh process, with the GPU awake and the files in the page cache (unless --cold):

- read: one thread reads every file from its first byte to its last, with readinto() into a buffer of 16 MiB. Reads and
  loads take turns; medians are reported.
- host memory: the peak of RssAnon + RssShmem in /proc/self/status, sampled every 2 ms by a thread, minus the value
  before the load. Pinned buffers count; the page cache does not, mapped or not. On a CPU it includes the model.
- device memory: the peak of what torch reserved, minus the model.
"""

import argparse
import json
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.spec import ModelSpec

BUFFER = 16 << 20


def write_checkpoint(folder: Path, spec: "ModelSpec", device: str, dtype: str, shard_bytes: int) -> None:
    """Write random weights in Hugging Face layout: config.json, shards and their index."""
    import torch
    from safetensors.torch import save_file

    from benchmarks.peers.transformers import fields_of
    from models.families.family import NAMES
    from models.weights.slots import slots

    number = getattr(torch, dtype)
    generator = torch.Generator(device).manual_seed(0)
    shards: list[dict[str, torch.Tensor]] = [{}]
    weight_map, size, total = {}, 0, 0

    def flush() -> None:
        save_file(shards[-1], folder / f"model-{len(shards):05}.safetensors", {"format": "pt"})
        shards[-1] = {}

    for slot in slots(spec):
        name = slot.name(NAMES)
        tensor = torch.empty(slot.shape, dtype=number, device=device).normal_(0.0, 0.02, generator=generator)
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            flush()
            shards.append({})
            size = 0
        shards[-1][name] = tensor.cpu()
        weight_map[name] = f"model-{len(shards):05}.safetensors"
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = fields_of(spec) | {
        "architectures": [spec.architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(raw))


def own_bytes() -> int:
    """Return the bytes that this process holds beyond files in the page cache; 0 if the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class PeakMemory:
    """The peak of `own_bytes` while it is open, minus its value before."""

    def __enter__(self) -> "PeakMemory":
        self.peak = self._before = own_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, own_bytes()) - self._before

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.peak = max(self.peak, own_bytes())


def read_files(paths: list[Path]) -> float:
    """Return the bytes per second of plain reading."""
    buffer = memoryview(bytearray(BUFFER))
    began, done = time.perf_counter(), 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                done += count
    return done / (time.perf_counter() - began)


def drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pinned_copy_rate(device: Any) -> float:
    """Return the bytes per second of one large copy from pinned memory to the device."""
    import torch

    source = torch.empty(1 << 28, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    rates = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(source.nbytes / (time.perf_counter() - began))
    return max(rates)


def measure(folder: Path, device_name: str, dtype_name: str, repeats: int, cold: bool) -> dict[str, Any]:
    """Measure all figures of one checkpoint; meant for a process of its own."""
    import torch

    from models.files import ModelFiles
    from models.loading.load import load_model
    from models.weights.safetensors_files import safetensors_files

    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    files, paths = ModelFiles(folder.name, folder=folder), safetensors_files(folder)
    size = sum(path.stat().st_size for path in paths)
    on_gpu = device.type == "cuda"
    torch.ones(8, device=device, dtype=torch.float32).to(dtype)  # wakes the GPU
    if cold:
        drop_from_cache(paths)
    else:
        read_files(paths)
    reads, seconds, hosts, devices = [], [], [], []
    model_bytes = 0
    for _ in range(1 if cold else repeats):
        if not cold:
            reads.append(read_files(paths))
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device) if on_gpu else 0
        with PeakMemory() as host:
            began = time.perf_counter()
            model = load_model(files, dtype=dtype, device=device)
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        model_bytes = model.nbytes
        hosts.append(host.peak)
        devices.append(torch.cuda.max_memory_reserved(device) - before - model_bytes if on_gpu else 0)
        del model
    taken = statistics.median(seconds)
    figures: dict[str, Any] = {
        "files": len(paths),
        "file_bytes": size,
        "model_bytes": model_bytes,
        "seconds": seconds,
        "bytes_per_s": size / taken,
        "host_peak_bytes": max(hosts),
    }
    if reads:
        figures["read_bytes_per_s"] = statistics.median(reads)
        figures["load_to_read"] = figures["bytes_per_s"] / figures["read_bytes_per_s"]
    if on_gpu:
        figures["device_peak_beyond_model_bytes"] = max(devices)
        figures["pinned_copy_bytes_per_s"] = pinned_copy_rate(device)
    else:
        figures["host_peak_beyond_model_bytes"] = max(hosts) - model_bytes
    return figures


def _child(pipe: Connection, function: Any, arguments: tuple[Any, ...]) -> None:
    pipe.send(function(*arguments))


def in_a_process(function: Any, *arguments: Any) -> Any:
    """Return the result of `function` in a fresh Python process."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("spawn").Process(target=_child, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise SystemExit(1) from None  # the child has printed the reason
    finally:
        process.join()


@contextmanager
def checkpoint(arguments: argparse.Namespace, shape: str) -> Iterator[Path]:
    if arguments.folder is not None:
        yield arguments.folder
        return
    from benchmarks.shapes import SHAPES

    folder = Path(tempfile.mkdtemp(prefix="load-", dir=arguments.scratch))
    try:
        in_a_process(
            write_checkpoint, folder, SHAPES[shape], arguments.device, arguments.stored, arguments.shard_bytes
        )
        yield folder
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["0.6B"], help="names in benchmarks/shapes.py")
    parser.add_argument("--folder", type=Path, help="a checkpoint that is there, instead of random ones")
    parser.add_argument("--scratch", type=Path, help="where random checkpoints are written (default: /tmp)")
    parser.add_argument("--shard-bytes", type=int, default=2 << 30)
    parser.add_argument("--stored", default="bfloat16", help="dtype of random checkpoints")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the loaded model")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="load once with the files out of the page cache")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    import torch

    from benchmarks.machine import describe

    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, Any] = {
        **describe(torch.device(arguments.device)),
        "cores": os.cpu_count(),
        "stored": arguments.stored,
        "dtype": arguments.dtype,
        "page_cache": "cold" if arguments.cold else "warm",
        "repeats": arguments.repeats,
        "shapes": {},
    }
    print(f"{figures['device']}, {figures['cores']} cores, {arguments.stored} -> {arguments.dtype}")
    print(
        f"{'':<10}{'files':>9}{'load':>9}{'load':>12}{'read':>12}{'ratio':>7}{'host peak':>12}{'beyond':>12}"
    )
    beyond_name = "device" if arguments.device == "cuda" else "host"
    for shape in [arguments.folder.name] if arguments.folder else arguments.shapes:
        with checkpoint(arguments, shape) as folder:
            found = in_a_process(
                measure, folder, arguments.device, arguments.dtype, arguments.repeats, arguments.cold
            )
        figures["shapes"][shape] = found
        read = f"{found['read_bytes_per_s'] / 1e9:.2f} GB/s" if "read_bytes_per_s" in found else "-"
        ratio = f"{found['load_to_read']:.2f}" if "load_to_read" in found else "-"
        print(
            f"{shape:<10}{found['file_bytes'] / 1e9:>6.2f} GB{statistics.median(found['seconds']):>7.2f} s"
            f"{found['bytes_per_s'] / 1e9:>7.2f} GB/s{read:>12}{ratio:>7}{found['host_peak_bytes'] / 1e6:>9.0f} MB"
            f"{found[f'{beyond_name}_peak_beyond_model_bytes'] / 1e6:>9.0f} MB"
        )
        if "pinned_copy_bytes_per_s" in found:
            print(f"{'':<10}one copy from pinned memory: {found['pinned_copy_bytes_per_s'] / 1e9:.1f} GB/s")
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"beyond: {beyond_name} memory at the peak, less the model")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
