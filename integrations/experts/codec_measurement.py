"""``codec="auto"``: the first batch goes out and back in every codec in turn, and all ranks take
the fastest for good.

All begin together, and a turn counts as its slowest rank, of whom every rank gets to know: so all
decide alike.
"""

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from commpress.codecs import Codec
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.integrations.experts.expert_exchange import ExpertExchange, ExpertPlan

AUTO = "auto"
# from the most exact to the coarsest; what costs more in loss is not tried unasked
CANDIDATES = ("none", "bf16", "int8")
ROUNDS = 5  # of which the first does not count: memory is touched, kernels are compiled
GAIN = 0.05  # of the seconds of a finer one that a coarser codec must save to be worth it


class CodecMeasurement:
    """Seconds of each candidate, there and back, and the one to go on with.

    ``out`` and ``back``: the codecs of each candidate for the two directions.
    """

    def __init__(self, out: dict[str, Codec], back: dict[str, Codec]) -> None:
        self.out, self.back = out, back
        self.seconds: dict[str, float] = {}  # once it is over
        self.chosen = ""

    def steps(
        self,
        exchange: "ExpertExchange",
        plan: "ExpertPlan",
        tokens: torch.Tensor,
        gates: torch.Tensor | None,
    ) -> Steps[bool]:
        """Measure with this batch, unless no rank has a token: then False. Every rank calls it with
        the same batch's plan."""
        channel = exchange.channel
        counts = yield from channel.gathered([float(len(tokens))])
        if not counts.any():
            return False
        names = [
            name for name in self.out if tokens.dtype != torch.float64 or self.out[name].lossless
        ]
        took: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(ROUNDS):
            for name in names if turn % 2 == 0 else reversed(names):
                yield from channel.gathered([0.0])
                start, count = perf_counter(), plan.rows.count
                rows, _ = yield from exchange.out_steps(
                    plan, tokens, gates, count, self.out[name], channel.take()
                )
                yield from exchange.back_steps(plan, rows, None, self.back[name], channel.take())
                if rows.is_cuda:
                    torch.cuda.synchronize(rows.device)
                took[name].append(perf_counter() - start)
        own = [seconds for name in names for seconds in took[name][1:]]
        every = yield from channel.gathered(own)
        slowest = every.max(0).reshape(len(names), ROUNDS - 1)
        self.seconds = dict(zip(names, np.median(slowest, 1).tolist(), strict=True))
        self.chosen = fastest(self.seconds)
        return True


def fastest(seconds: dict[str, float]) -> str:
    """The candidate to take: the first one, unless a later one, which is coarser, saves enough."""
    best, *rest = seconds
    for name in rest:
        if seconds[name] <= (1 - GAIN) * seconds[best]:
            best = name
    return best
