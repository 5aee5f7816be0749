"""Ranks whose kernels were made from other sources are named when they meet."""

from unittest import mock

import torch
import torch.distributed as dist

import commpress
from commpress.collectives.transports import factory
from commpress.errors import Mismatch

OTHERS = "ffffffffffff" + 20 * "0"


def meet(odd):
    digest = OTHERS if dist.get_rank() == odd else 32 * "0"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    with mock.patch.object(factory, "digest", return_value=digest):
        try:
            commpress.compress(model)
        except Mismatch as error:
            return str(error), error.ranks
    return None


def test_a_rank_with_other_kernels_is_named_on_all_before_anything_is_computed(pool):
    for message, ranks in pool.run(meet, 1, size=3):
        assert ranks == (1,)
        assert "ranks [0, 2] have 000000000000; ranks [1] have ffffffffffff" in message
        assert "same version of commpress" in message


def test_ranks_with_the_same_kernels_meet(pool):
    assert pool.run(meet, None, size=3) == [None] * 3
