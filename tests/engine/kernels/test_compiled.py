"""The Gluon kernels, compiled for a GPU that need not be here: the interpreter knows neither layouts nor registers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("triton")

COMPILER = """
import inspect, json, re
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.packed import codes_of
from engine.execute.cuda.decode_attention import MOST_HELD
from engine.execute.cuda.tiles import choose_chunking, query_splits
from engine.kernels.triton.pointwise import Gate
from models.weights.block_formats import Kind

TYPES = {"active": "*i32", "tables": "*i32", "counters": "*i64", "partial": "*fp32", "lse": "*fp32"} | {
    "scale_log2": "fp32", "table_stride": "i32", "begin": "i32", "end": "i32", "ids": "*i32", "shares": "*fp32",
    "logits": "*fp32", "arrived": "*i32", "selection_bias": "*fp32", "expert_scales": "*fp32",
    "order": "*i32", "tiles": "*i32", "counts": "*i32", "pairs": "i32", "most": "i32", "square_sums": "*fp32"}
NUMBERS = ("rows", "tiles", "chunks", "parts", "own", "least", "usual")
LEFT = dict.fromkeys(("partial", "lse", "active", "counters"), "pointer")
SHARED = {"shared": "*i32", "members": "*i32"} | dict.fromkeys(NUMBERS, "i32")

def ptx(kernel, warps, constants, language=GluonASTSource, capability=90, **options):
    names = kernel.arg_names
    given = inspect.signature(kernel.fn).parameters.values()
    constants = {p.name: p.default for p in given if p.default is not p.empty} | constants
    constants = {name: value for name, value in constants.items() if value != "pointer"}
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "*bf16") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"}
    values = {(names.index(n),): value for n, value in constants.items()}
    source = language(kernel, signature, values, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps} | options)
    return made.asm["ptx"], made.metadata.shared
"""
DENSE = """
from engine.kernels.triton.attention import attention_kernel
from engine.kernels.triton.fused_norm import add_prepared_kernel
from engine.kernels.triton.linear import linear_kernel
from engine.kernels.triton.attention_mma import parts_kernel

