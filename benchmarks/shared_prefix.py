"""Microseconds of a layer's attention for sequences with a common prefix, read once for all or by each of them.

    python -m benchmarks.shared_prefix [--shared 8192] [--own 256] [--heads 16 8] [--dim 128]
        [--cut 32 1 256 1 32 4 4 2]

With `apart`, sequences have their own copies of the prefix; with `alike`, they have the same blocks, read by each (a
cache may help); with `together`, the shared rows are read once. Steps are CUDA graphs of so many layers that no cache
of the GPU holds them.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.machine import describe
from benchmarks.sampler import captured, microseconds
from engine.device import has_pdl
from engine.execute.cuda.attend_mma import (
    PartsCut,
    attend_mma,
    by_tensor_cores,
    choose_own_cut,
    choose_shared_cut,
)
from engine.execute.cuda.decode_attention import AttentionInput, AttentionShape, attend
from engine.execute.cuda.prefix_groups import choose_sharing, pays
from engine.execute.cuda.tiles import MOST_CHUNKS, choose_chunkings, context_limit
from models.spec import Attention, Norm, Rope

BLOCK = 256
LAYERS = 4


def step(
    shape: AttentionShape,
    rows: int,
    shared: int,
    own: int,
    alike: bool,
    together: bool,
    cut: PartsCut | None = None,
) -> tuple[Callable[[], None], Tensor]:
    """Return the attention of a step in LAYERS layers, and its last output; `cut` is the engine's unless given."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

    prefix, rest = shared // BLOCK, own // BLOCK + 1
    copies = 1 if alike else rows
    tables = torch.stack(
        [
            torch.cat(
                [
                    torch.arange(prefix) + prefix * (row % copies),
                    torch.arange(rest) + prefix * copies + rest * row,
                ]
            )
            for row in range(rows)
        ]
    ).to(device, torch.int32)
    places = (prefix * copies + rest * rows) * BLOCK
    token = shared + own
    counters = torch.full((rows, 2), token, dtype=torch.int64, device=device)
    spec = shape.spec
    limit = context_limit(token)
    cuts, own_cut = choose_chunkings(rows, limit, spec.kv_heads), choose_own_cut(shape, rows, limit)
    heads = random(rows, (spec.heads + 2 * spec.kv_heads) * spec.head_dim)
    norm = random(spec.heads + spec.kv_heads, spec.head_dim)
    rotary = random(token + 1, spec.head_dim)
    partial = torch.zeros(rows * MOST_CHUNKS * spec.heads * spec.head_dim, device=device)
    lse = torch.zeros(rows * MOST_CHUNKS * spec.heads, device=device)
    active = torch.arange(rows, dtype=torch.int32, device=device)
    layers = [
        AttentionInput(
            heads,
            norm,
            rotary,
            random(places, spec.kv_heads, spec.head_dim),
            random(places, spec.kv_heads, spec.head_dim),
            active,
            tables,
            counters,
            partial,
            lse,
        )
        for _ in range(LAYERS)
    ]
    nothing = torch.zeros(rows, dtype=torch.int32, device=device)
    nobody = torch.full((16,), -1, dtype=torch.int32, device=device)
    out = torch.zeros(rows, spec.heads * spec.head_dim, dtype=torch.bfloat16, device=device)
    sharing = choose_sharing(rows, spec.heads // spec.kv_heads) if together else None
    members = common = None
    if sharing is not None:
        tiles = torch.full((sharing.tiles, sharing.members), -1, dtype=torch.int32)
        tiles.view(-1)[:rows] = torch.arange(rows, dtype=torch.int32)
        members = tiles.to(device)
        common = torch.full((rows,), shared, dtype=torch.int32, device=device)

    def work() -> None:
        for layer in layers:
            if sharing is not None and common is not None and members is not None:
                chosen = cut or choose_shared_cut(shape, rows, sharing, context_limit(own))
                attend_mma(shape, layer, out, rows, sharing, chosen, common, members)
            elif by_tensor_cores(shape, layer, rows, limit):
                attend_mma(shape, layer, out, rows, None, own_cut, nothing, nobody)
            else:
                attend(shape, layer, out, rows, cuts)

    return work, out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shared", type=int, default=8192)
    parser.add_argument("--own", type=int, default=256)
    parser.add_argument("--heads", type=int, nargs=2, default=(16, 8))
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument(
        "--cut", type=int, nargs="+", default=None, help="the numbers of a PartsCut, in their order"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda")
    print(describe(device))
    q_heads, kv_heads = arguments.heads
    pdl = has_pdl(torch.device("cuda"))
    spec = Attention(q_heads, kv_heads, arguments.dim, head_norm=Norm(), rope=Rope())
    machine = torch.cuda.get_device_properties(device)
    size = machine.multi_processor_count, machine.shared_memory_per_multiprocessor
    shape = AttentionShape(spec, BLOCK, pdl, *size)
    row_bytes = 4 * kv_heads * arguments.dim
    cut = PartsCut(*arguments.cut) if arguments.cut else None
    shared, own = arguments.shared // BLOCK * BLOCK, arguments.own
    print(
        f"{'rows':>5} {'apart':>9} {'alike':>9} {'together':>9} {'apart/together':>15} {'alike/together':>15} "
        f"{'differs':>10} pays"
    )
    for rows in (16, 32, 64, 128, 256):
        room = torch.cuda.mem_get_info()[0] * 0.8
        times: dict[str, float] = {}
        outputs = []
        for name, alike, together in (
            ("apart", False, False),
            ("alike", True, False),
            ("together", True, True),
        ):
            if name == "apart" and rows * (shared + own + BLOCK) * row_bytes * LAYERS > room:
                times[name] = float("nan")
                continue
            work, out = step(shape, rows, shared, own, alike, together, cut)
            times[name] = microseconds(captured(work, 10)) / 10 / LAYERS
            outputs.append(out.clone())
        differs = (outputs[-1] - outputs[-2]).abs().max()
        print(
            f"{rows:>5} {times['apart']:9.1f} {times['alike']:9.1f} {times['together']:9.1f} "
            f"{times['apart'] / times['together']:15.2f} {times['alike'] / times['together']:15.2f} "
            f"{differs:10.1e} {pays(rows, shared, row_bytes)}"
        )


if __name__ == "__main__":
    main()
