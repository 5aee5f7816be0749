"""Training with one bit follows training without compression, and does not when error feedback is
off.

Four simulated ranks, the production collective, the demo's model and text. The bar is the spread
that five seeds of the uncompressed run show among themselves.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from commpress.cli.gpt import GPT, batch, standard_library
from commpress.codecs import ByName, BySize
from commpress.collectives.allreduce import Call, Workspace, reduce_bucket
from commpress.collectives.buckets import Span, messages
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.feedback import ResidualStore

RANKS, STEPS, WARM, EXACT, LR, MOMENTUM = 4, 3000, 20, 450, 0.02, 0.9


class Ranks:
    """The four ranks' residuals and the collective between them."""

    def __init__(self, model: GPT, *, feedback: bool) -> None:
        spans, at = [], 0
        for name, p in model.named_parameters():
            spans.append(Span(name, at, p.numel()))
            at += p.numel()
        self.plan = messages(
            spans, BySize(ByName({"^head": "int8"}, "sign"), 256), RANKS, feedback=feedback
        )
        stores = [ResidualStore() for _ in range(RANKS)]
        self.feedbacks = [
            [s.attach(m.keys, m.pieces, torch.device("cpu")) for m in self.plan] for s in stores
        ]
        self.workspaces, self.transports = (
            [Workspace() for _ in range(RANKS)],
            Loopback(RANKS).transports(),
        )

    def mean(self, gradients: list[torch.Tensor], step: int) -> torch.Tensor:
        outcomes = simulate(
            [
                reduce_bucket(
                    gradients[r],
                    self.feedbacks[r],
                    messages=self.plan,
                    call=Call(
                        transport=self.transports[r],
                        workspace=self.workspaces[r],
                        sequence=step * len(self.plan),
                    ),
                )
                for r in range(RANKS)
            ]
        )
        for outcome in (o for rank in outcomes for o in rank):
            assert outcome.finite
            outcome.commit()
        return gradients[0]


def train(seed: int, *, compressed: bool, feedback: bool = True) -> float:
    """The mean loss over the last tenth of the steps, in nats per byte."""
    torch.manual_seed(seed)
    model = GPT(width=32, layers=2, length=32)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=LR, momentum=MOMENTUM)
    ranks = Ranks(model, feedback=feedback)
    text, draws = (
        standard_library(2.0),
        [torch.Generator().manual_seed(100 * seed + r) for r in range(RANKS)],
    )
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / WARM) * (1 - step / STEPS)
        batches = [batch(text, 4, 32, g) for g in draws]
        optimizer.zero_grad()
        if not compressed or step < EXACT:  # the mean over ranks is that over one large batch
            loss = model(*(torch.cat(part) for part in zip(*batches, strict=True)))
            loss.backward()
            losses.append(loss.item())
        else:
            gradients = []
            for x, y in batches:
                loss = model(x, y)
                gradients.append(
                    torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
                )
                losses.append(loss.item())
            mean = ranks.mean(gradients, step)
            for p, part in zip(
                parameters, mean.split([p.numel() for p in parameters]), strict=True
            ):
                p.grad = part.view_as(p)
        optimizer.step()
    last = losses[-STEPS // 10 * (RANKS if compressed else 1) :]
    return sum(last) / len(last)


def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    """Final losses of all runs, trained side by side on the machine's cores."""
    wanted = {
        "one bit": [(seed, True, True) for seed in range(1, 6)],
        "no feedback": [(seed, True, False) for seed in (1, 2)],
        "plain": [(seed, False, True) for seed in range(1, 6)],
    }
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), one_thread) as pool:
        futures = {
            name: [
                pool.submit(train, seed, compressed=compressed, feedback=feedback)
                for seed, compressed, feedback in runs
            ]
            for name, runs in wanted.items()
        }
        return {name: [future.result() for future in group] for name, group in futures.items()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_bit_ends_within_the_spread_of_uncompressed_seeds(losses):
    mean = sum(losses["one bit"]) / 5
    assert min(losses["plain"]) <= mean <= max(losses["plain"]), losses


@pytest.mark.slow
def test_without_error_feedback_it_does_not(losses):
    mean = sum(losses["no feedback"]) / 2
    assert not min(losses["plain"]) <= mean <= max(losses["plain"]), losses
    assert min(losses["no feedback"]) > max(losses["plain"]), losses
