"""The transports among the ranks of a Gloo group, by name: tests of rows hold for all of them."""

import torch.distributed as dist

from commpress.collectives.transports.factory import socket_transport
from commpress.collectives.transports.torch import TorchTransport

# our own connections; Gloo point to point; torch's collectives
WAYS = ("sockets", "messages", "collectives")


def transport_by(way, timeout, group=None):
    if way == "sockets":
        return socket_transport(group, timeout=timeout)
    transport = TorchTransport(
        group or dist.group.WORLD, timeout=timeout, point_to_point=way == "messages"
    )
    assert transport.ordered == (way == "collectives")
    return transport
