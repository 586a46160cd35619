"""`chatterm show`: what a model is and how it would run on this machine, without loading its weights."""

from contextlib import suppress
from typing import TYPE_CHECKING

from chatterm.cli.models import place as place_of
from chatterm.conversation.figures import rate_text
from chatterm.terminal.sanitize import one_line
from models.errors import ModelError
from models.families.registry import FAMILIES
from models.features import features
from models.files import ModelFiles
from models.hub.download import HubModel
from models.hub.inspect import ModelFacts, describe, describe_on_hub
from models.hub.sources import hidden_folder, parse, resolve
from models.spec import LatentAttention, ModelSpec
from models.units import bytes_text, counted
from models.weights.formats.format import Scheme

if TYPE_CHECKING:
    from engine.machine.expected import Here, Speed


def show(model: str | None, device: str = "auto") -> None:
    """Print what `model` is and how it would run on `device`; if it is None, print the supported architectures.

    Raises ModelError if there is no such model or the Hub cannot be reached.
    """
    if model is None:
        _show_supported()
        return
    facts, where, files = _facts(model)
    context = counted(facts.context_length, "token") if facts.context_length else "unknown"
    template = {True: "yes", False: "no: it completes text", None: "not known before it is downloaded"}
    rows = [
        ("Model", facts.name),
        ("Architecture", facts.architecture),
        ("Runs here", "yes" if facts.supported else f"no: {facts.reason}"),
        *(_how_it_runs(facts, facts.spec, files, device) if facts.spec is not None else ()),
        ("Parameters", f"{facts.parameters / 1e6:,.1f} million" if facts.parameters else "unknown"),
        ("Context", context),
        ("Weights", facts.dtype or "unknown"),
        *(quantized(facts.scheme) if facts.scheme is not None else ()),
        ("Chat template", template[facts.has_chat_template]),
        ("Path", where),
        ("Files", f"{len(facts.files)}, {bytes_text(sum(size for _, size in facts.files))}"),
    ]
    rows += [("", f"{name}, {bytes_text(size)}") for name, size in facts.files]
    if note := hidden_folder(model):
        rows.append(("Note", note))
    for label, value in rows:
        print(f"{label:<13}  {one_line(value, 1000)}")


def _show_supported() -> None:
    """Print the names of all supported architectures, in config.json and in GGUF files."""
    rows = [("Supported architectures in config.json", "in GGUF files")]
    for family in FAMILIES:
        names, gguf = ", ".join(family.architectures), family.gguf_architecture or ""
        if not names:  # another kind of GGUF file of the family before it
            names, other = rows.pop()
            gguf = f"{other}, {gguf}"
        rows.append((names, gguf))
    width = max(len(names) for names, _ in rows)
    for names, gguf in rows:
        print(f"{names:<{width}}  {gguf}".rstrip())


def _facts(model: str) -> tuple[ModelFacts, str, ModelFiles | None]:
    """Return the facts about a model, the text of its location, and its files if they are on this machine."""
    try:
        files = resolve(model, offline=True)
    except ModelError:
        source = parse(model)
        if not isinstance(source, HubModel):
            raise
        where = f"on the Hub; to download it: chatterm pull {model.strip()}"
        return describe_on_hub(source, model.strip()), where, None
    return describe(files), place_of(files), files


def _how_it_runs(
    facts: ModelFacts, spec: ModelSpec, files: ModelFiles | None, device: str
) -> list[tuple[str, str]]:
    unusual = sorted(feature.value for feature in features(spec))
    return [
        ("Features", ", ".join(unusual) or "nothing unusual"),
        *computed_by(spec, facts.is_quantized),
        *_expected(facts, spec, files, device),
    ]


def quantized(scheme: Scheme) -> list[tuple[str, str]]:
    """Return rows (label, text) on how a checkpoint is quantised, and in which form its weights are held in memory."""
    if scheme.held is not None:
        held = f"as {scheme.held} on a CPU, and on a GPU if the fused kernels support the model"
    else:
        held = f"in 16 bits ({scheme.why})"
    return [("Quantised", scheme.name), ("Held", held if scheme.note is None else f"{held}. {scheme.note}")]


