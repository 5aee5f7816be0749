"""The transports among the ranks of a Gloo group, by name: tests of rows hold for all of them."""

import torch.distributed as dist

from commpress.collectives.transports.factory import socket_transport
from commpress.collectives.transports.torch import TorchTransport

# our own connections; torch's collectives; these, with headers over our own connections, as NCCL's
WAYS = ("sockets", "collectives", "device")


class OnTwin(TorchTransport):
    """The processor stands for a device."""

    def takes(self, tensor):
        return True


def transport_by(way, timeout, group=None):
    sockets = socket_transport(group, timeout=timeout) if way != "collectives" else None
    if way == "sockets":
        return sockets
    kind = OnTwin if way == "device" else TorchTransport
    return kind(group or dist.group.WORLD, timeout=timeout, control=sockets)
