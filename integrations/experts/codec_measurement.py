"""``codec="auto"``: send the first batch to the experts and back in every codec in turn, and use
the fastest from then on.

The ranks begin each turn together and exchange their seconds. The slowest rank's count, so that all
ranks decide alike.
"""

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from commpress.codecs import Codec
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.integrations.experts.expert_exchange import ExpertExchange, ExpertPlan

AUTO = "auto"
# from the most exact to the coarsest; coarser ones, which would affect the loss, are not tried
CANDIDATES = ("none", "bf16", "int8")
ROUNDS = 5  # the first does not count: memory is allocated, kernels are compiled
GAIN = 0.05  # share of the seconds that a coarser codec must save over a finer one


@dataclass
class CodecMeasurement:
    """Measure the seconds of each candidate for a round trip, and choose one.

    ``out`` and ``back``: codecs of each candidate for the two directions.
    """

    out: dict[str, Codec]
    back: dict[str, Codec]
    seconds: dict[str, float] = field(default_factory=dict)  # filled at the end
    chosen: str = ""

    def steps(
        self,
        exchange: "ExpertExchange",
        plan: "ExpertPlan",
        tokens: torch.Tensor,
        gates: torch.Tensor | None,
    ) -> Steps[bool]:
        """Measure with this batch; return False if no rank has a token. Every rank calls it with
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
    """Return the first candidate, unless a later and coarser one saves enough time."""
    best, *rest = seconds
    for name in rest:
        if seconds[name] <= (1 - GAIN) * seconds[best]:
            best = name
    return best