def computed_by(spec: ModelSpec, quantized: bool = False) -> list[tuple[str, str]]:
    """Return rows (label, text) on which kernels run such a network on this CPU and on a GPU."""
    from engine.execute.compatibility import by_torch, not_fused, not_native
    from engine.execute.cpu import products
    from engine.kernels import on_gpu
    from engine.kernels.native.library import problem

    no_native, no_fused = not_native(spec) or problem(), not_fused(spec) or on_gpu.problem_here()
    return [
        (
            "On the CPU",
            by_torch(no_native, quantized and products.problem() is None) if no_native else "native kernels",
        ),
        ("On a GPU", by_torch(no_fused) if no_fused else "fused kernels"),
    ]


def _speed(facts: ModelFacts, spec: ModelSpec, files: ModelFiles | None, here: "Here") -> "Speed":
    """Return the expected speed, from the shape alone for files that are not on this machine or are damaged."""
    from engine.machine.expected import local_speed, speed_here
    from engine.params import LoadOptions

    if files is not None:
        with suppress(ModelError):
            return local_speed(files, here, LoadOptions())
    in_blocks = facts.is_quantized or any(name.endswith(".gguf") for name, _ in facts.files)
    return speed_here(facts.name, spec, here, sum(size for _, size in facts.files) if in_blocks else None)


def _expected(
    facts: ModelFacts, spec: ModelSpec, files: ModelFiles | None, device: str
) -> list[tuple[str, str]]:
    """Return rows (label, text) with the memory and the speed to expect on the device where the model would run."""
    from engine.machine.expected import CONVERSATION, needed_kv
    from engine.machine.report import look_here

    here = look_here(device, "auto")
    if here is None:
        return []
    found = _speed(facts, spec, files, here)
    tokens = min(CONVERSATION, spec.max_positions)
    conversation = bytes_text(found.memory_bytes - found.weight_bytes)
    room = "" if found.fits else f"; too much for this machine, which has {bytes_text(here.free or 0)} free"
    place = "GPU" if here.device.type == "cuda" and not found.on_cpu else "CPU"
    speed = f"about {rate_text(found.tokens_per_s)} on this {place}" if found.tokens_per_s else "unknown"
    if not found.fits:
        speed = "none: it does not fit"
    elif found.on_cpu:
        speed += f"; the GPU has no room for it, {bytes_text(here.free or 0)} are free there"
    weights = bytes_text(found.weight_bytes)
    fewer = bytes_text(needed_kv(spec, here, "fp8").conversation_bytes(tokens))
    memory = (
        f"weights {weights}, {conversation} more for a conversation of {counted(tokens, 'token')}"
        f" ({fewer} with --kv-dtype fp8 or int8){room}"
    )
    rows = [("Memory", memory), *_latents(spec, needed_kv(spec, here, "auto").token_bytes)]
    if found.fits and place == "GPU":
        rows.append(("KV cache", kv_cache(found)))
    if not found.host_layers:
        return [*rows, ("Speed", speed)]
    experts = (
        f"those of {found.host_layers} of {len(spec.layers)} layers in host memory ({bytes_text(found.host_bytes)}), "
        "computed on the CPU; for long prompts they are copied to the GPU"
    )
    return [*rows, ("Experts", experts), ("Speed", "not known before it is loaded")]


def _latents(spec: ModelSpec, nbytes: int) -> list[tuple[str, str]]:
    """Return a row (label, text) on the `nbytes` bytes that latent attention keeps of a token, if there is any."""
    sizes = [layer.mixer.row_size for layer in spec.layers if isinstance(layer.mixer, LatentAttention)]
    if not sizes:
        return []
    kept = f"{sizes[0]} numbers in each of {len(sizes)} layers, in place of keys and values"
    return [("KV per token", f"{bytes_text(nbytes)}: {kept}")]


def kv_cache(speed: "Speed") -> str:
    """Return a text for people: the size of the KV cache of a chat on a GPU, and its share of the memory."""
    share = f"{speed.kv_share:.0%} of the memory beside the weights"
    return (
        f"{bytes_text(speed.kv_bytes)}, {share}: a context of {counted(speed.context, 'token')} and room for branches;"
        " a smaller --context takes less"
    )
