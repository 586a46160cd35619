"""How quantised safetensors checkpoints are stored: `quantization_config` of config.json, and every layout, as data.

Only the config is read and torch is not imported, because inspecting a model loads nothing.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from models.errors import ModelError

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of tensors, by name."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors that make up a matrix: NAME + `digits` and the tensors beside it become NAME + `becomes`."""

    name: str
    """For display."""
    digits: str
    """The name suffix of the tensor of digits."""
    type: str
    """The type of the digits, as safetensors calls it."""
    needs: tuple[tuple[str, ...], ...]
    """The tensors that must be beside it, in the order in which they are read; each has one of these suffixes."""
    may: tuple[str, ...] = ()
    """The suffixes of optional tensors."""
    becomes: str = ".weight"


AWQ = Layout("AWQ", ".qweight", "I32", ((".scales",), (".qzeros",)))
GPTQ = Layout("GPTQ", ".qweight", "I32", ((".scales",), (".qzeros",)), (".g_idx",))
PACKED = Layout(
    "packed integers",
    ".weight_packed",
    "I32",
    ((".weight_scale",), (".weight_shape",)),
    (".weight_zero_point", ".weight_g_idx"),
)
INT8 = Layout("int8", ".weight", "I8", ((".weight_scale",),), (".weight_zero_point",))
FP8 = Layout("fp8", ".weight", "F8_E4M3", ((".weight_scale_inv", ".weight_scale"),))
MXFP4 = Layout("MXFP4", "_blocks", "U8", (("_scales",),), becomes="")

