"""``codec="auto"``: the first batch goes out and back in every codec in turn, and all ranks take
the fastest for good.

Where ranks form nodes, it goes each way in each codec: by way of nodes, which sends fewer bytes
between them, and straight to every rank, which costs processors less. All begin together, and a
turn counts as its slowest rank, of whom every rank gets to know: so all decide alike.
"""

from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from commpress.codecs import Codec
from commpress.collectives.scalars import gathered
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.integrations.experts.expert_exchange import ExpertExchange, ExpertPlan

AUTO = "auto"
STRAIGHT = " straight"
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
        # once it is over; "int8 straight" is int8 without going by way of nodes
        self.seconds: dict[str, float] = {}
        self.chosen = ""
        self.straight = False  # it was fastest to go straight to every rank
        self._plans: tuple[ExpertPlan, ExpertPlan] | None = None

    def offer(self, plan: "ExpertPlan", straight: "ExpertPlan") -> None:
        """``straight``: the plan of the same batch without going by way of nodes."""
        self._plans = plan, straight

    def steps(
        self,
        exchange: "ExpertExchange",
        plan: "ExpertPlan",
        tokens: torch.Tensor,
        gates: torch.Tensor | None,
    ) -> Steps[bool]:
        """Measure with this batch, unless no rank has a token: then False. Every rank calls it with
        the same batch's plan."""
        channel, device = exchange.channel, exchange.carrier.device
        counts = yield from gathered(
            [float(len(tokens))],
            transport=channel.transport,
            sequence=channel.take(),
            device=device,
        )
        if not counts.any():
            return False
        ways = {"": plan}
        if self._plans is not None and self._plans[0].share is plan.share:
            ways[STRAIGHT] = self._plans[1].to(tokens.device)
        codecs = [
            name for name in self.out if tokens.dtype != torch.float64 or self.out[name].lossless
        ]
        names = [(codec, way) for codec in codecs for way in ways]
        took: dict[tuple[str, str], list[float]] = {name: [] for name in names}
        for turn in range(ROUNDS):
            for name in names if turn % 2 == 0 else reversed(names):
                yield from gathered(
                    [0.0], transport=channel.transport, sequence=channel.take(), device=device
                )
                start, (codec, way) = perf_counter(), name
                count = ways[way].rows.count
                rows, _ = yield from exchange.out_steps(
                    ways[way], tokens, gates, count, self.out[codec], channel.take()
                )
                yield from exchange.back_steps(
                    ways[way], rows, None, self.back[codec], channel.take()
                )
                if rows.is_cuda:
                    torch.cuda.synchronize(rows.device)
                took[name].append(perf_counter() - start)
        own = [seconds for name in names for seconds in took[name][1:]]
        every = yield from gathered(
            own, transport=channel.transport, sequence=channel.take(), device=device
        )
        slowest = every.max(0).reshape(len(names), ROUNDS - 1)
        self.seconds = dict(zip(map("".join, names), np.median(slowest, 1).tolist(), strict=True))
        best = fastest(self.seconds)
        self.straight, self.chosen, self._plans = (
            best.endswith(STRAIGHT),
            best.removesuffix(STRAIGHT),
            None,
        )
        return True


def fastest(seconds: dict[str, float]) -> str:
    """The candidate to take: the first one, unless a later one, which is coarser or sends more,
    saves enough."""
    best, *rest = seconds
    for name in rest:
        if seconds[name] <= (1 - GAIN) * seconds[best]:
            best = name
    return best
