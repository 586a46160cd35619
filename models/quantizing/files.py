"""Write calibrated weights: a GGUF file made from another, or a folder in the layout of compressed-tensors."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.errors import ModelError
from models.files import read_json
from models.hub.download import PICKLE_SUFFIXES
from models.hub.manifest import MANIFEST
from models.network import Weight
from models.quantizing.fit import BLOCK
from models.weights.block_formats import Kind
from models.weights.checkpoint import FLOATS, read_safetensors
from models.weights.formats.blocks import BLOCKS
from models.weights.gguf import read_gguf
from models.weights.gguf_tensors import row_order

_LEFT_OUT = (".safetensors", ".gguf", *PICKLE_SUFFIXES, MANIFEST)
"""The suffixes of files that are not copied: weights in other forms, and files that are written anew."""


def check_one_to_one(names: set[str], held: Mapping[str, object]) -> None:
    """Raise ModelError unless every matrix is stored as a tensor of its own."""
    if packed := sorted(name for name in held if name not in names):
        raise ModelError(
            f"In this checkpoint {packed[0]} shares a tensor with others, is transposed or has another name; such "
            "models cannot be written yet. chatterm run --quantize int4 quantises them while they are read."
        )


def write_gguf(source: Path, out: Path, held: Mapping[str, Weight], interleaved: Mapping[str, int]) -> None:
    """Write the file `source` with these matrices in blocks and everything else unchanged. `interleaved` has the head
    size of tensors whose rows interleave the halves of heads. Raises OSError."""
    import gguf

    file = read_gguf(source)
    reader: Any = gguf.GGUFReader(file.path)  # of several parts, the first one has the description
    field = reader.fields["general.architecture"]
    writer: Any = gguf.GGUFWriter(out, arch=str(field.contents()))
    for key in reader.fields.values():
        if key.name.startswith(("GGUF.", "split.")) or key.name == "general.architecture":
            continue
        if key.name == "general.file_type":
            writer.add_uint32(key.name, int(gguf.LlamaFileType.MOSTLY_Q4_1))
            continue
        if key.name == "general.alignment":
            writer.add_custom_alignment(int(key.contents()))
            continue
        kind = key.types[0]
        if kind == gguf.GGUFValueType.ARRAY and not len(key.data):
            continue  # the package refuses to write empty arrays
        inner = key.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key.name, key.contents(), kind, sub_type=inner)
    if "general.quantization_version" not in reader.fields:
        writer.add_uint32("general.quantization_version", 2)
    for name, tensor in file.tensors.items():
        if name in held:
            data = held[name].data.numpy()
            if name in interleaved and (order := row_order(len(data), interleaved[name])) is not None:
                stored = np.empty_like(data)
                stored[order] = data
                data = stored
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(held[name].format))
        else:
            kind = gguf.GGMLQuantizationType(tensor.kind)
            numbers = {Kind.F32: np.float32, Kind.F16: np.float16}.get(tensor.kind)
            if numbers is not None:
                writer.add_tensor(name, np.ascontiguousarray(tensor.data).view(numbers).reshape(tensor.shape))
            else:
                rows = np.ascontiguousarray(tensor.data).reshape(*tensor.shape[:-1], -1)
                writer.add_tensor(name, rows, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def write_folder(source: Path, out: Path, held: Mapping[str, Weight]) -> None:
    """Write a folder like `source` with these matrices packed; `out` must be an empty folder. Raises OSError."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for stored in read_safetensors(source):
        if stored.name in held:
            stem = stored.name.removesuffix(".weight")
            tensors |= {f"{stem}.{part}": tensor for part, tensor in _packed(held[stored.name]).items()}
        else:
            tensors[stored.name] = torch.empty(stored.shape, dtype=FLOATS[stored.type])
            stored.copy_into(tensors[stored.name])
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith("model") and not path.name.endswith(_LEFT_OUT):
            shutil.copyfile(path, out / path.name)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = read_json(source / "config.json") | {"quantization_config": _config(held)}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.copymode(
        out / "config.json", out / "model.safetensors"
    )  # which safetensors writes for its owner alone


def _packed(held: Weight) -> dict[str, Tensor]:
    """Return the tensors of a matrix as compressed-tensors packs them."""
    blocks = held.data.view(held.rows, -1, held.format.block_bytes)
    codes, values, _ = BLOCKS[held.format].fields(blocks)
    scales, *lows = (value.flatten(1).half() for value in values)
    bits = 8 if held.format == Kind.Q8_0 else 4
    # The range of bytes is shifted from -128..127 to 0..255.
    digits = (codes ^ 0x80 if bits == 8 else codes).reshape(held.rows, -1)
    found = {
        "weight_packed": _words(digits, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(digits.shape),
    }
    for low in lows:
        divisor = torch.where(scales == 0, 1.0, scales.float())
        zeros = (-low.float() / divisor).round().clamp(0, 15).to(torch.uint8)
        found["weight_zero_point"] = _words(zeros.T, 4).T.contiguous()
    return found


def _words(digits: Tensor, bits: int) -> Tensor:
    """Pack digits uint8 [n, m] into words int32 [n, ceil(m * bits / 32)], the first digit lowest."""
    digits = torch.nn.functional.pad(digits, (0, -digits.shape[1] % (32 // bits)))
    if bits == 4:
        digits = digits[:, ::2] | digits[:, 1::2] << 4
    return digits.contiguous().view(torch.int32)


def _config(held: Mapping[str, Weight]) -> dict[str, Any]:
    """Return the quantization_config."""

    def group(kind: Kind, bits: int) -> dict[str, Any]:
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": bits == 8,
            "strategy": "group",
            "group_size": BLOCK,
            "dynamic": False,
        }
        targets = sorted(name.removesuffix(".weight") for name, one in held.items() if one.format == kind)
        return {"targets": targets, "weights": weights, "input_activations": None, "format": "pack-quantized"}

    groups = [group(kind, bits) for kind, bits in ((Kind.Q4_1, 4), (Kind.Q8_0, 8))]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{i}": each for i, each in enumerate(groups) if each["targets"]},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }
