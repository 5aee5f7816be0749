"""Choice of a codec for each edge of a pipeline, by a measurement of its link between neighboring
ranks."""

from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from commpress.integrations.pipeline.edge_codec import decode_into, edge_codec, encoded

NUMEL = 1 << 18  # elements of the tensor for which codecs are compared
ENOUGH, MOST = 0.05, 1 << 25  # seconds or bytes of a probe that measures a link's bandwidth
CANDIDATES = ("none", "bf16", "int8", "int4")  # the finest first
GAIN = 0.95  # a coarser codec must take less than this share of the time


def fastest(bandwidth: float, seconds: dict[str, float], numel: int = NUMEL) -> str:
    """Return the codec that sends ``numel`` float32 over a link fastest, exact unless another is
    clearly faster.

    ``seconds``: time for encoding and decoding them, by codec.
    """
    best, least = CANDIDATES[0], 4 * numel / bandwidth
    for name in CANDIDATES[1:]:
        codec = edge_codec(name)
        assert codec is not None
        took = codec.size(numel, numel) / bandwidth + seconds[name]
        if took < GAIN * least:
            best, least = name, took
    return best


def measured(group: Any, device: torch.device) -> dict[tuple[int, int], str]:
    """Map (sender, receiver), ranks of ``group``, to a codec for all neighbors in the ring;
    collective, and equal on all ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    seconds = _codec_seconds(device)
    pairs = {tuple(sorted((r, (r + 1) % size))) for r in range(size)} - {(0, 0)}
    # number of the codec from each rank to each other
    table = torch.full((size, size), -1, device=device)
    for low, high in sorted(pairs):
        for sender, receiver in ((low, high), (high, low)):
            if rank in (sender, receiver):
                bandwidth = _bandwidth(
                    rank == sender, receiver if rank == sender else sender, group, device
                )
                if rank == sender:
                    table[sender, receiver] = CANDIDATES.index(fastest(bandwidth, seconds))
        dist.barrier(group)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=group)
    return {
        (sender, receiver): CANDIDATES[table[sender, receiver]]
        for sender, receiver in (table >= 0).nonzero().tolist()
    }


def _codec_seconds(device: torch.device) -> dict[str, float]:
    values = torch.linspace(-1, 1, NUMEL, device=device)
    found = {}
    for name in CANDIDATES[1:]:
        codec = edge_codec(name)
        assert codec is not None
        times = []
        for _ in range(3):
            start = perf_counter()
            decode_into(values, encoded(values, codec), codec)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(perf_counter() - start)
        found[name] = min(times)
    return found


def _bandwidth(sends: bool, peer: int, group: Any, device: torch.device) -> float:
    """Return bytes per second, by a probe that grows until it takes long enough, minus the time of
    an empty one."""
    other = dist.get_global_rank(group, peer) if group is not None else peer
    answer = torch.zeros(1, dtype=torch.float64, device=device)
    numel = 1 << 14
    _probe(sends, other, torch.zeros(1, device=device), answer, group)
    least = _probe(sends, other, torch.zeros(1, device=device), answer, group)
    while True:
        took = _probe(sends, other, torch.zeros(numel, device=device), answer, group)
        if took >= ENOUGH or 4 * numel >= MOST:
            return 4 * numel / max(took - least, 1e-9)
        numel *= 4


def _probe(
    sends: bool, other: int, values: torch.Tensor, answer: torch.Tensor, group: Any
) -> float:
    """Return the sender's seconds until the receiver has confirmed the message, on both sides."""
    start = perf_counter()
    if not sends:
        dist.recv(values, other, group)
        dist.send(answer, other, group)
        dist.recv(answer, other, group)
        return float(answer)
    dist.send(values, other, group)
    dist.recv(answer, other, group)
    took = perf_counter() - start
    dist.send(answer.fill_(took), other, group)
    return took
