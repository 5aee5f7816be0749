"""Memory that compression takes on each rank of a sharded model, by formula: torch shards
parameters, not what is kept here.

    residuals  b · n    n: elements that a rank quantises, with the codec's error feedback
               one hop  the whole model; two hops with an exact one inside a node of L ranks: the
                        whole model / L
               b        4, or what the codec of ``residuals=`` takes, 1.04 for "shift8"
    weights    as they came in forward, in their codec; 0 with ``regather=True``; whole copies with
               ``Difference``
"""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from commpress.codecs import Codec
from commpress.collectives.buckets import MESSAGE, PIECE
from commpress.integrations.fsdp.prefetch import AT_ONCE

if TYPE_CHECKING:
    from commpress.integrations.fsdp.shard_gradients import CompressedReduceScatter
    from commpress.integrations.fsdp.shard_weights import CompressedAllGather


def memory_of(
    reducers: "Iterable[CompressedReduceScatter]",
    gatherers: "Iterable[CompressedAllGather]",
    kept_in: Codec | None,
    *,
    together: bool,
) -> dict[str, int]:
    """See ``ShardedState.memory``. ``kept_in``: the codec of residuals, or None where there are
    none.

    ``together``: the residuals of a backward are all taken or left at its end, so that many are
    proposed.
    """
    every = [] if kept_in is None else [quantised(reducer) for reducer in reducers]
    coded = kept_in is not None and not kept_in.lossless
    size = 4.0 if kept_in is None or not coded else kept_in.row_bytes(PIECE) / PIECE
    kinds = Counter(tuple(elements) for elements in every)
    proposed = sum(
        (times if together else min(times, AT_ONCE)) * sum(elements)
        for elements, times in kinds.items()
    )
    longest = max((max(elements, default=0) for elements in every), default=0)
    return {
        "residuals": round(size * sum(map(sum, every))),
        "proposed": round(size * proposed),
        "scratch": 4 * min(longest, MESSAGE) if coded else 0,
        "weights": sum(map(weights_kept, gatherers)),
    }


def quantised(reducer: "CompressedReduceScatter") -> list[int]:
    """Elements of a group of which this rank keeps residuals, hop by hop."""
    result = []
    for hop in reducer.hops:
        result.append(0)
        for part in reducer.in_rows:
            codec = hop.policy.choose(part.name, part.numel)
            if codec.lossless or not codec.feedback:
                continue
            rows = hop.own or range(reducer.param_group.ranks)
            result[-1] += sum(
                min(max(part.numel - row * part.width, 0), part.width) for row in rows
            )
    return result


def weights_kept(gatherer: "CompressedAllGather") -> int:
    """Bytes of a group's weights that stay from forward to backward, or from step to step."""
    ranks, dtype = gatherer.param_group.ranks, gatherer.param_group.gathered_dtype
    if gatherer.difference:
        return dtype.itemsize * gatherer.stride * ranks
    if not (gatherer.keep and gatherer.param_group.gathered_twice):
        return 0
    chosen = [(part, gatherer.policy.choose(part.name, part.numel)) for part in gatherer.parts]
    return ranks * sum(
        dtype.itemsize * part.width if codec.lossless else codec.row_bytes(part.width)
        for part, codec in chosen
    )
