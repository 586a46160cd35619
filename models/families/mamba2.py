"""Mamba-2 layers as most configs describe them, and the names of their tensors."""

from math import inf

from models.errors import ModelError
from models.families.family import GGUFConfig
from models.families.fields import Fields
from models.recurrences import Mamba2
from models.spec import Norm

MAMBA2_NAMES = {
    "ssm_in": "mamba.in_proj",
    "filters": "mamba.conv1d",
    "dt_bias": "mamba.dt_bias",
    "decay": "mamba.A_log",
    "skip": "mamba.D",
    "gated_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
MAMBA2_GGUF_NAMES = {
    "ssm_in": "ssm_in",
    "filters": "ssm_conv1d",
    "dt_bias": "ssm_dt.bias",
    "decay": "ssm_a",
    "skip": "ssm_d",
    "gated_norm": "ssm_norm",
    "ssm_out": "ssm_out",
}
MAMBA2_CHANGES = {"decay": lambda stored: -stored.exp()}
"""Checkpoints store the logarithms of what multiplies the steps."""


def mamba2_from_hf(fields: Fields, size: int) -> Mamba2:
    """Return the Mamba-2 layers of a config.json, whose heads together have `size` numbers. Raises ModelError."""
    heads = fields.integer("mamba_n_heads", 128)
    is_auto = fields.raw.get("mamba_d_head", "auto") == "auto"
    dim = size // heads if is_auto else fields.integer("mamba_d_head")
    if heads * dim != size:
        raise ModelError(
            f"mamba_n_heads and mamba_d_head in {fields.where} make {heads} heads of {dim} numbers, not {size}; the "
            "config is damaged: download it again."
        )
    bias = fields.flag("mamba_proj_bias")
    return checked(
        Mamba2(
            heads,
            dim,
            fields.integer("mamba_d_state", 256),
            fields.integer("mamba_n_groups", 1),
            fields.integer("mamba_d_conv", 4, limit=1024),
            fields.flag("mamba_conv_bias", True),
            in_bias=bias,
            out_bias=bias,
            step_limits=_limits(fields),
            norm_eps=fields.number("rms_norm_eps", 1e-5),
        )
    )


def mamba2_from_gguf(config: GGUFConfig, name: str, norm: Norm, least: float = 0.0) -> Mamba2:
    """Return the Mamba-2 layers of a GGUF file, whose steps are at least `least`. Raises ModelError."""
    fields = config.fields
    heads, size = (fields.integer(f"{name}.ssm.{key}") for key in ("time_step_rank", "inner_size"))
    if size % heads:
        raise ModelError(
            f"{name}.ssm.inner_size in {fields.where} is {size}, which {heads} heads do not divide."
        )

    def is_there(end: str) -> bool:
        return any(tensor.endswith(end) for tensor in config.tensors)

    return checked(
        Mamba2(
            heads,
            size // heads,
            fields.integer(f"{name}.ssm.state_size"),
            fields.integer(f"{name}.ssm.group_count", 1),
            fields.integer(f"{name}.ssm.conv_kernel", limit=1024),
            is_there(".ssm_conv1d.bias"),
            in_bias=is_there(".ssm_in.bias"),
            out_bias=is_there(".ssm_out.bias"),
            step_limits=(least, inf),
            norm_eps=norm.eps,
        )
    )


def checked(mixer: Mamba2) -> Mamba2:
    """Return `mixer`. Raises ModelError if its groups do not divide its heads."""
    if mixer.heads % mixer.groups:
        raise ModelError(
            f"The config divides {mixer.heads} Mamba heads into {mixer.groups} groups; it is damaged: download it "
            "again."
        )
    return mixer


def _limits(fields: Fields) -> tuple[float, float]:
    """Return time_step_limit: the least and the greatest step, which may be infinite."""
    value = fields.raw.get("time_step_limit")
    if value is None:
        return 0.0, inf
    listed = value if isinstance(value, list) else []
    found = [inf if each == {"__float__": "Infinity"} else each for each in listed]
    if len(found) != 2 or not all(type(each) in (int, float) and each >= 0 for each in found):
        raise ModelError(f"time_step_limit in {fields.where} is {str(value)[:60]!r}; it must be two numbers.")
    return float(found[0]), float(found[1])
