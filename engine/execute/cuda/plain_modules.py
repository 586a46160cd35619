"""Plain PyTorch modules on any device, for networks that our kernels do not compute there."""

from models.network import Network
from models.reference.collective import Collective
from models.reference.decoder import Decoder, HostMixture


def plain_modules(
    network: Network, on_host: HostMixture | None = None, peers: Collective | None = None
) -> Decoder:
    """Return `network` as plain modules. Weights in planes on a GPU are expanded by a kernel, one matrix at a time.

    `on_host` and `peers` are as in `models.reference.decoder.Decoder`.
    """
    if not network.is_packed or network.device.type == "cpu":
        return Decoder(network, on_host=on_host, peers=peers)
    from engine.execute.cuda.packed import packed_embedding, packed_product

    return Decoder(network, packed_product, on_host, packed_embedding, peers)
