"""A mixture of experts on a GPU: the shapes of Qwen3-30B-A3B or gpt-oss-20b, random weights, batch 1 and more.

    python -m benchmarks.experts [--format bf16|q4_0|q4_k_m|q8_0|mxfp4] [--layers 48] [--rows 1,8] [--context 512]
                                 [--prompts 4096] [--profile] [--plain]
                                 [--host-layers N [--host-format bf16|q4_1|q8_0]]

It measures a decode step and prompts with our kernels and, with --plain, with plain PyTorch in the same run. The bytes
of a step are those that one token must read: attention, routers, the chosen experts, the head, and K and V of the
context. Their rate is compared with that of a large copy (bytes read plus written). With fewer --layers, a shallower
network shows what a layer costs; the time of all layers is extrapolated from it, and marked as such.
With --host-layers, the experts of the last N layers lie in host memory. Their costs are measured as by an engine that
loads; then steps are measured, and prompts: by the rule, and with `--host-prompts` also with all of them on the CPU.
`--shape tiny --device cpu` tries the program out in Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
from dataclasses import replace
from time import perf_counter

import torch

from benchmarks.decode_rows import BLOCK, STEPS, kernel_times, step_seconds
from benchmarks.formats import FORMATS, random_quantized, read_bytes
from benchmarks.machine import copy_bandwidth, describe
from benchmarks.prefill import warm_seconds
from benchmarks.shapes import cache_bytes, random_engine, random_model, random_prompt
from engine.cache.kv_cache import KVCache
from engine.execute.cuda.decode_runner import make_decode_runner
from engine.execute.cuda.fused_program import FusedDecoder
from engine.execute.cuda.graphs import Graphs
from engine.execute.cuda.host_experts import HostExperts
from engine.execute.cuda.slots import Slots
from engine.kernels.native.library import Pool, default_threads
from engine.machine.shapes import known_shape
from engine.params import SamplingParams
from models.families.common import pre_norm_layer, uniform
from models.network import ExpertWeights, FeedForwardWeights, Linear, Network, Weight
from models.spec import Attention, Experts, FeedForward, ModelSpec, Norm, Rope
from models.weights.block_formats import Kind
from models.weights.quantize import quantize

DTYPE = torch.bfloat16
SHAPES = {
    "30B-A3B": known_shape("qwen3:30b-a3b"),
    "gpt-oss-20b": known_shape("gpt-oss:20b"),
    "tiny": uniform(
        "Qwen3MoeForCausalLM",
        layers=2,
        vocab_size=64,
        hidden_size=64,
        max_positions=4096,
        layer=pre_norm_layer(
            Attention(2, 1, 64, head_norm=Norm(), rope=Rope(1e6)), Experts(4, 2, FeedForward(32)), Norm()
        ),
        tied=False,
    ),
}


def moved_bytes(network: Network, context: int) -> float:
    """Return the bytes that a token reads after `context` others; of the experts, those that it uses."""
    return read_bytes(network) + cache_bytes(network.spec, DTYPE, context + STEPS / 2)


def shallower(network: Network, layers: int) -> Network:
    """Return the network cut to its first layers, with its head."""
    return replace(
        network,
        spec=replace(network.spec, layers=network.spec.layers[:layers]),
        layers=network.layers[:layers],
    )


def a_cache(network: Network, rows: int, context: int) -> KVCache:
    """Allocate a cache for `rows` sequences."""
    heads = network.spec.attention
    blocks = rows * -(-(context + STEPS) // BLOCK)
    cache = KVCache.uniform(
        len(network.layers), blocks, BLOCK, heads.kv_heads, heads.head_dim, network.dtype, network.device
    )
    cache.kv.zero_()
    return cache


def in_host_memory(network: Network, layers: int, form: str) -> Network:
    """Return the network with the experts of the last `layers` layers in host memory, in blocks unless `form` is bf16.
    They are all copies of one random expert."""

    def moved(weights: ExpertWeights) -> ExpertWeights:
        count, first = len(weights.experts), weights.experts[0]

        def stack(linear: Linear, parts: int) -> list[Linear]:
            if form == "bf16":
                numbers = linear.weight.cpu().expand(count, -1, -1).contiguous()
                return [Linear((Weight.plain(numbers[i]),)) for i in range(count)]
            kind = Kind[form.upper()]
            blocks = [
                quantize(part.float().cpu(), kind).expand(count, -1, -1).contiguous()
                for part in linear.weight.chunk(parts)
            ]
            rows, columns = linear.rows // parts, linear.columns
            return [
                Linear(tuple(Weight(block[i], kind, rows, columns) for block in blocks)) for i in range(count)
            ]

        pairs = zip(stack(first.gate_up, 2), stack(first.down, 1), strict=True)
        return replace(weights, experts=tuple(FeedForwardWeights(*pair) for pair in pairs), on_host=True)

    found = list(network.layers)
    for index in range(len(found) - layers, len(found)):
        weights = found[index].feed_forward
        assert isinstance(weights, ExpertWeights)
        found[index] = replace(found[index], feed_forward=moved(weights))
    return replace(network, layers=tuple(found))


def host_experts(network: Network) -> HostExperts | None:
    """Return the measured executor of experts in host memory, None if there are none."""
    if not network.on_host:
        return None
    found = HostExperts(network, Pool(default_threads()))
    found.prepare(fetches=True, fixed=False)
    return found


def decode_seconds(network: Network, rows: int, context: int, fused: bool, profile: bool) -> float:
    """Return the median seconds of a decode step. Plain PyTorch waits for the host, because no graph records it."""
    cache = a_cache(network, rows, context)
    host = host_experts(network)
    runner = make_decode_runner(
        network,
        cache,
        "triton",
        context + STEPS,
        rows,
        Graphs() if fused else None,
        fused,
        on_host=host,
    )
    # Identical rows would all choose the same experts.
    times = step_seconds(runner, rows, context, SamplingParams(temperature=float(rows > 1)))
    if profile:
        print(kernel_times(runner, rows, context), flush=True)
    if host is not None:
        host.close()
    return times[len(times) // 2]


def decode(
    network: Network, whole: int, rows: int, context: int, copied: float, fused: bool, profile: bool
) -> None:
    """Measure and print a decode step."""
    layers, name = len(network.layers), "ours" if fused else "plain PyTorch"
    spent = decode_seconds(network, rows, context, fused, profile)
    line = f"{name}: {layers} layers, {rows} rows, context {context}: {spent * 1e6:,.0f} us a step"
    line += f", {rows / spent:,.0f} tokens/s"
    if rows == 1 and not network.on_host:
        moved = moved_bytes(network, context)
        rate = moved / spent
        line += f", {moved / 1e9:.2f} GB read, {rate / 1e12:.2f} TB/s"
        line += f" = {rate / copied:.1%} of a copy"
    print(line, flush=True)
    if layers < whole and rows == 1 and layers > 1 and not network.on_host:
        less = shallower(network, layers // 2)
        half = decode_seconds(less, rows, context, fused, False)
        more = (whole - layers) / (layers - layers // 2)
        full = spent + (spent - half) * more
        moved = moved_bytes(network, context)
        share = (moved + (moved - moved_bytes(less, context)) * more) / full / copied
        print(
            f"    worked out from {layers // 2} and {layers} layers, not measured: {whole} layers take "
            f"{full * 1e6:,.0f} us, {1 / full:,.0f} tokens/s, {share:.1%} of a copy"
        )


def prompts(
    network: Network,
    lengths: list[int],
    repeats: int,
    fused: bool,
    device: torch.device,
    fetches: bool = True,
) -> None:
    """Measure and print new prompts; without `fetches`, all experts in host memory are computed there."""
    options = {"context": max(lengths) + 64, "offload": 0, "fused": fused}
    with random_engine(network.spec, device=device, dtype=network.dtype, network=network, **options) as (
        engine,
        _,
    ):
        host = engine.pieces.on_host
        for note in engine.figures().notes if host is not None else ():
            print(f"    {note}")
        if host is not None and not fetches:
            host.fetch_from = None
            print("    nothing is fetched")
        for length in lengths:
            times = []
            for seed in range(repeats + 1):
                times.append(warm_seconds(engine, random_prompt(network.spec, length, 100 * length + seed)))
            spent, name = sorted(times[1:])[repeats // 2], "ours" if fused else "plain PyTorch"
            print(
                f"{name}: {len(network.layers)} layers, a prompt of {length:,}: {spent * 1e3:,.1f} ms, "
                f"{length / spent:,.0f} tokens/s",
                flush=True,
            )


def random_network(
    spec: ModelSpec, form: str, dtype: torch.dtype, device: torch.device, positions: int
) -> Network:
    """Return a random network, plain or quantised and packed."""
    if form == "bf16":
        return random_model(spec, dtype, device, positions)
    return random_quantized(spec, form, dtype, device, positions)


def try_out(network: Network, context: int) -> None:
    """Run one step without a GPU; nothing is measured."""
    slots = Slots(1, 1, -(-(context + STEPS) // BLOCK), torch.zeros(1, dtype=torch.int64))
    slots.put(0, context, context)
    slots.show(0, list(range(-(-(context + STEPS) // BLOCK))))
    slots.activate([0], 1)
    slots.send()
    began = perf_counter()
    host = host_experts(network)
    program = FusedDecoder(network, a_cache(network, 1, context), slots.given, pdl=False, on_host=host)
    with torch.inference_mode():
        logits = program.run(1, 640)
    print(f"a step on a CPU, {perf_counter() - began:.1f} s: logits {list(logits.shape)}, {logits.std():.3f}")


def main() -> None:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="30B-A3B")
    parser.add_argument("--format", choices=list(FORMATS), default="bf16")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--rows", default="1,2,8,16,64")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prompts", default="512,4096")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plain", action="store_true", help="plain PyTorch, too")
    parser.add_argument("--profile", action="store_true", help="which kernels of a step take how long")
    parser.add_argument("--host-layers", type=int, default=0, help="whose experts lie in host memory")
    parser.add_argument("--host-format", choices=("bf16", "q4_1", "q8_0"), default="bf16")
    parser.add_argument("--host-prompts", action="store_true", help="prompts once more, with nothing fetched")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    rows, lengths = ([int(x) for x in text.split(",") if x] for text in (given.rows, given.prompts))
    device, spec = torch.device(given.device), SHAPES[given.shape]
    whole = len(spec.layers)
    spec = replace(spec, layers=spec.layers[: given.layers])
    positions = max([given.context + STEPS, *(length + 64 for length in lengths)])
    if device.type != "cuda":
        network = random_network(spec, given.format, torch.float32, device, positions)
        try_out(in_host_memory(network, given.host_layers, given.host_format), given.context)
        return
    told = describe(device)
    print(f"{told['device']}, driver {told['driver']}, {told['versions']}", flush=True)
    copied = copy_bandwidth(device)
    torch.cuda.empty_cache()
    print(f"a copy: {copied / 1e12:.2f} TB/s", flush=True)
    network = random_network(spec, given.format, DTYPE, device, positions)
    if given.host_layers:
        network = in_host_memory(network, given.host_layers, given.host_format)
        torch.cuda.empty_cache()
        print(
            f"the experts of the last {given.host_layers} layers in host memory, {given.host_format}",
            flush=True,
        )
    for fused in (True, False) if given.plain else (True,):
        for count in rows:
            decode(network, whole, count, given.context, copied, fused, given.profile)
            torch.cuda.empty_cache()
        if lengths:
            prompts(network, lengths, given.repeats, fused, device)
        if lengths and given.host_prompts:
            prompts(network, lengths, given.repeats, fused, device, fetches=False)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
