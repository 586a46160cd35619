"""Where the ranks of a divided network write what they exchange: the layout of the memory that each shares."""

from dataclasses import dataclass

from models.network import Network

MOST_ROWS = 64
"""The most sequences in a decode step of a divided network."""


@dataclass(frozen=True, slots=True)
class AllReduceLayout:
    """The sizes of the exchanged data and its layout in the memory of each rank, in words of 4 bytes."""

    ranks: int
    rows: int
    """The most rows of a step."""
    size: int
    """Numbers in a row between layers (the hidden size)."""
    columns: int
    """Logits per row on each rank."""
    vocab: int
    layers: int
    prompt: int = 0
    """The most rows of a prompt's step, and the bytes of a number in them."""
    itemsize: int = 2

    @classmethod
    def of(cls, network: Network, rows: int, prompt: int) -> "AllReduceLayout":
        """Return the plan for a divided network and steps of up to `rows` rows, or up to `prompt` rows of prompts."""
        assert network.share is not None
        spec, ranks = network.spec, network.share.ranks
        vocab, itemsize = network.whole.vocab_size, network.dtype.itemsize
        return cls(ranks, rows, spec.hidden_size, spec.vocab_size, vocab, len(spec.layers), prompt, itemsize)

    @property
    def sums(self) -> int:
        """The number of sums in a step."""
        return 2 * self.layers + 1

    @property
    def exchanges(self) -> int:
        """The number of exchanges in a step. It is odd, so that the sum buffers also alternate between steps."""
        return self.sums + 2

    @property
    def logits(self) -> int:
        """The first word of the logits, which follow the two sum buffers."""
        return 2 * self.ranks * self.rows * self.size

    @property
    def tokens(self) -> int:
        """The first word of the tokens."""
        return self.logits + self.ranks * self.rows * self.columns

    @property
    def prompts(self) -> int:
        """The first word of the two places for rows of prompts, at a multiple of 16 bytes."""
        return -(-(self.tokens + self.rows) // 4) * 4

    @property
    def place(self) -> int:
        """Words of such a place."""
        return -(-self.prompt * self.size * self.itemsize // 16) * 4

    @property
    def nbytes(self) -> int:
        """The bytes of memory each rank needs. The last words say which ranks have written their rows of a prompt."""
        return 4 * (self.prompts + 2 * (self.place + self.ranks))