OF_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)
"""Name suffixes of tensors for rounding activations or the KV cache, which are not rounded here."""
PACKED_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of a checkpoint are stored."""

    name: str
    """For display: "GPTQ, 4 bits, groups of 128"."""
    layouts: tuple[Layout, ...]
    held: str | None
    """The blocks in which native CPU kernels take such matrices; None: they are expanded on a CPU."""
    why: str = ""
    """Why they are expanded, for display."""
    group: int | None = None
    """Number of columns with a common scale, if the tensors do not show it; None: the whole row."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns with a common scale, for scales that belong to neither a row nor a group."""
    zero_offset: int = 0
    """The amount that was subtracted from the stored zero points."""
    activations: str | None = None
    """The type to which the checkpoint expects activations to be rounded; None: it expects no rounding."""

    @property
    def note(self) -> str | None:
        """Return a line for the user about what is computed otherwise than the checkpoint asks for, or None."""
        if self.activations is None:
            return None
        return f"The checkpoint was made for activations in {self.activations}; here only its weights are quantised."


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Read the scheme from a config.json; None if nothing is quantised. Raises ModelError for unsupported schemes."""
    raw = config.get("quantization_config", config.get("compression_config"))
    of_mlx = config.get("quantization")  # and, in newer folders, the same as quantization_config
    if isinstance(of_mlx, dict) and "bits" in of_mlx and raw in (None, of_mlx):
        raise _refused("The checkpoint is quantised by MLX (quantization in config.json)")
    if raw is None:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        named = f" by {method[:40]}" if isinstance(method, str) else ""
        raise _refused(f"The checkpoint is quantised{named} (quantization_config in config.json)")
    return reader(raw)


def _refused(what: str) -> ModelError:
    return ModelError(
        f"{what}, which chatterm does not read; use the original checkpoint, a GGUF file, or one quantised "
        "with AWQ, GPTQ, compressed-tensors, fp8 or MXFP4."
    )


def _integer(raw: Mapping[str, Any], key: str, default: int) -> int:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(
            f"quantization_config has {key} {str(value)[:40]!r}, which is not a number; correct config.json."
        )
    return value


def _groups(size: int | None) -> str:
    return "one scale per row" if size is None else f"groups of {size}"


def _int_held(bits: int, symmetric: bool, group: int | None) -> tuple[str | None, str]:
    """Return the blocks for integers, or None and the reason why there are none."""
    if group is not None and group % 32:
        return None, f"groups of {group} numbers are not whole blocks of 32"
    if bits == 8 and not symmetric:
        return None, "there are no blocks of asymmetric 8-bit numbers"
    return ("Q8_0" if bits == 8 else "Q4_0" if symmetric else "Q4_1"), ""


def _awq(raw: Mapping[str, Any]) -> Scheme:
    bits, group = _integer(raw, "bits", _integer(raw, "w_bit", 4)), _group(raw)
    version = str(raw.get("version", raw.get("format", "gemm"))).lower()
    if version != "gemm":
        raise _refused(f"The checkpoint is quantised by AWQ in the layout {version[:40]}")
    if bits != 4:
        raise _refused(f"The checkpoint is quantised by AWQ to {bits} bits")
    symmetric = raw.get("zero_point") is False
    layout = replace(AWQ, needs=AWQ.needs[:1], may=AWQ.needs[1]) if symmetric else AWQ
    held, why = _int_held(4, symmetric, group)
    return Scheme(f"AWQ, 4 bits, {_groups(group)}", (layout,), held, why, group)


def _gptq(raw: Mapping[str, Any]) -> Scheme:
    bits, group = _integer(raw, "bits", 4), _group(raw)
    stored = str(raw.get("checkpoint_format") or raw.get("format") or "gptq").lower()
    if raw.get("is_marlin_format") or stored not in ("gptq", "gptq_v2"):
        raise _refused(f"The checkpoint is quantised by GPTQ in the layout {stored[:40]}")
    if bits not in PACKED_BITS:
        raise _refused(f"The checkpoint is quantised by GPTQ to {bits} bits")
    held, why = _int_held(bits, raw.get("sym", True) is not False, group)
    order = ""
    # Static groups follow the order of the columns, whatever the order in which the columns were quantised.
    if raw.get("desc_act") and not raw.get("static_groups"):
        held, why, order = None, "its groups are spread over the columns (act-order)", ", act-order"
    name = f"GPTQ, {bits} bits, {_groups(group)}{order}"
    return Scheme(name, (GPTQ,), held, why, group, zero_offset=0 if stored == "gptq_v2" else 1)


def _group(raw: Mapping[str, Any]) -> int | None:
    size = _integer(raw, "group_size", _integer(raw, "q_group_size", 128))
    if size == 0 or size < -1:
        raise ModelError(f"quantization_config has a group_size of {size}; correct config.json.")
    return None if size == -1 else size


def _compressed(raw: Mapping[str, Any]) -> Scheme:
    stored = str(raw.get("format", "dense"))
    sparse = raw.get("sparsity_config")
    sparse = str(sparse.get("format", "dense")) if isinstance(sparse, dict) else "dense"
    if stored not in _FORMATS or sparse != "dense":
        named = stored if sparse == "dense" else sparse
        raise _refused(f"The checkpoint is compressed as {named[:40]}")
    if raw.get("transform_config"):
        raise _refused("The checkpoint rotates its weights (transform_config)")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict):
        raise ModelError("quantization_config has no config_groups; download config.json again.")
    found = [scheme for group in groups.values() if (scheme := _compressed_group(group)) is not None]
    if not found:
        raise ModelError("quantization_config does not say how weights are quantised; correct config.json.")
    held = {scheme.held for scheme in found}
    return replace(
        found[0],
        name="; ".join(dict.fromkeys(scheme.name for scheme in found)),
        group=found[0].group if len({scheme.group for scheme in found}) == 1 else None,
        held=None if None in held else " and ".join(sorted(map(str, held))),
        why=next((scheme.why for scheme in found if scheme.why), ""),
        block=next((s.block for s in found if s.block != (128, 128)), (128, 128)),
        activations=next((s.activations for s in found if s.activations is not None), None),
    )


def _compressed_group(group: object) -> Scheme | None:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        return None
    bits, kind = _integer(weights, "num_bits", 8), str(weights.get("type", "int"))
    strategy = str(weights.get("strategy", "tensor"))
    size = _integer(weights, "group_size", -1) if kind == "int" and strategy == "group" else None
    if kind == "float" and bits == 8 and str(group.get("format", "float-quantized")) in _FORMATS:
        name, held, why = f"compressed-tensors, fp8, {_strategy(weights)}", None, _NO_FP8
    elif kind == "int" and bits in PACKED_BITS:
        held, why = _int_held(bits, weights.get("symmetric", True) is not False, size)
        name = f"compressed-tensors, int{bits}, {_strategy(weights)}"
        if weights.get("actorder") in ("group", True):
            held, why = None, "its groups are spread over the columns (act-order)"
            name += ", act-order"
    else:
        raise _refused(f"The checkpoint has weights of {bits}-bit {kind[:20]} numbers")
    return Scheme(
        name,
        (PACKED, INT8, FP8),
        held,
        why,
        size,
        block=_block(weights.get("block_structure")),
        activations=_activations(group.get("input_activations")),
    )


def _strategy(weights: Mapping[str, Any]) -> str:
    strategy = str(weights.get("strategy", "tensor"))
    if strategy == "group":
        return _groups(_integer(weights, "group_size", -1))
    if strategy == "block":
        rows, columns = _block(weights.get("block_structure"))
        return f"blocks of {rows}x{columns}"
    if strategy not in ("tensor", "channel"):
        raise _refused(f"The checkpoint has scales by {strategy[:40]}")
    return _groups(None) if strategy == "channel" else "one scale per tensor"


def _activations(raw: object) -> str | None:
    if not isinstance(raw, dict):
        return None
    bits = _integer(raw, "num_bits", 8)
    return f"{'fp' if raw.get('type') == 'float' else 'int'}{bits}"


def _block(raw: object) -> tuple[int, int]:
    if raw is None:
        return 128, 128
    sizes = raw.split("x") if isinstance(raw, str) else raw
    try:
        rows, columns = (int(size) for size in sizes)  # type: ignore[attr-defined]
        if rows > 0 and columns > 0:
            return rows, columns
    except (TypeError, ValueError, OverflowError):
        pass
    raise ModelError(f"quantization_config has blocks of {str(raw)[:40]}; correct config.json.")


def _fp8(raw: Mapping[str, Any]) -> Scheme:
    fmt = str(raw.get("fmt", "e4m3")).lower()
    if fmt not in ("e4m3", "float8_e4m3fn") or raw.get("expert_dtype", "fp8") != "fp8":
        raise _refused(f"The checkpoint is quantised to fp8 as {fmt[:40]}")
    size = raw.get("weight_block_size")
    block = _block(size)
    scales = f"blocks of {block[0]}x{block[1]}" if size is not None else "one scale per row or tensor"
    name = f"fp8, {scales}"
    return Scheme(name, (FP8,), None, _NO_FP8, block=block, activations="fp8")


def _mxfp4(_: Mapping[str, Any]) -> Scheme:
    return Scheme("MXFP4", (MXFP4,), "MXFP4")


_NO_FP8 = "native kernels have no fp8"
_FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "mixed-precision",
)
_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
}


def find_layout(name: str, kind: str, scheme: Scheme) -> Layout | None:
    """Return the layout in which a tensor holds the digits, or None."""
    return next((x for x in scheme.layouts if x.type == kind and name.endswith(x.digits)), None)


def beside(stem: str, layout: Layout, names: Iterable[str]) -> dict[str, str]:
    """Return the tensors beside the digits of NAME: from the layout's first suffix to the tensor's name.

    Raises ModelError if a required one is missing.
    """
    names, found = set(names), {}
    for ways in layout.needs:
        name = next((stem + way for way in ways if stem + way in names), None)
        if name is None:
            raise ModelError(
                f"{stem}{layout.digits} has no {stem}{ways[-1]} beside it; the checkpoint is incomplete: "
                "download it again."
            )
        found[ways[0]] = name
    return found | {way: stem + way for way in layout.may if stem + way in names}


def stored_types(shapes: Shapes, scheme: Scheme) -> dict[str, tuple[str, int]]:
    """Return the type of each weight and its count of numbers, by name; scales and the like are left out."""
    found: dict[str, tuple[str, int]] = {}
    parts = set[str]()
    for name, (kind, shape) in shapes.items():
        if (layout := find_layout(name, kind, scheme)) is None:
            continue
        stem = name.removesuffix(layout.digits)
        try:
            named = beside(stem, layout, shapes)
        except ModelError:
            continue
        count = math.prod(shape)
        if layout is MXFP4:
            label, count = "MXFP4", 2 * count
        elif layout.type == "I32":
            rows, scales = shape, shapes[named[layout.needs[0][0]]][1]
            zeros = shapes[named[".qzeros"]][1] if ".qzeros" in named else None
            bits = 8 if zeros is not None and zeros[-1:] and zeros[-1] * 4 == math.prod(scales[-1:]) else 4
            if layout is PACKED:
                bits = 8 if "int8" in scheme.name and "int4" not in scheme.name else 4
                width = scheme.group or 0
                if width > 0 and len(scales) == len(rows) == 2:  # some may be of 4 bits and others of 8
                    bits = 8 if rows[1] * 4 >= scales[1] * width else 4
            label, count = f"INT{bits}", math.prod(rows) * 32 // bits
        else:
            label = {"I8": "INT8", "F8_E4M3": "FP8"}[layout.type]
        found[stem + layout.becomes] = label, count
        parts |= {name, *named.values()}
    rest = {
        name: (kind, math.prod(shape))
        for name, (kind, shape) in shapes.items()
        if name not in parts and not name.endswith(OF_ACTIVATIONS)
    }
    return rest | found
