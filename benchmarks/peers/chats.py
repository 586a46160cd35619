"""Peers that hold a conversation: how much each computes between Enter and the first token.

All get the same input: `ask` with a prompt as token ids, then `hear` with the stream that was written after it. The
stream is scripted, so peers take it in as one stretch, which leaves the same KV as decoding it.
"""

import json
import subprocess
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class Asked:
    """The cost of one Enter."""

    computed: int
    """Tokens that went through the network from Enter to the first token of the answer."""
    ttft_s: float


class ChatPeer(Protocol):
    """A peer with one conversation at a time."""

    def open(self) -> None:
        """Begin a new conversation with nothing cached."""
        ...

    def ask(self, prompt: list[int]) -> Asked:
        """Compute the first token after `prompt`."""
        ...

    def hear(self, stream: list[int]) -> None:
        """Take in the text that was written after the prompt."""
        ...


def gguf_network(path: Path, dtype: torch.dtype) -> LlamaForCausalLM:
    """Load the model of a GGUF file, dequantised, in transformers."""
    from benchmarks.peers.transformers import fields_of
    from benchmarks.shapes import shared_tensors
    from models.files import ModelFiles
    from models.loading.load import load_model

    files = ModelFiles(path.name, gguf=path)
    ours = load_model(files, dtype=dtype, device=torch.device("cpu"), quantize="none")
    network = LlamaForCausalLM(LlamaConfig(**fields_of(ours.spec))).to(dtype)
    network.load_state_dict(shared_tensors(ours))
    return network.requires_grad_(False).eval()


class Recompute:
    """transformers as `generate` is usually called: every prompt is computed from its first token."""

    def __init__(self, network: LlamaForCausalLM) -> None:
        self._network = network

    def open(self) -> None:
        """Do nothing, because nothing is kept."""

    @torch.inference_mode()
    def ask(self, prompt: list[int]) -> Asked:
        """See `ChatPeer`."""
        began = time.perf_counter()
        out = self._network(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        out.logits[0, -1].argmax().item()
        return Asked(len(prompt), time.perf_counter() - began)

    def hear(self, stream: list[int]) -> None:
        """Do nothing: decoding the stream would fill a cache that the next prompt does not use."""


class KeptCache:
    """transformers with the cache of the previous turn, cropped to its common prefix with the new prompt."""

    def __init__(self, network: LlamaForCausalLM) -> None:
        self._network = network
        self.open()

    def open(self) -> None:
        """See `ChatPeer`."""
        self._cache = DynamicCache(config=self._network.config)
        self._cached: list[int] = []

    @torch.inference_mode()
    def ask(self, prompt: list[int]) -> Asked:
        """See `ChatPeer`."""
        began = time.perf_counter()
        pairs = zip(self._cached, prompt[:-1], strict=False)  # the last token's logits are needed
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if common < len(self._cached):
            self._cache.crop(common - len(self._cached))  # a negative number: how many rows to drop
        logits = self._run(prompt[common:])
        logits.argmax().item()
        self._cached = list(prompt)
        return Asked(len(prompt) - common, time.perf_counter() - began)

    @torch.inference_mode()
    def hear(self, stream: list[int]) -> None:
        """See `ChatPeer`."""
        self._run(stream)
        self._cached += stream

    def _run(self, tokens: list[int]) -> torch.Tensor:
        out = self._network(
            torch.tensor([tokens]), past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        logits: torch.Tensor = out.logits[0, -1]
        return logits


class LlamaCppChat:
    """llama.cpp with its own prefix reuse: `llama_chat.py` in a Python that has llama-cpp-python."""

    def __init__(self, python: Path, gguf: Path, context: int, threads: int) -> None:
        """Start the program. Raises RuntimeError with one line if that Python or the package is missing."""
        program = Path(__file__).with_name("llama_chat.py")
        try:
            self._process = subprocess.Popen(
                [str(python), str(program), str(gguf), str(context), str(threads)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise RuntimeError(f"{python} cannot be run: {error.strerror}") from None
        assert self._process.stdout is not None
        hello = self._process.stdout.readline()
        if not hello:
            _, errors = self._process.communicate()
            raise RuntimeError((errors.strip().splitlines() or ["it ended without a message"])[-1][:160])
        self.version = str(json.loads(hello)["version"])

    def open(self) -> None:
        """See `ChatPeer`."""
        self._do({"do": "open"})

    def ask(self, prompt: list[int]) -> Asked:
        """See `ChatPeer`."""
        reply = self._do({"do": "ask", "prompt": prompt})
        return Asked(int(reply["computed"]), float(reply["ttft_s"]))

    def hear(self, stream: list[int]) -> None:
        """See `ChatPeer`."""
        self._do({"do": "hear", "stream": stream})

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llama_chat.py ended in the middle of a chat")
        reply: dict[str, Any] = json.loads(line)
        return reply
