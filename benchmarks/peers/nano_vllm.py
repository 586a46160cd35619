"""nano-vllm with many streams, as a server of `serving.py`: `python -m benchmarks.peers.nano_vllm --shape 0.6B`.

PYTHONPATH says where `nanovllm` is, unless it is installed. It reads a checkpoint from a folder, so one is written
first, with random weights and a tokenizer in which every token is a word.
"""

import argparse
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.peers.serving import Workload, answer, replies
from benchmarks.peers.transformers import fields_of
from benchmarks.shapes import SHAPES
from models.spec import ModelSpec


def write_checkpoint(folder: Path, spec: ModelSpec, device: str) -> None:
    """Write random weights in bf16, and a tokenizer."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        network = Qwen3ForCausalLM(Qwen3Config(**fields_of(spec), dtype=torch.bfloat16))
    torch.set_default_dtype(before)
    network.save_pretrained(folder)
    words = {f"word{i}": i for i in range(spec.vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word1").save_pretrained(folder)


class NanoVllm:
    """A nano-vllm engine that loads a folder."""

    def __init__(self, folder: Path, share: float, context: int) -> None:
        """`share` is the share of the device's memory that all programs on it may use together."""
        from nanovllm import LLM

        self._llm = LLM(str(folder), max_model_len=context, gpu_memory_utilization=share)
        self._llm.generate([[1, 2, 3]], self._params([4], 0.6), use_tqdm=False)

    def _params(self, tokens: list[int], temperature: float) -> list[Any]:
        from nanovllm import SamplingParams

        return [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in tokens]

    def seconds(self, workload: Workload) -> float:
        """See `Server.seconds`. Prompts of waiting requests may be read early."""
        self._llm.scheduler.max_num_seqs = workload.at_once
        params = self._params(workload.tokens, workload.temperature)
        began = perf_counter()
        found = self._llm.generate(workload.prompts, params, use_tqdm=False)
        spent = perf_counter() - began
        if [len(each["token_ids"]) for each in found] != workload.tokens:
            raise RuntimeError("nano-vllm generated another number of tokens")
        return spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--context", type=int, default=4096)
    arguments = parser.parse_args()
    lines = replies()
    with TemporaryDirectory() as name:
        write_checkpoint(Path(name), SHAPES[arguments.shape], "cuda")
        torch.cuda.empty_cache()
        nano = NanoVllm(Path(name), arguments.share, arguments.context)
    try:
        known = version("nano-vllm")
    except PackageNotFoundError:
        known = "unknown"
    answer(lines, {"version": known}, nano.seconds)


if __name__ == "__main__":
    main()
