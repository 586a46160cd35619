"""The reference network against transformers, both in fp32, over random models of every family.

Whatever the config (sizes, groups, biases, tied heads, kinds of RoPE), whole prompts, prompts in chunks and several
sequences of different lengths side by side have the logits that transformers computes for each text alone.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from models.loading.load import load_model
from models.reference.attention import Attention
from models.reference.decoder import Decoder
from tests.fresh import examples
from tests.models.checkpoints import PlainAttention, files_of, random_model, run_reference

POSITIONS = 96
VOCAB = 61
EXAMPLES = examples(25)


@dataclass(slots=True)
class Piece:
    """Tokens of one text that are computed in a step, beginning at its row `start`."""

    text: int
    tokens: list[int]
    start: int


class Reference:
    """Our network on a CPU in fp32. Only this class knows its parts."""

    def __init__(self, folder: Path) -> None:
        network = load_model(files_of(folder), dtype=torch.float32, device=torch.device("cpu"))
        self.model = Decoder(network)
        self._held: dict[int, PlainAttention] = {}

    def step(self, pieces: Items[Piece]) -> list[Tensor]:
        """Return the logits [tokens, vocab] of every piece, computed side by side after those of earlier steps."""
        tokens = [token for piece in pieces for token in piece.tokens]
        positions = [piece.start + i for piece in pieces for i in range(len(piece.tokens))]
        with torch.inference_mode():
            hidden = self.model.forward(torch.tensor(tokens), torch.tensor(positions), self.attention(pieces))
            return list(self.model.logits(hidden).split([len(piece.tokens) for piece in pieces]))

    def attention(self, pieces: Items[Piece]) -> Attention:
        counts = [len(piece.tokens) for piece in pieces]

        def attend(layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            parts = zip(pieces, *(x.split(counts) for x in (q, k, v)), strict=True)
            return torch.cat(
                [
                    self._held.setdefault(piece.text, PlainAttention(self.model.network))(layer_index, *qkv)
                    for piece, *qkv in parts
                ]
            )

        return attend


def ropes(head_dim: int) -> st.SearchStrategy[dict[str, Any]]:
    """Return every kind of RoPE that a config of these families may have."""
    theta = st.sampled_from([100.0, 10_000.0, 1e6])
    factor = st.sampled_from([1.0, 1.5, 4.0, 8.0])
    scaled = {"rope_theta": theta, "factor": factor}
    kinds = [
        st.fixed_dictionaries({"rope_type": st.just("default"), "rope_theta": theta}),
        st.fixed_dictionaries({"rope_type": st.just("linear"), **scaled}),
        st.fixed_dictionaries(
            {
                "rope_type": st.just("llama3"),
                **scaled,
                "low_freq_factor": st.sampled_from([0.5, 1.0]),
                "high_freq_factor": st.sampled_from([2.0, 4.0]),
                "original_max_position_embeddings": st.sampled_from([8, 32, 64]),
            }
        ),
    ]
    original = st.sampled_from([8, 32])
    yarn = {"truncate": st.booleans(), "original_max_position_embeddings": original}
    kinds.append(st.fixed_dictionaries({"rope_type": st.just("yarn"), **scaled, **yarn}))
    if head_dim > 2:  # NTK scaling of theta is not defined for a single pair
        kinds.append(st.fixed_dictionaries({"rope_type": st.just("dynamic"), **scaled}))
    return st.one_of(kinds)


@st.composite
def configs(draw: st.DrawFn) -> PretrainedConfig:
    """Draw a tiny model of one of the families."""
    family = draw(st.sampled_from([Qwen3Config, Qwen2Config, LlamaConfig, MistralConfig]))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3, 4, 8]))
    head_dim = draw(st.sampled_from([2, 6, 8, 16, 24, 32, 64]))
    # Independent of the head size, so that neither is mistaken for the other. Llama needs a multiple of the heads.
    hidden = (
        heads * draw(st.sampled_from([1, 2, 5]))
        if family is LlamaConfig
        else draw(st.sampled_from([8, 20, 48]))
    )
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": draw(st.sampled_from([4, 24, 56])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(ropes(head_dim)),
    }
    if family is MistralConfig:
        fields["sliding_window"] = draw(st.sampled_from([None, POSITIONS, 1, 5, 16]))
    elif family is not Qwen2Config:
        fields["attention_bias"] = draw(st.booleans())
    if family is LlamaConfig:
        fields["mlp_bias"] = draw(st.booleans())
    return family(**fields)


@st.composite
def gemmas(draw: st.DrawFn) -> PretrainedConfig:
    """Draw a tiny Gemma 2 or 3: windows, caps, scales, a RoPE for each kind of layer."""
    cap = st.sampled_from([None, 1.0, 5.0])
    kv_heads, caps = draw(st.sampled_from([1, 2])), draw(st.booleans())
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * draw(st.sampled_from([1, 2])),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 8, 16])),
        "max_position_embeddings": POSITIONS,
        "sliding_window": draw(st.sampled_from([1, 2, 5, 16, POSITIONS])),
        "query_pre_attn_scalar": draw(st.sampled_from([4, 8, 16])),
        "final_logit_softcapping": draw(cap),
        "attention_bias": draw(st.booleans()),
    }
    if caps:
        return Gemma2Config(**fields, attn_logit_softcapping=draw(cap))
    kinds = st.sampled_from(["sliding_attention", "full_attention"])
    fields["layer_types"] = [draw(kinds) for _ in range(fields["num_hidden_layers"])]
    linear = {"rope_type": "linear", "factor": 4.0}
    return Gemma3TextConfig(
        **fields,
        rope_parameters={
            "full_attention": {"rope_theta": 1e4} | draw(st.sampled_from([linear, {"rope_type": "default"}])),
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        },
    )


@st.composite
def texts_and_steps(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Draw up to four texts of mixed lengths, and the rows at which each is cut."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    texts = [draw(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n)) for n in lengths]
    cuts = [sorted(draw(st.sets(st.integers(1, n), max_size=4)) | {n}) for n in lengths]
    return texts, cuts


def assert_close(ours: Tensor, expected: Tensor) -> None:
    """Assert that logits agree within 1e-4 of the largest logit of each position."""
    assert ours.shape == expected.shape
    scale = expected.abs().amax(dim=-1, keepdim=True)
    assert ((ours - expected).abs() / scale).max().item() < 1e-4


def side_by_side(reference: Reference, texts: list[list[int]], cuts: list[list[int]]) -> list[Tensor]:
    """Return the logits of every text. Step n computes the n-th piece of every text that has one."""
    found: list[list[Tensor]] = [[] for _ in texts]
    for n in range(max(map(len, cuts))):
        pieces = []
        for text, (tokens, ends) in enumerate(zip(texts, cuts, strict=True)):
            if n < len(ends):
                start = ends[n - 1] if n else 0
                pieces.append(Piece(text, tokens[start : ends[n]], start))
        for piece, logits in zip(pieces, reference.step(pieces), strict=True):
            found[piece.text].append(logits)
    return [torch.cat(parts) for parts in found]


@EXAMPLES
@given(st.one_of(configs(), gemmas()), texts_and_steps(), st.integers(0, 2**16))
def test_whole_prompts_chunks_and_batches_give_the_logits_of_transformers(
    config: PretrainedConfig, given_texts: tuple[list[list[int]], list[list[int]]], seed: int
) -> None:
    texts, cuts = given_texts
    model = random_model(config, seed=seed)
    expected = [run_reference(model, text) for text in texts]
    with TemporaryDirectory() as name:
        model.save_pretrained(Path(name))
        whole = side_by_side(Reference(Path(name)), texts, [[len(text)] for text in texts])
        cut = side_by_side(Reference(Path(name)), texts, cuts)
    for ours in (whole, cut):
        for logits, truth in zip(ours, expected, strict=True):
            assert_close(logits, truth)
