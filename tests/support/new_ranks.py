"""Changes of ranks for simulations, and ranks that die in the middle of a message."""

from commpress.collectives.change import Change
from commpress.collectives.frame import HEADER, rows_of
from commpress.collectives.transports.transport import InFront
from commpress.errors import PeerFailure


def changes(stay, new, before, epoch=1):
    """Of every rank from now on. ``stay``: ranks before; then so many new ones."""
    sources, size = (*sorted(stay), *[None] * new), len(stay) + new
    return [Change(epoch, rank, before, sources, (b"",) * size) for rank in range(size)]


class Died(Exception):
    pass


class Dying(InFront):
    """Sends ``after`` messages, of one more only the rows of the ranks in ``reached``, and is no
    more."""

    def __init__(self, inner, after, reached):
        self.left, self.reached = after, reached
        self.stand_for(inner)

    def all_to_all(self, out, inp, tag):
        return self.exchange(
            rows_of(out), rows_of(inp), inp[self.rank, :HEADER].expand(self.size, -1), tag
        )

    def all_gather(self, out, inp, tag):
        return self.all_to_all(out, inp.expand(self.size, -1), tag)

    def exchange(self, out, inp, wanted, tag):
        self.left -= 1
        if self.left >= 0:
            return self.inner.exchange(out, inp, wanted, tag)
        self.inner.exchange(
            out, inp._replace(payloads={r: inp.payloads[r] for r in self.reached}), wanted, tag
        )
        raise Died


def until_stuck(ranks):
    """Result of each rank, None of one that waits for a dead one: it hears of that."""
    waits, results = {}, {}
    ready = dict(enumerate(ranks))
    while ready:
        going, ready = ready, {}
        for r, steps in going.items():
            try:
                waits[r] = next(steps)
            except StopIteration as stop:
                results[r] = stop.value
            except Died:
                results[r] = None
        for r in sorted(waits):
            try:
                waits[r].wait()
                del waits[r]
                ready[r] = ranks[r]
            except PeerFailure:
                continue
    for r in waits:
        try:
            ranks[r].throw(PeerFailure("gone", ranks=(0,)))
        except PeerFailure:
            results[r] = None
        except StopIteration as stop:
            results[r] = stop.value
    return [results[r] for r in range(len(ranks))]
