"""Headers that a GPU hands over late: what an all-reduce then does, with the processor in place of
the card."""

import pytest
import torch

import commpress.collectives.allreduce as allreduce
from commpress.codecs import codec_named
from commpress.collectives.allreduce import Call, Workspace, reduce_message
from commpress.collectives.buckets import one_message
from commpress.collectives.frame import LateHeaders
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import Corrupted
from commpress.feedback import ErrorFeedback

NUMEL = 5000


@pytest.fixture
def late(monkeypatch):
    """Every header is read late; the number of times that the host waited."""
    waits = []
    read = LateHeaders.read
    monkeypatch.setattr(allreduce, "reads_late", lambda *_: True)
    monkeypatch.setattr(LateHeaders, "read", lambda self: (waits.append(1), read(self))[1])
    return waits


def unchecked(size):
    """Transports without checksums, as NCCL's: with them the host sees every byte anyway."""
    transports = Loopback(size).transports()
    for transport in transports:
        transport.checks = False
    return transports


def reduced(codec, size, *, transports=None, alter=lambda inputs: None, asks=False):
    """Buffers, outcomes and residuals of one step; with no ``transports`` all is well on the
    way."""
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(NUMEL, generator=draw) for _ in range(size)]
    alter(inputs)
    message = one_message(NUMEL, codec_named(codec), size)
    feedbacks = [ErrorFeedback.zeros(message.pieces) for _ in range(size)]
    outcomes = [
        reduce_message(
            x,
            f,
            message=message,
            call=Call(
                transport=t, workspace=Workspace(checksum=False), sequence=3, key=5, asks=asks
            ),
        )
        for x, f, t in zip(inputs, feedbacks, transports or unchecked(size), strict=True)
    ]
    return inputs, outcomes, feedbacks


@pytest.mark.parametrize(("codec", "size"), [("sign", 1), ("int8", 2), ("topk-64", 5), ("none", 2)])
def test_late_or_at_once_the_bits_are_the_same(codec, size, monkeypatch, request):
    at_once, steps, owed = reduced(codec, size, asks=True)
    done = simulate(steps)
    waits = request.getfixturevalue("late")
    later, steps, owed_later = reduced(codec, size, asks=True)
    done_later = simulate(steps)
    assert len(waits) == size  # one each
    for a, b, one, two, f, g in zip(
        at_once, later, done, done_later, owed, owed_later, strict=True
    ):
        assert torch.equal(a, b)
        assert (one.finite, one.asks) == (two.finite, two.asks) == (True, True)
        one.commit()
        two.commit()
        assert torch.equal(f.sent, g.sent)
        assert torch.equal(f.reduced, g.reduced)


def test_nan_on_one_rank_is_known_to_all(late):
    def alter(inputs):
        inputs[1][7] = torch.nan

    buffers, steps, _ = reduced("int8", 3, alter=alter)
    before = [buffer.clone() for buffer in buffers]
    assert not any(outcome.finite for outcome in simulate(steps))
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(buffers, before, strict=True))


def test_a_header_that_only_one_rank_finds_wrong_keeps_all_from_committing(late):
    """That rank says who it was; the others learn from its flag that nothing counts, before it has
    even looked."""
    transports = unchecked(3)
    all_to_all = transports[2].all_to_all

    class Altering:
        def __init__(self, out, inp, tag):
            self.out, self.work = out, all_to_all(out, inp, tag)

        def wait(self):
            self.work.wait()
            self.out[0, 40] ^= 1

    transports[2].all_to_all = Altering
    buffers, steps, _ = reduced("sign", 3, transports=transports)
    before, outcomes = [buffer.clone() for buffer in buffers], {}

    def told(rank):
        try:
            outcomes[rank] = yield from steps[rank]
        except Corrupted as error:
            outcomes[rank] = error

    simulate([told(rank) for rank in range(3)])
    assert isinstance(outcomes[2], Corrupted)
    assert "rank 0" in str(outcomes[2])
    assert [outcomes[rank].finite for rank in (0, 1)] == [False, False]
    assert all(torch.equal(a, b) for a, b in zip(buffers, before, strict=True))
