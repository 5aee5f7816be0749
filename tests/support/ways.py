"""The transports among the ranks of a Gloo group, by name: tests of rows hold for all of them."""

import torch.distributed as dist

from commpress.collectives.transports.factory import socket_transport
from commpress.collectives.transports.torch import TorchTransport

WAYS = ("sockets", "collectives")  # our own connections; torch's collectives


def transport_by(way, timeout, group=None):
    if way == "sockets":
        return socket_transport(group, timeout=timeout)
    return TorchTransport(group or dist.group.WORLD, timeout=timeout)
