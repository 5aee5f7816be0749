"""EF21: the identity that ties its estimates, and what they are good for."""

import pytest
import torch

from commpress.codecs import TopKCodec
from commpress.codecs.family import NAMES
from commpress.collectives.allreduce import compressed_allreduce
from commpress.collectives.buckets import one_message
from commpress.collectives.ef21 import Estimates, ef21_allreduce
from commpress.collectives.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback

NUMEL = 1003


def reduce(estimates, inputs, step):
    ranks = len(inputs)
    transports, buffers = Loopback(ranks).transports(), [x.clone() for x in inputs]
    finite = simulate(
        [ef21_allreduce(buffers[r], estimates[r], transport=transports[r], sequence=step) for r in range(ranks)]
    )
    return buffers, finite


def zeros(ranks, codec):
    transports = Loopback(ranks).transports()
    return [Estimates.zeros(NUMEL, codec=codec, transport=t) for t in transports]


def inputs_of(ranks, step):
    return list(torch.randn(ranks, NUMEL, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("codec", ["topk-16", "sign-l1", "int4", "bits2", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_all_know_is_what_they_heard(codec, ranks):
    """v = mean(h) − s, and v is the same in every bit on every rank."""
    estimates = zeros(ranks, codec)
    for step in range(15):
        outputs, _ = reduce(estimates, inputs_of(ranks, step), step)
        assert all(torch.equal(outputs[0], other) for other in outputs)
        assert torch.equal(outputs[0], estimates[0].mean)
        owed = torch.cat([e.feedback.reduced for e in estimates])[:NUMEL]
        heard = torch.stack([e.own for e in estimates]).mean(0)
        torch.testing.assert_close(outputs[0], heard - owed, atol=2e-5, rtol=1e-5)
        assert not any(e.feedback.sent.any() for e in estimates)


def test_a_gradient_that_stays_is_known_ever_more_exactly():
    """Where a residual goes on oscillating: top-k sends in turns what EF21 needs to send once."""
    ranks, codec = 2, TopKCodec(1 / 8, 64)
    inputs = inputs_of(ranks, 0)
    mean, estimates = torch.stack(inputs).mean(0), zeros(ranks, codec)
    message = one_message(NUMEL, codec, ranks)
    feedbacks = [ErrorFeedback.zeros(message.pieces) for _ in range(ranks)]
    for step in range(60):
        outputs, _ = reduce(estimates, inputs, step)
        transports, buffers = Loopback(ranks).transports(), [x.clone() for x in inputs]
        simulate(
            [
                compressed_allreduce(buffers[r], feedbacks[r], codec=codec, transport=transports[r], sequence=step)
                for r in range(ranks)
            ]
        )
    assert float((outputs[0] - mean).norm() / mean.norm()) < 1e-4
    assert float((buffers[0] - mean).norm() / mean.norm()) > 0.5


def test_a_bad_gradient_changes_nothing():
    estimates = zeros(2, "topk-16")
    reduce(estimates, inputs_of(2, 0), 0)
    before = [(e.own.clone(), e.mean.clone(), e.feedback.reduced.clone()) for e in estimates]
    inputs = inputs_of(2, 1)
    inputs[1][5] = float("nan")
    outputs, finite = reduce(estimates, inputs, 1)
    assert finite == [False, False]
    for e, (own, mean, reduced) in zip(estimates, before, strict=True):
        assert torch.equal(e.own, own)
        assert torch.equal(e.mean, mean)
        assert torch.equal(e.feedback.reduced, reduced)
    assert torch.equal(outputs[0], inputs[0])


@pytest.mark.parametrize("codec", [NAMES["none"], "terngrad"])
def test_codecs_that_leave_nothing_out_are_refused(codec):
    with pytest.raises(InvalidArgument, match="EF21 is for codecs that leave something out"):
        zeros(2, codec)
