"""MuLoCo by composition: torch's Muon and AdamW inside, Nesterov outside, two bits with residuals,
three fragments."""

import pytest
import torch

from commpress.codecs import BitsCodec, codec_named
from commpress.collectives.allreduce import compressed_allreduce
from commpress.collectives.buckets import one_message
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.feedback import ErrorFeedback
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.outer import Nesterov

EVERY, LR, MU, DECAY = 6, 0.8, 0.9, 0.9


def net():
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 8)
    )


def inner_of(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.9, nesterov=False, weight_decay=0.0)
    return [muon, torch.optim.AdamW(rest, lr=1e-3)]


def backward(model, rank, step):
    draw = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 24, generator=draw)
    loss = (model(x) - x[:, :8].sin()).square().mean()
    loss.backward()
    return loss.item()


class Twin:
    """The published equations tensor by tensor, with what two bits say of a change from the
    all-reduce itself."""

    def __init__(self, size):
        self.models = [net() for _ in range(size)]
        self.inner = [inner_of(model) for model in self.models]
        self.shared = [p.detach().clone() for p in self.models[0].parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.shared]
        self.codecs = [codec_named("bits2" if p.numel() >= 256 else "none") for p in self.shared]
        self.owed = [
            [ErrorFeedback.zeros(one_message(p.numel(), codec, size).pieces) for _ in range(size)]
            for p, codec in zip(self.shared, self.codecs, strict=True)
        ]

    def train(self, step):
        for rank, (model, optimizers) in enumerate(zip(self.models, self.inner, strict=True)):
            backward(model, rank, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    @torch.no_grad()
    def exchange(self, number):
        every = [list(model.parameters())[number] for model in self.models]
        changes = [(self.shared[number] - p).view(-1) for p in every]
        for owed in self.owed[number]:
            owed.sent.mul_(DECAY)
            owed.reduced.mul_(DECAY)
        jobs = zip(changes, self.owed[number], Loopback(len(every)).transports(), strict=True)
        assert all(
            simulate(
                [
                    compressed_allreduce(c, f, codec=self.codecs[number], transport=t)
                    for c, f, t in jobs
                ]
            )
        )
        mean = changes[0].view_as(self.shared[number])
        momentum = self.momentum[number].mul_(MU).add_(mean)
        self.shared[number].sub_(mean.add(momentum, alpha=MU), alpha=LR)
        for p in every:
            p.copy_(self.shared[number])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_what_the_equations_say(size):
    """In every bit: Muon computes in bfloat16, where the smallest difference grows."""
    twin, models, switch, losses = Twin(size), [net() for _ in range(size)], Loopback(size), []
    options = {
        "every": EVERY,
        "outer": Nesterov(LR, MU),
        "codec": "bits2",
        "feedback_decay": DECAY,
        "fragments": 3,
    }
    locals_ = [
        LocalUpdates(inner_of(m), transport=switch.transport(r), **options)
        for r, m in enumerate(models)
    ]
    order = sorted(range(6), key=lambda number: number % 2)  # matrices come first, then biases
    parts = [
        [order[int(span.name.removeprefix("#"))] for span in fragment.spans]
        for fragment in locals_[0].fragments
    ]
    assert sorted(number for part in parts for number in part) == list(range(6))
    for step in range(8 * EVERY):
        for rank, (model, local) in enumerate(zip(models, locals_, strict=True)):
            losses.append(backward(model, rank, step))
            for optimizer in local.inner:
                optimizer.step()
                optimizer.zero_grad()
        simulate([local.steps() for local in locals_])
        twin.train(step)
        inside = step % EVERY + 1
        if inside % 2 == 0:  # of three fragments one after two steps each
            for number in parts[inside // 2 - 1]:
                twin.exchange(number)
        assert len({local.digest() for local in locals_}) == 1
        for mine, theirs in zip(models, twin.models, strict=True):
            for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(p, q)
    assert sum(losses[-6 * size :]) < 0.8 * sum(losses[: 6 * size])


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("shapes", [[(600, 341), (300,)], [(1000, 500)]], ids=["200 k", "500 k"])
@pytest.mark.parametrize(
    ("codec", "bits"), [(BitsCodec(2, block=1024), 2.25), ("bits2", 2.45)], ids=["1024", "512"]
)
def test_bytes_on_the_wire_of_a_round(codec, bits, shapes, size):
    """Two phases of two bits, headers, votes and short blocks included: at most 2·(K − 1)/K · b · N
    bits."""
    switch = Loopback(size)
    recorded, locals_ = [Recorded(switch.transport(r)) for r in range(size)], []
    for transport in recorded:
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        for p in parameters:
            p.grad = torch.rand_like(p)
        inner = torch.optim.SGD(parameters, lr=0.1)
        locals_.append(LocalUpdates(inner, every=1, codec=codec, transport=transport))
        inner.step()
    simulate([local.steps() for local in locals_])
    numel = sum(p.numel() for p in parameters)
    for transport, local in zip(recorded, locals_, strict=True):
        assert transport.sent_bytes == local.counters.sent_bytes
        assert 2 < 8 * transport.sent_bytes / (2 * (size - 1) / size * numel) <= bits
