"""Schedule of the faults that the benchmark ``chaos`` makes: drawn from a seed at a rate, or read
from a file."""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commpress.errors import InvalidArgument

KINDS = {  # → seconds that it lasts: from, to
    "kill": (0.0, 0.0),
    "stop": (1.0, 5.0),
    "slow": (5.0, 10.0),
    "cut": (2.0, 10.0),
}
# bytes: longer packets carry data, shorter ones agreement, acknowledgements and greetings
BULK = 600
SHARES = {  # packets that a cut link loses → nft's words
    "all": "drop",
    "half": "numgen random mod 2 0 drop",
    "bulk": f"meta length > {BULK} drop",
}
LAUNCHER = -1  # the process that holds the store of the rendezvous
FORM = "SECONDS kill|stop|slow|cut RANK|launcher [for SECONDS] [all|half|bulk]"


@dataclass(frozen=True)
class Fault:
    """A thing done to one process, some seconds after all have begun to train."""

    at: float
    kind: str
    victim: int
    seconds: float = 0.0
    share: str = "all"  # of packets, of a link that is cut

    def __str__(self) -> str:
        whom = "launcher" if self.victim == LAUNCHER else f"{self.victim}"
        lasts = f" for {self.seconds:.3g} s" if self.kind != "kill" else ""
        return f"{self.kind} {whom}{lasts}" + (f" {self.share}" if self.kind == "cut" else "")


def calm(seconds: float) -> float:
    """Seconds before faults: what goodput is compared with."""
    return min(10.0, seconds / 6)


def of(options: argparse.Namespace) -> list[Fault]:
    """The faults that the options ask for."""
    if options.schedule:
        return read(options.schedule, options.ranks)
    kinds, seconds = options.faults.split(","), options.seconds
    return drawn(kinds, options.faults_per_hour, options.ranks, seconds, options.seed)


def drawn(
    kinds: Sequence[str], per_hour: float, ranks: int, seconds: float, seed: int
) -> list[Fault]:
    """Faults of these kinds at random times, ``per_hour`` on average, until ``seconds``.

    The gaps between them are exponential, as between failures that know nothing of each other; the
    same seed draws the same.
    """
    draws, at, found = random.Random(seed), calm(seconds), []
    while per_hour > 0:
        at += draws.expovariate(per_hour / 3600)
        kind, victim = draws.choice(kinds), draws.randrange(ranks)
        lasts, share = draws.uniform(*KINDS[kind]), draws.choice(list(SHARES))
        if at >= seconds:
            break
        found.append(Fault(at, kind, victim, lasts, share if kind == "cut" else "all"))
    return found


def read(path: str | Path, ranks: int) -> list[Fault]:
    """Faults of a file with one a line, in the order of their times; empty lines and what follows #
    are left out."""
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if words := line.partition("#")[0].split():
            try:
                found.append(_fault(words, ranks))
            except (ValueError, IndexError) as error:
                raise InvalidArgument(
                    f"{path}, line {number} is {line.strip()!r} ({error}), expected {FORM}"
                ) from None
    return sorted(found, key=lambda fault: fault.at)


def _fault(words: list[str], ranks: int) -> Fault:
    at, kind, whom, *rest = words
    victim = LAUNCHER if whom == "launcher" else int(whom)
    if kind not in KINDS or float(at) < 0 or not (whom == "launcher" or 0 <= victim < ranks):
        raise ValueError(f"no such time, fault, or rank of {ranks}")
    seconds, share = KINDS[kind][1], "all"
    while rest:
        word = rest.pop(0)
        if word == "for":
            seconds = float(rest.pop(0))
        elif word in SHARES and kind == "cut":
            share = word
        else:
            raise ValueError(f"{word!r} means nothing here")
    return Fault(float(at), kind, victim, seconds, share)
