"""Headers of exchanges between ranks that train locally: a few numbers from each to all, before any
change is sent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

from commpress.collectives.channel import Channel
from commpress.collectives.scalars import gathered
from commpress.errors import Mismatch
from commpress.schedules import UNKNOWN, Pace
from commpress.work import Steps

NUMBERS = 10  # of a header, in float64


@dataclass(frozen=True)
class ExchangeHeader:
    """One rank's: where it is, what it starts from, and how much it has to say."""

    number: int  # of the exchange
    fragment: int
    # 64 bits that ranks must have in common: the hash of Θ, or what partners are drawn from
    origin: tuple[float, float]
    weight: float  # how much its change counts; 0 if it has not trained, or not to finite numbers
    square: float  # ‖Δᵢ‖²
    ended: bool  # it has no more data
    pace: Pace = UNKNOWN  # since its last header

    @property
    def finite(self) -> bool:
        return isfinite(self.square)

    def left_out(self) -> "ExchangeHeader":
        """The same from a rank whose change does not count, because one with another shard of it is
        not finite."""
        return replace(self, weight=0.0, square=nan)

    def gathered(self, channel: Channel, sequence: int) -> Steps[list["ExchangeHeader"]]:
        """Those of all ranks, in their order."""
        row = [
            self.number,
            self.fragment,
            *self.origin,
            self.weight,
            self.square,
            self.ended,
            *self.pace,
        ]
        rows = yield from gathered(
            [float(each) for each in row], transport=channel.transport, sequence=sequence
        )
        return [
            ExchangeHeader(
                int(number), int(fragment), (high, low), weight, square, bool(ended), Pace(*pace)
            )
            for number, fragment, high, low, weight, square, ended, *pace in rows.tolist()
        ]


def check_same(headers: Sequence[ExchangeHeader], *, shared: bool) -> None:
    """Raise ``Mismatch`` where ranks are at another exchange than rank 0 or start from something
    else.

    ``shared``: they start from the same weights.
    """
    number, fragment = headers[0].number, headers[0].fragment
    places = [(each.number, each.fragment, each.origin) for each in headers]
    different = tuple(rank for rank, place in enumerate(places) if place != places[0])
    if different and shared:
        raise Mismatch(
            f"the shared weights of ranks {list(different)} differ from those of rank 0 at "
            f"exchange {number} (fragment {fragment}). Start every rank from the same weights, "
            "load checkpoints of one step, and give all ranks the same inner parameters.",
            ranks=different,
        )
    if different:
        raise Mismatch(
            f"ranks {list(different)} are not where rank 0 is: exchange {number}, fragment "
            f"{fragment}, or would draw other partners. Load checkpoints of one step, and give all "
            "ranks the same inner parameters and the same seed.",
            ranks=different,
        )