def shared(group, dim, stages, warps, **features):
    TYPES.update(SHARED)
    width, cut = triton.next_power_of_2(dim), dict(TILE=32, STAGES=stages, WARPS=warps, HALVES=warps // 2)
    constants = dict(HQ=8 * group, HKV=8, G=triton.next_power_of_2(group), D=width, DIM=dim, ROTATED=dim, EPS=1e-6)
    constants |= dict(NORM=True, BLOCK=256, MEMBERS=16, PDL=True) | cut | features
    text, needed = ptx(parts_kernel, warps, constants)
    before = text.split("griddepcontrol.wait;")[:2]  # the first is of programs that have nothing to do
    early = sum(part.count("cp.async.cg") for part in before)
    return {"early": early, "held": 32 * width // (8 * 32 * warps) * 2 * stages, "shared": needed}

def of_bytes(fp8, capability):
    held = {"cache_k": "*u8", "cache_v": "*u8", "k_pairs": "*i16", "v_pairs": "*i16"}
    TYPES.update(SHARED | held | {"k_scales": "*fp32", "v_scales": "*fp32"})
    constants = dict(HQ=32, HKV=8, G=4, D=128, DIM=128, ROTATED=128, EPS=1e-6, NORM=True, BLOCK=32, MEMBERS=4)
    constants |= dict(TILE=64, STAGES=2, WARPS=4, HALVES=1, PDL=capability >= 90, ROW=1056, FP8=fp8)
    pointers = dict.fromkeys(("k_scales", "v_scales", "k_pairs", "v_pairs"), "pointer")
    text, needed = ptx(parts_kernel, 4, constants | pointers, capability=capability)
    for name in held:
        TYPES.pop(name)
    return {"early": int("griddepcontrol" in text), "held": int(capability >= 90), "shared": needed}

def linear(outputs, inputs, **flags):
    tile = KernelConfigs().product(16, outputs, inputs, flags.get("GATED", False), None)
    constants = dict(COUNT=8, N=outputs, K=inputs, EPS=1e-6, NORM=False, BIAS=False, GATED=False, RESIDUAL=False)
    cut = dict(FOLDS=tile.folds, WARPS=tile.warps, TILES=tile.tiles, AHEAD=tile.ahead, PDL=True)
    text, shared = ptx(linear_kernel, tile.warps, constants | cut | flags)
    before = text[: text.index("griddepcontrol.wait;")]
    spans = -(-inputs // (tile.warps * tile.folds * 128))
    unrolled = spans * tile.folds <= 6
    early = re.findall(r"cp\\.async\\.cg\\S* \\[[^,]*, \\[[^,]*, 0x10", before)
    return {"early": len(early), "held": 8 * tile.tiles * min(tile.ahead, spans), "ldmatrix": text.count("ldmatrix"),
            "read": len(re.findall(r"ld\\.shared\\.v4", text)), "spans": spans if unrolled else 1,
            "tiles": tile.tiles, "products": text.count("mma.sync"), "folds": tile.folds}

def attention(limit, group, dim, **features):
    cut, width = choose_chunking(limit, 8), triton.next_power_of_2(dim)
    splits = query_splits(group, width)
    constants = dict(SOME=False, CHUNKS=80, HQ=8 * group, HKV=8, D=width, DIM=dim, ROTATED=dim, EPS=1e-6, NORM=True)
    constants |= dict(BLOCK=256, PDL=True, SPLITS=splits)
    wide, groups = max(width // 128, 1), cut.warps * max(256 // width, 1)
    held = min(cut.tile // (groups * wide), MOST_HELD if width > 256 else cut.tile)
    tiles = cut.rows // (groups * held)
    constants |= dict(WARPS=cut.warps, R=held, TILES=tiles, STAGES=min(tiles, 3), SPARE=20) | features
    text, shared = ptx(attention_kernel, cut.warps, constants)
    before = text[: text.rindex("griddepcontrol.wait;")]
    needed = shared - 20 * groups * width * 2
    copies = 2 if width > 256 else 1  # of a thread, for each row that its group holds
    return {"early": before.count("cp.async.cg"), "held": 2 * copies * held * min(tiles, 3), "shared": needed}

sums = dict(COUNT=8, K=1536, PREPARED=192, WARPS=4, EPS=1e-6, SCALE=1.0, PDL=True)
ptx(add_prepared_kernel, 4, sums | dict(factor="pointer"))
ptx(add_prepared_kernel, 4, sums | dict(factor=None))
print(json.dumps([
    linear(4096, 1024, NORM=True), linear(3072, 1024, NORM=True, GATED=True),
    linear(1000, 576, RESIDUAL=True, BIAS=True), linear(4096, 12288, RESIDUAL=True),
    linear(3072, 1024, NORM=True, GATED=True, PREPARED=64, square_sums="pointer"),
    linear(1000, 576, RESIDUAL=True, PREPARES=63, prepared="pointer", square_sums="pointer"),
    linear(256, 1536, RESIDUAL=True, BESIDE=8960, GATE=Gate("gelu_tanh")),
    linear(1024, 2048, COUNT=1, RESIDUAL=True, ATTENDED=(128, 128, 5, 2048), **LEFT),
    linear(2048, 512, RESIDUAL=True, row_gates="pointer"),
    linear(1536, 1152, NORM=True, OFFSET=1.0), linear(14336, 3584, GATED=True, GATE=Gate("gelu_tanh")),
    linear(3136, 1024, NORM=True, GATE=Gate("relu2", alone=True)),
    attention(640, 2, 128), attention(40960, 3, 64),
    attention(640, 4, 256, OFFSET=1.0, WINDOW=512, CAP_LOG2=72.0), attention(640, 1, 96, NORM=False, WINDOW=2047),
    attention(640, 8, 64, NORM=False, WINDOW=128),
    attention(640, 1, 128, TOGETHER=True, ONCE=True, EXACT=True), attention(640, 3, 128, ROTATED=96, PAIRS=True),
    shared(2, 128, 4, 4), shared(4, 128, 6, 4, EXACT=True), shared(4, 64, 4, 4, NORM=False),
    shared(3, 96, 4, 4, NORM=False, ROTATED=0), shared(4, 128, 4, 4, TOGETHER=True, ONCE=True),
    attention(640, 8, 256, ONCE=True, WINDOW=512, V_EPS=1e-6), attention(640, 8, 512, ONCE=True, V_EPS=1e-6),
    attention(40960, 16, 512, ONCE=True, V_IS_K=True), attention(640, 8, 512, ONCE=True, STORED=True),
    attention(640, 4, 128, LATER=True), shared(4, 128, 4, 4, LATER=True),
    attention(640, 4, 128, BETA=0.1, ORIGINAL=16384), shared(4, 128, 4, 4, BETA=0.1, ORIGINAL=16384),
    of_bytes(True, 80), of_bytes(True, 90), of_bytes(False, 90),
]))
"""
EXPERTS = """
from engine.execute.cuda.experts import choose_group_tile
from engine.kernels.triton.expert_norms import join_kernel
from engine.kernels.triton.experts import down_kernel, gate_up_kernel
from engine.kernels.triton.grouped_gemm import group_kernel, place_kernel
from engine.kernels.triton.routing import router_kernel

tile = KernelConfigs().product(16, 768, 2048, True, None)
cut = dict(FOLDS=tile.folds, WARPS=tile.warps, AHEAD=tile.ahead, PDL=True)
shape = dict(CHOSEN=8, N=768, K=2048, EPS=1e-6, TILES=tile.tiles, OFFSET=1.0)
gate, _ = ptx(gate_up_kernel, tile.warps, cut | shape)
clamped = dict(bias="pointer", GATE=Gate("silu", 1.702, 7.0, 1.0))
shape = dict(CHOSEN=4, N=2880, K=2880, EPS=1e-6, TILES=tile.tiles)
ptx(gate_up_kernel, tile.warps, cut | shape | clamped)
squared = Gate("relu2", alone=True)
ptx(gate_up_kernel, tile.warps, cut | shape | dict(GATED=False, GATE=squared))
tile = KernelConfigs().product(16, 2048, 8 * 768, False, None)
cut = dict(FOLDS=tile.folds, WARPS=tile.warps, AHEAD=tile.ahead, PDL=True)
down, _ = ptx(down_kernel, tile.warps, cut | dict(CHOSEN=8, N=2048, K=768))
odd = dict(CHOSEN=3, N=328, K=200, FOLDS=2, WARPS=4, AHEAD=4, PDL=True)
odd, _ = ptx(down_kernel, 4, odd | dict(bias="pointer", SCALE=0.22))
flags = dict(BIAS=True, SELECTION_BIAS=True, SIGMOID=False, RENORMALISE=True)
routed = dict(COUNT=128, CHOSEN=8, K=2048, EPS=1e-6, PER=2, PDL=True, OFFSET=1.0)
ptx(router_kernel, 4, flags | routed, ASTSource)
scaled = dict(SCALE=2816**-0.5, expert_scales="pointer", FACTOR=1.8)
routed = dict(COUNT=128, CHOSEN=8, K=2816, EPS=1e-6, PER=2, PDL=True)
ptx(router_kernel, 4, flags | scaled | routed, ASTSource)
norms = dict.fromkeys(("FOUND", "BESIDE", "NORM"), (1e-6, 0.0, True)) | dict(residual="pointer", beside="pointer")
ptx(join_kernel, 8, norms | dict(SIZE=2816, BLOCK=4096, PDL=True, factor="pointer"), ASTSource)
prompts = norms | dict(NORM=None, residual=None, SIZE=2816, BLOCK=4096)
ptx(join_kernel, 8, prompts, ASTSource)
ptx(place_kernel, 8, dict(COUNT=128, HEIGHT=128, BLOCK=4096), ASTSource)
fits = []
for pairs, gated, n, k, limit in ((32_768, True, 768, 2048, 99), (128, False, 2048, 768, 227)):
    tile = choose_group_tile(pairs, 128)
    shape = dict(CHOSEN=8, HEIGHT=tile.height, WIDTH=tile.width, DEPTH=tile.depth, N=n, K=k, GATED=gated, GATHERS=gated)
    shape |= clamped if gated else {}
    stages = tile.stages(gated, limit * 1024)
    fits.append(ptx(group_kernel, tile.warps, shape, ASTSource, num_stages=stages)[1] <= limit * 1024)
ptx(group_kernel, 4, shape | dict(GATHERS=True, GATED=False, GATE=squared), ASTSource, num_stages=2)
early = [text[: text.index("griddepcontrol.wait;")].count("cp.async.cg") for text in (down, odd)]
print(json.dumps({
    "fits": all(fits), "early": early, "ldmatrix": sum(text.count("ldmatrix") for text in (gate, down, odd)),
    "trigger": gate.index("griddepcontrol.wait") < gate.index("griddepcontrol.launch_dependents")}))
"""


PROMPTS = """
from engine.kernels.triton.prompt_attention import STAGES, _prompt_kernel, choose_tile

TYPES |= {"span": "*i32", "table": "*i32", "k_ends": "*i32"}
found = []
for capability, kilobytes, dim in (
    (90, 227, 256), (86, 99, 256), (90, 99, 128), (90, 227, 512), (86, 99, 512), (120, 99, 512)
):
    tile = choose_tile(2 * dim, kilobytes * 1024)
    cut = dict(STRIDE=8 * dim, GROUP=2, DIM=dim, D=dim, KV_HEADS=2, BLOCK=32, QUERIES=tile.queries, TILE=tile.rows)
    asked = dict(WINDOW=512, CAP_LOG2=72.0, sinks="pointer", k_ends="pointer", table_stride="pointer")
    text, shared = ptx(_prompt_kernel, tile.warps, cut | asked, ASTSource, capability, num_stages=STAGES)
    copied = max(text.count("cp.async.cg"), text.count("cp.async.ca"))
    found.append({"shared": shared, "most": min(tile.shared(2 * dim), kilobytes * 1024), "copied": copied,
                  "products": text.count("wgmma.mma_async") + text.count("mma.sync")})
print(json.dumps(found))
"""


PACKED = """
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.execute.cuda.tiles import LANES
from engine.kernels.triton.packed_linear import packed_linear_kernel
from models.weights.formats.blocks import BLOCKS

found = []
cases = [(kind, packing, 1, 1) for kind, packing in BLOCKS.items()]
laned = [kind for kind, packing in BLOCKS.items() if packing.shared == 1]
cases += [(kind, BLOCKS[kind], LANES, (1, 2, 3, 8)[i % 4]) for i, kind in enumerate(laned)]
for kind, packing, lanes, count in cases:
    tile = KernelConfigs().product(16, 4096, 12288, False, kind)
    scales = {torch.int8: "*i8", torch.uint8: "*u8", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
    TYPES |= {"codes": "*i32", "more": "*i32", "scales": scales.get(packing.scales, "*fp16"), "supers": "*fp16"}
    constants = dict(COUNT=count, N=4096, K=12288, STRIDE=4096, EPS=1e-6, NORM=True, BIAS=False, GATED=False)
    constants |= dict(RESIDUAL=False, WARPS=tile.warps, TILES=tile.tiles, AHEAD=tile.ahead, PDL=True)
    constants |= dict(PREPARED=256, square_sums="pointer", LANES=lanes)
    constants |= dict(CODES=codes_of(kind))
    if lanes > 1 and count == 1:
        constants |= dict(NORM=False, PREPARED=0, ATTENDED=(128, 128, 5, 12288), **LEFT)
    text, shared = ptx(packed_linear_kernel, tile.warps, constants)
    before = text[: text.index("griddepcontrol.wait;")]
    loop = text[text.index("$L__BB0_1:"):]
    size = "0x10" if packing.planes[0] >= 4 else "0x8"
    sums = 8 if lanes == 1 or count > 4 else 4 if count > 2 else 2  # of x, over groups of columns
    exact = packing.planes == (8,) or packing.floats > 0
    alone = lanes > 1 and count > 4 and (packing.supers or packing.planes == (8,))
    at_once = 1 if alone else 3 if tile.ahead == 3 else 2  # spans
    found.append({
        "early": len(re.findall(r"cp\\.async\\.c[ga]\\S* \\[[^,]*, \\[[^,]*, %s," % size, before)),
        "held": tile.ahead * tile.tiles * max(2, packing.planes[0] // 2),
        "products": loop.count("mma.sync"), "shared": shared,
        "needed": at_once * (8 * tile.tiles + (sums if packing.minimum or not exact else 0)),
        "joined": len(re.findall(r"mov\\.b32\\s+%r\\d+, \\{", loop)), "spilled": ".local" in text})
print(json.dumps(found))
"""


PACKED_EXPERTS = """
from engine.execute.cuda.experts import choose_group_tile
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.kernels.triton.experts import gate_up_kernel, packed_down_kernel
from engine.kernels.triton.grouped_gemm import group_kernel
from models.weights.formats.blocks import BLOCKS

found = []
group = choose_group_tile(32_768, 128)
for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4"):
    packing = BLOCKS[Kind[kind]]
    of_scales = "*i8" if packing.supers else "*bf16" if packing.floats else "*fp16"
    TYPES |= {"codes": "*i32", "more": "*i32", "scales": of_scales, "supers": "*fp16"}
    planes = dict(CODES=codes_of(Kind[kind]))
    clamped = dict(bias="pointer", GATE=Gate("silu", 1.702, 7.0, 1.0)) if packing.floats else {}
    shape = dict(CHOSEN=4, N=2880, K=2880) if packing.floats else dict(CHOSEN=8, N=2048, K=768)
    tile = KernelConfigs().experts(shape["N"], shape["K"], shape["CHOSEN"], False, Kind[kind])
    cut = dict(WARPS=tile.warps, TILES=tile.tiles, AHEAD=tile.ahead, PDL=True)
    bias = {"bias": "pointer"} if packing.floats else {}
    text, shared = ptx(packed_down_kernel, tile.warps, planes | shape | cut | bias)
    early = text[: text.index("griddepcontrol.wait;")].count("cp.async.c")
    found.append([early > 0, shared <= 99 * 1024, ".local" in text])
    shape = dict(CHOSEN=4, N=2880, K=2880) if packing.floats else dict(CHOSEN=8, N=768, K=2048)
    tile = KernelConfigs().experts(shape["N"], shape["K"], shape["CHOSEN"], True, Kind[kind])
    cut = dict(WARPS=tile.warps, TILES=tile.tiles, AHEAD=tile.ahead, PDL=True, EPS=1e-6, FOLDS=1)
    given = planes | shape | cut | clamped | {"more": "pointer", "scales": "pointer", "supers": "pointer"}
    TYPES["weight"] = "*i32"
    text, shared = ptx(gate_up_kernel, tile.warps, given)
    early = text.index("griddepcontrol.wait") < text.index("griddepcontrol.launch")
    found.append([early, shared <= 99 * 1024, ".local" in text])
    cut = dict(HEIGHT=group.height, WIDTH=group.width, DEPTH=group.depth, GATED=True, GATHERS=True)
    given = {name: value for name, value in given.items() if name in group_kernel.arg_names} | cut
    stages = group.stages(True, 227 * 1024)
    text, shared = ptx(group_kernel, group.warps, given, ASTSource, num_stages=stages)
    found.append(["wgmma.mma_async" in text, shared <= 227 * 1024, ".local" in text])
print(json.dumps(found))
"""

WIDE = """
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.kernels.triton.wide_linear import wide_linear_kernel

found = []
for rows, outputs, inputs, gated, apart in (
    (16, 3072, 1024, True, False), (16, 4096, 4096, False, True), (32, 4096, 1024, False, False),
    (32, 3072, 1024, True, False), (64, 1024, 3072, False, True), (64, 4096, 1000, False, False),
    (32, 4096, 6144, False, True), (32, 12288, 4096, True, False), (64, 4096, 12288, False, True),
):
    tile = KernelConfigs().wide(rows, outputs, inputs, gated, apart)
    TYPES["out"] = "*fp32" if tile.split > 1 else "*bf16"
    constants = dict(COUNT=rows, ROWS=rows, N=outputs, K=inputs, BIAS=False, GATED=gated, OUTPUTS=tile.outputs)
    constants |= dict(COLUMNS=tile.columns, STAGES=tile.stages, SPLIT=tile.split, DOWN=tile.down, PDL=True)
    text, shared = ptx(wide_linear_kernel, tile.warps, constants | dict(WARPS=tile.warps))
    before = text[: text.index("griddepcontrol.wait;")]
    found.append({"early": before.count("cp.async.cg"), "shared": shared, "spilled": ".local" in text,
                  "held": tile.stages * tile.outputs * tile.columns // (8 * 32 * tile.warps),
                  "products": text.count("mma.sync"), "ldmatrix": text.count("ldmatrix"),
                  "needed": rows * tile.outputs * tile.columns // (16 * 8 * 16 * tile.warps)})
print(json.dumps(found))
"""

WARPGROUPS = """
import triton.experimental.gluon.language as gl
from engine.execute.cuda.kernel_configs import KernelConfigs
from engine.kernels.triton.warpgroup_linear import LINES, warpgroup_linear_kernel

def described(rows, columns):
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"

found = []
for rows, outputs, inputs, gated, apart in (
    (16, 4096, 12288, False, True), (32, 3072, 4096, False, False), (64, 4096, 2000, False, True),
    (64, 6144, 4096, True, False), (64, 12288, 4096, True, False), (128, 2560, 9728, False, True),
):
    tile = KernelConfigs().warpgroups(rows, outputs, inputs, gated, apart)
    TYPES.update(x=described(rows, tile.columns), weight=described(LINES.value, tile.columns))
    TYPES["out"] = "*fp32" if tile.split > 1 else "*bf16"
    constants = dict(COUNT=rows, ROWS=rows, N=outputs, K=inputs, BIAS=False, GATED=gated, COLUMNS=tile.columns)
    constants |= dict(STAGES=tile.stages, SPLIT=tile.split, PDL=True)
    text, shared = ptx(warpgroup_linear_kernel, 4, constants)
    before = text[: text.index("griddepcontrol.wait;")]
    pair = 2 if gated else 1
    found.append({"early": before.count("cp.async.bulk.tensor"), "held": tile.stages * pair, "shared": shared,
                  "most": 104 * 1024 if outputs == 12288 else 201 * 1024, "spilled": ".local" in text,
                  "products": text.count("wgmma.mma_async.sync"), "needed": pair * tile.columns // 16})
print(json.dumps(found))
"""

CONVOLUTIONS = """
from engine.kernels.triton.convolution import convolve_kernel, seen_kernel

TYPES.update(seen="*i32")
found = []
for capability in (80, 86, 89, 90, 120):
    constants = dict(SIZE=2048, WIDTH=3, MOST=4, BLOCK=256, PDL=capability >= 90, bias=None)
    found.append(ptx(convolve_kernel, 4, constants, ASTSource, capability))
    found.append(ptx(seen_kernel, 1, dict(BLOCK=256, MOST=4), ASTSource, capability))
print(json.dumps([[shared, ".local" in text] for text, shared in found]))
"""

RECURRENT_STEPS = """
from engine.kernels.triton.combine import combine_kernel, combine_parts_kernel
from engine.kernels.triton.gated_norm import gated_norm_kernel
from engine.execute.cuda.recurrence import program_values
from engine.kernels.triton.delta_rule import warp_values
from engine.kernels.triton.recurrence_step import Recurring, recur_kernel

TYPES.update(moves="*i32", states="*fp32", dt_bias="*fp32", decay="*fp32", skip="*fp32")
cases = [(capability, Recurring(16, 32, 128, 128, 4, True, eps=1e-6)) for capability in (80, 86, 90, 120)]
cases += [(90, Recurring(4, 8, 32, 64, 4, True)), (86, Recurring(1, 48, 128, 64, 4, False)),
          (90, Recurring(1, 48, 128, 64, 4, False)), (90, Recurring(8, 64, 64, 64, 4, False, most=0.1)),
          (90, Recurring(8, 64, 128, 64, 4, False, gates=False)),
          (90, Recurring(8, 128, 128, 80, 4, False, gates=False)), (90, Recurring(1, 48, 256, 64, 4, False)),
          (90, Recurring(1, 24, 256, 128, 4, False)), (86, Recurring(1, 24, 256, 128, 4, False)),
          (90, Recurring(1, 24, 128, 64, 4, False, z_factor=0.35, q_factor=0.5, v_factor=0.25, dt_factor=0.1))]
found = []
for capability, sizes in cases:
    part = program_values(sizes)
    warps = part // warp_values(sizes.keys)
    none = {"conv_bias": None, "skip": None} if sizes.is_delta else {"gates": None, "norm_weight": None}
    constants = dict(SIZES=sizes, BLOCK=32, PART=part, WARPS=warps, PDL=capability >= 90) | none
    TYPES["out"] = "*bf16" if sizes.gates else "*fp32"
    text, shared = ptx(recur_kernel, warps, constants, capability=capability)
    early = text[: text.rindex("griddepcontrol.wait;")] if capability >= 90 else text
    loads = len(re.findall(r"ld\\.global\\.v4\\.b32 |ld\\.global\\.v4\\.f32 ", early))
    wanted = sizes.keys * warp_values(sizes.keys) // 128
    found.append({"loads": loads, "wanted": wanted, "shared": shared, "spilled": ".local" in text})
shape = dict(HEADS=8, V=640, VALUES=1024, STRIDE=10304, EPS=1e-5, LINES=1, DELTA=False, FIRST=False, PDL=True)
TYPES.update(count="i32", y="*fp32", out="*bf16")
ptx(gated_norm_kernel, 4, shape, ASTSource)
TYPES.update(SHARED)
shape = dict(HQ=16, D=256, DIM=256, PADDED=16, PDL=True, gates="pointer")
ptx(combine_kernel, 4, shape | dict(CHUNK=128, DOUBLINGS=2, CHUNKS=16, sinks=None), ASTSource)
ptx(combine_parts_kernel, 4, shape | dict(MEMBERS=4, SHARES=True, BY_HEAD=True), ASTSource)
print(json.dumps(found))
"""

EXCHANGE = """
from engine.kernels.triton.all_reduce import begin_kernel, join_kernel, sum_kernel
from engine.kernels.triton.sum_norm import sum_norm_kernel

TYPES.update(peers="*i64", epoch="*i64", lost="*i32", patience="*i64", token="*i64", own_row="*i32", own_token="*i64")
TYPES.update(dict.fromkeys(("number", "rank", "COUNT", "START", "FIRST", "LAST"), "i32"), x="*fp32")
shape = dict(RANK=3, RANKS=8, ROOM=1 << 18, PARTS=1, PDL=True, CUDA=True)
texts = [ptx(sum_kernel, 8, shape | dict(BLOCK=256), ASTSource)[0]]
shape |= dict(SIZE=4096, WORDS=2048, EPS=1e-6, NORM=True, OFFSET=0.0, ONCE=False, SCALE=1.0, WARPS=16)
texts += [ptx(sum_norm_kernel, 16, shape | dict(PULL=pulls) | given)[0]
          for pulls, given in ((False, {}), (True, dict(PDL=False)))]
texts.append(ptx(begin_kernel, 1, dict(ROWS=64, RANKS=8, EXCHANGES=75, BLOCK=64, CUDA=True), ASTSource)[0])
TYPES.update(x="*i32", out="*i32")
shape = dict(RANKS=8, ROOM=1 << 20, COLUMNS=9496, TOTAL=75968, BLOCK=256, PDL=True, CUDA=True)
texts.append(ptx(join_kernel, 8, shape, ASTSource)[0])
counted = "st.relaxed.sys", "ld.volatile", "ld.relaxed.sys", ".local"
print(json.dumps([[text.count(what) for what in counted] for text in texts]))
"""


PROGRAMS = (
    DENSE,
    EXPERTS,
    PROMPTS,
    PACKED,
    PACKED_EXPERTS,
    WIDE,
    WARPGROUPS,
    CONVOLUTIONS,
    EXCHANGE,
    RECURRENT_STEPS,
)
ALL = """
import sys
known = dict(TYPES)
for program in json.load(sys.stdin):
    TYPES.clear()
    TYPES.update(known)
    exec(program)
"""


def compiled(programs: Iterable[str]) -> dict[str, Any]:
    """Return what each program prints, in a line; they run in one process, which takes seconds to start."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILER + ALL]
    ran = subprocess.run(
        command, input=json.dumps(list(programs)), capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return dict(zip(programs, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return compiled(PROGRAMS)


def test_prompts_attend_on_tensor_cores_in_the_shared_memory_there_is(made: dict[str, Any]) -> None:
    for found in made[PROMPTS]:
        assert found["shared"] <= found["most"]
        assert found["copied"] > 0, "the next tile is copied while one is multiplied"
        assert found["products"] > 0


def test_kernels_of_experts_compile_and_the_last_one_loads_early(made: dict[str, Any]) -> None:
    found = made[EXPERTS]
    assert found["early"] == [24, 8]  # a thread's copies: three spans of eight, and the only one there is
    assert found["ldmatrix"] == 0, "a thread would read what another one copied"
    assert found["trigger"], "what comes after reads the ids before it waits"
    assert found["fits"]


def test_kernels_of_packed_experts_compile_and_spill_nothing(made: dict[str, Any]) -> None:
    for early, fits, spilled in made[PACKED_EXPERTS]:
        assert early, "copies before the wait; of gate and up, what comes after only when the ids can be seen"
        assert fits
        assert not spilled


def test_convolutions_compile_for_every_gpu_and_take_no_memory(made: dict[str, Any]) -> None:
    assert made[CONVOLUTIONS] == [[0, False]] * 10


def test_recurrences_load_their_states_early_and_spill_nothing(made: dict[str, Any]) -> None:
    for found in made[RECURRENT_STEPS]:
        assert found["loads"] == found["wanted"], "four numbers at a time, before the wait"
        assert found["shared"] <= 8 * 1024
        assert not found["spilled"]


def test_what_eight_gpus_exchange_goes_to_the_memory_of_the_others(made: dict[str, Any]) -> None:
    summed, normed, pulled, begun, joined = made[EXCHANGE]
    # To each other rank one word of a thread, so that those of a warp go together; then, whether it is lost.
    assert summed == [7 + 7, 0, 7 + 7, 0]
    assert normed == [4 * 7 + 7, 0, 4 * 7 + 7, 0], "four words of a thread, looked at together"
    assert pulled == [1, 3, 0, 0], "one word says that the rows are there"
    assert begun == [2 * 7 + 2, 0, 2 + 2, 0], "two words of a thread, to each other rank or from rank 0"
    assert joined == [1 + 7, 0, 7 + 7, 0], "to rank 0, which receives from all others"


def test_quantized_weights_are_copied_early_and_become_numbers_in_few_instructions(
    made: dict[str, Any],
) -> None:
    for found in made[PACKED]:
        assert found["early"] == found["held"]
        assert found["products"] == found["needed"]
        assert found["joined"] == 0, "two numbers would have been apart on their way to the tensor core"
        assert found["shared"] <= 113 * 1024, "two programs must fit on a multiprocessor"
        assert not found["spilled"]


def test_products_of_many_rows_begin_with_their_weights(made: dict[str, Any]) -> None:
    for found in made[WIDE]:
        assert found["early"] == found["held"]
        assert found["products"] == found["needed"]
        assert found["ldmatrix"] > 0, "warps share what they read"
        assert found["shared"] <= 113 * 1024, "two programs must fit on a multiprocessor"
        assert not found["spilled"]


def test_products_of_a_group_of_warps_load_all_weights_early_that_fit(made: dict[str, Any]) -> None:
    for found in made[WARPGROUPS]:
        assert found["early"] == found["held"]
        assert found["products"] == found["needed"]
        assert found["shared"] <= found["most"]
        assert not found["spilled"]


def test_what_may_be_loaded_early_is_and_nothing_goes_another_way(made: dict[str, Any]) -> None:
    """Weights are copied 16 bytes at a time before the wait, and a thread reads what it copied."""
    found = made[DENSE]
    products, attentions = found[:12], found[12:]
    for found in products:
        assert found["early"] == found["held"]
        assert found["ldmatrix"] == 0, "a thread would read what another one copied"
        assert found["read"] >= 8 * found["tiles"] * found["spans"]
        assert found["products"] == 8 * found["folds"] * found["tiles"] * found["spans"]
    for found in attentions:
        assert found["early"] == found["held"]
        assert found["shared"] <= 113 * 1024, "two programs must fit on a multiprocessor"
