"""Replicas without a hook in an elastic run: the mean over the ranks there are."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commpress.integrations.elastic.exact_means import ExactMeans, exact_means_hook


def averaged():
    """Gradients of two backward passes in buckets of one parameter."""
    model = DistributedDataParallel(torch.nn.Linear(2, 3), bucket_cap_mb=1e-6)
    model.register_comm_hook(ExactMeans(dist.group.WORLD), exact_means_hook)
    found = []
    for step in range(2):
        model.zero_grad()
        model(torch.full((1, 2), float(dist.get_rank() + step))).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def test_gradients_are_means_over_the_ranks(pool):
    for first, second in pool.run(averaged, size=3):
        for (weight, bias), mean in ((first, 1.0), (second, 2.0)):
            torch.testing.assert_close(weight, torch.full((3, 2), mean))
            torch.testing.assert_close(bias, torch.ones(3))
