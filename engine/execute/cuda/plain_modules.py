"""Plain modules on any device: the way out wherever our kernels do not compute a network."""

from models.network import Network
from models.reference.decoder import Decoder, HostMixture
from models.reference.peers import Peers


def plain_modules(
    network: Network, on_host: HostMixture | None = None, peers: Peers | None = None
) -> Decoder:
    """Return `network` as plain modules. Weights in planes on a GPU are expanded by a kernel, a matrix at a time.

    `on_host` and `peers` are those of `models.reference.decoder.Decoder`.
    """
    if not network.is_packed or network.device.type == "cpu":
        return Decoder(network, on_host=on_host, peers=peers)
    from engine.execute.cuda.packed import packed_embedding, packed_product

    return Decoder(network, packed_product, on_host, packed_embedding, peers)
