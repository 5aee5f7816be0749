"""Train PyTorch models over slow networks: compressed collectives, communication hooks, optimizers,
tiered memory and elastic runs.

Importing this package has no effect: names below are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "compress": "commpress.integrations.ddp.hook",
    "CompressedState": "commpress.integrations.ddp.hook",
    "compressed_allreduce_hook": "commpress.integrations.ddp.hook",
    "Stateful": "commpress.collectives.state",
    "AllToAll": "commpress.integrations.experts.dispatch",
    "elastic": "commpress.integrations.elastic.loop",
    "ElasticSampler": "commpress.integrations.elastic.sampler",
    "ExpertExchange": "commpress.integrations.experts.expert_exchange",
    "Snapshots": "commpress.integrations.elastic.snapshots",
    "init_process_group": "commpress.integrations.trainers.launch",
    "Partitioned": "commpress.integrations.zero.partitioned",
    "Offloaded": "commpress.integrations.zero.offloaded",
    "activations": "commpress.integrations.zero.activation_tier",
    "parked": "commpress.integrations.zero.parking",
    "load_parked": "commpress.integrations.zero.parking",
    "stream": "commpress.integrations.zero.streamed",
    "tile": "commpress.integrations.zero.tiling",
    "compress_fsdp": "commpress.integrations.fsdp.fsdp2",
    "compress_hsdp": "commpress.integrations.fsdp.hsdp",
    "compress_pipeline": "commpress.integrations.pipeline.edges",
    "TileCodec": "commpress.integrations.pipeline.tiles",
    "Difference": "commpress.integrations.fsdp.shard_weights",
    "FlatShardState": "commpress.integrations.fsdp.fsdp1",
    "compressed_reduce_scatter_hook": "commpress.integrations.fsdp.fsdp1",
    "SignCodec": "commpress.codecs",
    "TernaryCodec": "commpress.codecs",
    "BlockCodec": "commpress.codecs",
    "CastCodec": "commpress.codecs",
    "BitsCodec": "commpress.codecs",
    "TopKCodec": "commpress.codecs",
    "RandomKCodec": "commpress.codecs",
    "LowRankCodec": "commpress.codecs",
    "SparseCodec": "commpress.codecs",
    "BySize": "commpress.codecs",
    "ByName": "commpress.codecs",
    "by_role": "commpress.codecs",
    "register_codec": "commpress.codecs",
    "Muon": "commpress.optim",
    "OneBitAdam": "commpress.optim",
    "ZeroOneAdam": "commpress.optim",
    "OneBitLamb": "commpress.optim",
    "ShardedOneBitAdam": "commpress.optim",
    "ShardedZeroOneAdam": "commpress.optim",
    "LocalUpdates": "commpress.optim.local_updates",
    "Alarm": "commpress.alarm",
    "PerLayer": "commpress.choice",
    "keep_local": "commpress.integrations.ddp.local",
    "Average": "commpress.optim.outer",
    "Nesterov": "commpress.optim.outer",
    "SlowMo": "commpress.optim.outer",
    "Gossip": "commpress.optim.outer",
    "SparseLoCo": "commpress.optim.outer",
    "QSR": "commpress.schedules",
    "Seconds": "commpress.schedules",
    "overlap": "commpress.integrations.ddp.overlap",
    "save_distributed": "commpress.integrations.trainers.distributed_checkpoint",
    "load_distributed": "commpress.integrations.trainers.distributed_checkpoint",
    "save_safetensors": "commpress.integrations.zero.safetensors_file",
    "load_safetensors": "commpress.integrations.zero.safetensors_file",
    "ErrorFeedback": "commpress.feedback",
    "compressed_allreduce": "commpress.collectives.allreduce",
    "GroupOptions": "commpress.integrations.process_group.group_options",
    "Topology": "commpress.collectives.topology",
    "load_links": "commpress.collectives.measured_links",
    "TieredStore": "commpress.tiered_mem",
    "Metrics": "commpress.integrations.observe.metrics",
    "MetricsEndpoint": "commpress.integrations.observe.endpoint",
    "to_json_lines": "commpress.integrations.observe.metrics",
    "to_writer": "commpress.integrations.observe.metrics",
    "Timeline": "commpress.timeline",
    "merge_timelines": "commpress.timeline",
    "watch": "commpress.integrations.observe.watch",
    "CommpressError": "commpress.errors",
}

_MODULES = ("hf", "lightning", "moe", "weights")

if TYPE_CHECKING:
    from commpress import hf as hf
    from commpress import lightning as lightning
    from commpress import moe as moe
    from commpress import weights as weights
    from commpress.alarm import Alarm
    from commpress.choice import PerLayer
    from commpress.codecs import (
        BitsCodec,
        BlockCodec,
        ByName,
        BySize,
        CastCodec,
        LowRankCodec,
        RandomKCodec,
        SignCodec,
        SparseCodec,
        TernaryCodec,
        TopKCodec,
        by_role,
        register_codec,
    )
    from commpress.collectives.allreduce import compressed_allreduce
    from commpress.collectives.measured_links import load_links
    from commpress.collectives.state import Stateful
    from commpress.collectives.topology import Topology
    from commpress.errors import CommpressError
    from commpress.feedback import ErrorFeedback
    from commpress.integrations.ddp.hook import CompressedState, compress, compressed_allreduce_hook
    from commpress.integrations.ddp.local import keep_local
    from commpress.integrations.ddp.overlap import overlap
    from commpress.integrations.elastic.loop import elastic
    from commpress.integrations.elastic.sampler import ElasticSampler
    from commpress.integrations.elastic.snapshots import Snapshots
    from commpress.integrations.experts.dispatch import AllToAll
    from commpress.integrations.experts.expert_exchange import ExpertExchange
    from commpress.integrations.fsdp.fsdp1 import FlatShardState, compressed_reduce_scatter_hook
    from commpress.integrations.fsdp.fsdp2 import compress_fsdp
    from commpress.integrations.fsdp.hsdp import compress_hsdp
    from commpress.integrations.fsdp.shard_weights import Difference
    from commpress.integrations.observe.endpoint import MetricsEndpoint
    from commpress.integrations.observe.metrics import Metrics, to_json_lines, to_writer
    from commpress.integrations.observe.watch import watch
    from commpress.integrations.pipeline.edges import compress_pipeline
    from commpress.integrations.pipeline.tiles import TileCodec
    from commpress.integrations.process_group.group_options import GroupOptions
    from commpress.integrations.trainers.distributed_checkpoint import (
        load_distributed,
        save_distributed,
    )
    from commpress.integrations.trainers.launch import init_process_group
    from commpress.integrations.zero.activation_tier import activations
    from commpress.integrations.zero.offloaded import Offloaded
    from commpress.integrations.zero.parking import load_parked, parked
    from commpress.integrations.zero.partitioned import Partitioned
    from commpress.integrations.zero.safetensors_file import load_safetensors, save_safetensors
    from commpress.integrations.zero.streamed import stream
    from commpress.integrations.zero.tiling import tile
    from commpress.optim import (
        Muon,
        OneBitAdam,
        OneBitLamb,
        ShardedOneBitAdam,
        ShardedZeroOneAdam,
        ZeroOneAdam,
    )
    from commpress.optim.local_updates import LocalUpdates
    from commpress.optim.outer import Average, Gossip, Nesterov, SlowMo, SparseLoCo
    from commpress.schedules import QSR, Seconds
    from commpress.tiered_mem import TieredStore
    from commpress.timeline import Timeline, merge_timelines

__all__ = [
    "compress",
    "CompressedState",
    "compressed_allreduce_hook",
    "Stateful",
    "AllToAll",
    "elastic",
    "ElasticSampler",
    "ExpertExchange",
    "Snapshots",
    "init_process_group",
    "compress_fsdp",
    "compress_hsdp",
    "compress_pipeline",
    "TileCodec",
    "Difference",
    "FlatShardState",
    "compressed_reduce_scatter_hook",
    "SignCodec",
    "TernaryCodec",
    "BlockCodec",
    "CastCodec",
    "BitsCodec",
    "TopKCodec",
    "RandomKCodec",
    "LowRankCodec",
    "SparseCodec",
    "BySize",
    "ByName",
    "by_role",
    "register_codec",
    "Muon",
    "OneBitAdam",
    "Partitioned",
    "Offloaded",
    "activations",
    "parked",
    "load_parked",
    "stream",
    "tile",
    "ZeroOneAdam",
    "OneBitLamb",
    "ShardedOneBitAdam",
    "ShardedZeroOneAdam",
    "LocalUpdates",
    "Alarm",
    "PerLayer",
    "keep_local",
    "Average",
    "Nesterov",
    "SlowMo",
    "Gossip",
    "SparseLoCo",
    "QSR",
    "Seconds",
    "overlap",
    "save_distributed",
    "load_distributed",
    "save_safetensors",
    "load_safetensors",
    "ErrorFeedback",
    "compressed_allreduce",
    "GroupOptions",
    "Topology",
    "load_links",
    "TieredStore",
    "Metrics",
    "MetricsEndpoint",
    "to_json_lines",
    "to_writer",
    "Timeline",
    "merge_timelines",
    "watch",
    "CommpressError",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"commpress.{name}")
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    from difflib import get_close_matches

    near = get_close_matches(name, [*__all__, *_MODULES], n=1)
    cure = f"did you mean {near[0]!r}?" if near else f"it offers {', '.join([*__all__, *_MODULES])}"
    raise AttributeError(f"module 'commpress' has no attribute {name!r}: {cure}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
