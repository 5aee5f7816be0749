"""Collective algorithms: averaging and exchanging tensors over ranks."""

from typing import TYPE_CHECKING

from commpress.lazy import lazily

if TYPE_CHECKING:
    from commpress.collectives.all_gather_mean import GatherMean
    from commpress.collectives.all_to_all.all_to_all import compressed_all_to_all
    from commpress.collectives.allreduce import Outcome, Workspace, compressed_allreduce
    from commpress.collectives.change import Change
    from commpress.collectives.channel import Channel
    from commpress.collectives.exchange import Exchange, Exchanges, Reduce, ReduceInLevels, Round
    from commpress.collectives.measured_links import Links, load_links
    from commpress.collectives.reduce_scatter import Scatter
    from commpress.collectives.topology import Topology
    from commpress.collectives.transports.factory import own_transport
    from commpress.collectives.transports.loopback import Loopback, simulate
    from commpress.collectives.transports.mpi import MpiTransport
    from commpress.collectives.transports.transport import Transport

__all__ = [
    "Change",
    "Channel",
    "Exchange",
    "Exchanges",
    "GatherMean",
    "Links",
    "Loopback",
    "MpiTransport",
    "Outcome",
    "Reduce",
    "ReduceInLevels",
    "Round",
    "Scatter",
    "Topology",
    "Transport",
    "Workspace",
    "compressed_all_to_all",
    "compressed_allreduce",
    "load_links",
    "own_transport",
    "simulate",
]
__getattr__ = lazily(
    __name__,
    {
        "all_gather_mean": ("GatherMean",),
        "all_to_all.all_to_all": ("compressed_all_to_all",),
        "allreduce": ("Outcome", "Workspace", "compressed_allreduce"),
        "change": ("Change",),
        "channel": ("Channel",),
        "exchange": ("Exchange", "Exchanges", "Reduce", "ReduceInLevels", "Round"),
        "measured_links": ("Links", "load_links"),
        "reduce_scatter": ("Scatter",),
        "topology": ("Topology",),
        "transports.factory": ("own_transport",),
        "transports.loopback": ("Loopback", "simulate"),
        "transports.mpi": ("MpiTransport",),
        "transports.transport": ("Transport",),
    },
)
