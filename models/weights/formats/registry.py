"""The formats of quantised safetensors checkpoints, by the `quant_method` that config.json names.

Torch is not imported, because inspecting a model loads nothing.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from models.errors import ModelError
from models.weights.formats import awq, compressed_tensors, fp8, gptq, mxfp4
from models.weights.formats.format import Config, Scheme, Shape, refused

SCHEMES: dict[str, Callable[[Config], Scheme]] = {
    "awq": awq.scheme,
    "gptq": gptq.scheme,
    "compressed-tensors": compressed_tensors.scheme,
    "fp8": fp8.scheme,
    "fbgemm_fp8": fp8.scheme,
    "mxfp4": mxfp4.scheme,
}
OF_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point"),
)
"""Name suffixes of tensors for rounding activations or the KV cache, which are not rounded here."""


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """Read the scheme from a config.json; None if nothing is quantised. Raises ModelError for unsupported schemes."""
    raw = config.get("quantization_config", config.get("compression_config"))
    of_mlx = config.get("quantization")  # and, in newer folders, the same as quantization_config
    if isinstance(of_mlx, dict) and "bits" in of_mlx and raw in (None, of_mlx):
        raise refused("The checkpoint is quantised by MLX (quantization in config.json)")
    if raw is None:
        return None
    method = raw.get("quant_method") if isinstance(raw, dict) else None
    scheme = SCHEMES.get(method) if isinstance(method, str) else None
    if scheme is None:
        named = f" by {method[:40]}" if isinstance(method, str) else ""
        raise refused(f"The checkpoint is quantised{named} (quantization_config in config.json)")
    return scheme(Config(raw))


def stored_types(shapes: Mapping[str, tuple[str, Shape]], scheme: Scheme) -> dict[str, tuple[str, int]]:
    """Return the type of each weight and its count of numbers, by name; scales and the like are left out.

    `shapes` has type and shape of the tensors.
    """
    found: dict[str, tuple[str, int]] = {}
    parts = set[str]()
    for name, (kind, _) in shapes.items():
        if (form := scheme.format_of(name, kind)) is None:
            continue
        stem = name.removesuffix(form.digits)
        try:
            named = form.tensors(stem, shapes)
        except ModelError:
            continue
        found[stem + form.becomes] = form.count({part: shapes[name][1] for part, name in named.items()})
        parts |= set(named.values())
    rest = {
        name: (kind, prod(shape))
        for name, (kind, shape) in shapes.items()
        if name not in parts and not name.endswith(OF_ACTIVATIONS)
    }
    return rest | found
