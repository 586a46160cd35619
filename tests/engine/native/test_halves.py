"""Weights in bf16: the bits of a row in any company, and errors no larger than those of the plain modules in bf16."""

import pytest
import torch

from engine.execute.cpu.executor import NativeDecoder
from engine.kernels.native.library import NativeLibrary, Pool
from models.network import Network
from models.reference.decoder import Decoder
from models.spec import FeedForward
from tests.engine.native.spans import a_span
from tests.engine.native.test_native_chunks import Prompt, run
from tests.engine.native.test_native_decode import cache_for
from tests.engine.native.test_native_experts import MIXTURE, a_spec
from tests.engine.test_compatibility import a_network
from tests.models.checkpoints import PlainAttention

BF16 = torch.bfloat16
SPECS = {
    "dense": a_spec(FeedForward(99), FeedForward(104), hidden=72),
    "experts": a_spec(MIXTURE, FeedForward(101)),
}
"""Odd sizes: the last columns and outputs fill no vector."""


@pytest.mark.parametrize("name", SPECS)
def test_rows_have_the_bits_that_each_has_alone(name: str, library: NativeLibrary, pool: Pool) -> None:
    network = a_network(SPECS[name], BF16)
    for variant in library.variants.values():
        decoder = NativeDecoder(network, cache_for(network, torch.float32), pool, variant)
        alone = [decoder.run([a_span([3 * row], 0, [0], [row])])[0].clone() for row in range(20)]
        for rows in (2, 3, 5, 8, 9, 13, 20):
            found = decoder.run([a_span([3 * row], 0, [0], [row]) for row in range(rows)])
            assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=False)), rows


@pytest.mark.parametrize("name", SPECS)
def test_a_prompt_has_the_bits_of_its_parts(name: str, library: NativeLibrary, pool: Pool) -> None:
    network = a_network(SPECS[name], BF16)
    prompt = Prompt(network, 170)
    for variant in library.variants.values():
        logits, kv = run(network, prompt, pool, variant, torch.float16, [170])
        again, kv_again = run(network, prompt, pool, variant, torch.float16, [1, 3, 12, 140, 170])
        assert torch.equal(again, logits)
        assert torch.equal(kv_again, kv)


@pytest.mark.parametrize("name", SPECS)
def test_no_error_is_larger_than_that_of_the_plain_modules(
    name: str, library: NativeLibrary, pool: Pool
) -> None:
    spec = SPECS[name]
    network, exact = a_network(spec, BF16), a_network(spec, torch.float32, BF16)
    prompt = Prompt(network, 60)

    def reference(of: Network) -> torch.Tensor:
        """The logits after the last row, in the dtype of the network."""
        with torch.inference_mode():
            hidden = Decoder(of).forward(
                torch.tensor(prompt.ids), torch.tensor(prompt.positions), PlainAttention(of)
            )
            return Decoder(of).logits(hidden[-1:])[0].float()

    truth = reference(exact)
    theirs = (reference(network) - truth).norm()
    for variant in library.variants.values():
        logits, _ = run(network, prompt, pool, variant, torch.float16, [60])
        assert (logits - truth).norm() <= theirs
