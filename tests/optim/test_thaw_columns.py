"""Tensor-parallel columns whose own tensors wake up at different times: weights that both hold stay
the same in every bit.

Two columns of two ranks each, which reduce apart and agree over all four. Parameters are a weight
that all hold, another that all hold and that has no gradient for a while, and a shard of which each
column has its own.
"""

import pytest
import torch

from commpress.collectives.agreement import Consensus
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.optim import (
    OneBitAdam,
    OneBitLamb,
    ShardedOneBitAdam,
    ShardedZeroOneAdam,
    ZeroOneAdam,
)
from commpress.schedules import DoublingIntervals
from optim_twin import start

SHAPES = ((40, 32), (30, 16), (24, 40))
# the steps from which on the late one has gradients, and those of all are far larger
LATE, JUMP = 14, 20
WINDOWS = {"sync": DoublingIntervals(4, 100, longest=2), "variance_updates": 2}
WARM = {"exact_steps": 6}


class Columns:
    def __init__(self, make, **options):
        self.parameters, self.optimizers = [], []
        everybody = Loopback(4).transports()
        for column in range(2):
            for transport in Loopback(2).transports():
                weights = start(SHAPES)
                weights[2] *= 1 + column
                parameters = [torch.nn.Parameter(w) for w in weights]
                optimizer = make(
                    parameters,
                    transport=transport,
                    lr=1e-2,
                    betas=(0.9, 0.99),
                    min_numel=64,
                    spiky_codec=None,
                    **options,
                )
                optimizer.consensus = Consensus(everybody[len(self.optimizers)])
                self.parameters.append(parameters)
                self.optimizers.append(optimizer)

    def step(self, number):
        for rank, parameters in enumerate(self.parameters):
            column, replica = divmod(rank, 2)
            # the shard of the first column a step before all others
            jumps = number >= JUMP - (column == 0), number >= JUMP
            own, late, shard = start(SHAPES, 100 * number + replica)
            parameters[0].grad = own * (1e4 if jumps[1] else 1)
            parameters[1].grad = late if number >= LATE else torch.zeros_like(late)
            parameters[2].grad = shard * (10.0**column) * (1e4 if jumps[0] else 1)
        with torch.no_grad():
            assert simulate([o.steps() for o in self.optimizers]) == [True] * 4

    def equal(self):
        first = self.parameters[0][:2]
        return all(
            torch.equal(p, q)
            for mine in self.parameters[1:]
            for p, q in zip(mine[:2], first, strict=True)
        )


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (OneBitAdam, WARM),
        (OneBitLamb, WARM),
        (ShardedOneBitAdam, WARM),
        (ZeroOneAdam, WINDOWS),
        (ShardedZeroOneAdam, WINDOWS),
    ],
    ids=lambda made: getattr(made, "__name__", ""),
)
def test_weights_of_all_columns_stay_the_same(make, options):
    columns = Columns(make, **options)
    for number in range(30):
        columns.step(number)
        if hasattr(columns.optimizers[0], "windows") and columns.optimizers[0].windows.held:
            continue
        assert columns.equal(), number
    states = [o.tensors for o in columns.optimizers]
    if options is WARM:
        woken = torch.stack([each.thawed_at for each in states])
        assert (woken[:, 0] == woken[0, 0]).all()
        assert woken[0, 0] > JUMP, "what all hold has woken up"
        assert 0 < woken[0, 2] < woken[2, 2], "a shard earlier in one column"
    assert not torch.equal(columns.parameters[0][1], start(SHAPES)[1]), "the late one has moved"
