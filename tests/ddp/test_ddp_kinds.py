"""Parameters whose gradients no codec knows (float64, complex, sparse) travel as torch sends them,
the others compressed."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.collectives.channel import Counters
from commpress.errors import NonFiniteGradient

ODD = ("double", "complex", "sparse")


class Mixed(nn.Module):
    """Branches of their own, so that each weight's path depends on no other."""

    def __init__(self, kinds):
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Linear(24, 24)
        if "double" in kinds:
            self.wide = nn.Linear(24, 5, dtype=torch.float64)
        if "complex" in kinds:
            self.phases = nn.Parameter(torch.randn(24, 3, dtype=torch.complex64))
        if "sparse" in kinds:
            self.words = nn.Embedding(20, 4, sparse=True)

    def forward(self, x, words):
        parts = [self.plain(x).square().mean()]
        if hasattr(self, "wide"):
            parts.append(self.wide(x.double()).square().mean())
        if hasattr(self, "phases"):
            parts.append((x.to(torch.complex64) @ self.phases).abs().square().mean())
        if hasattr(self, "words"):
            parts.append(self.words(words).square().mean())
        return sum(parts)


def train(hook, kinds, options, bad=()):
    """Weights after four steps, the counters, and the steps that raised."""
    model = Mixed(kinds)
    ddp = DistributedDataParallel(model)
    state = commpress.compress(ddp, min_numel=1, **options) if hook == "commpress" else None
    if state is None:
        ddp.register_comm_hook(None, allreduce_hook)
    optimizer, raised = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x, words = (
            torch.randn(6, 24, generator=generator),
            torch.randint(20, (7,), generator=generator),
        )
        loss = ddp(x, words)
        try:
            (loss * float("nan") if step in bad and dist.get_rank() == 1 else loss).backward()
            optimizer.step()
        except NonFiniteGradient:
            raised.append(step)
        optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, state.counters.as_dict() if state else {}, raised


@pytest.mark.parametrize(
    ("kinds", "options", "size"),
    [
        (("double",), {}, 2),
        (("complex",), {}, 2),
        (("sparse",), {}, 2),
        (ODD, {}, 3),
        (ODD, {"codec": "int8", "topology": "2x2"}, 4),
    ],
    ids=["float64", "complex", "sparse", "all", "all, between nodes"],
)
def test_they_are_averaged_as_torch_does_and_the_rest_is_compressed(pool, kinds, options, size):
    results = pool.run(train, "commpress", kinds, options, size=size)
    torchs = pool.run(train, "torch", kinds, {}, size=size)
    for (weights, counters, _), (expected, _, _) in zip(results, torchs, strict=True):
        for name, weight in weights.items():
            assert torch.equal(weight, results[0][0][name])
            assert torch.equal(weight, expected[name]) == (not name.startswith("plain")), name
        elements = {"double": 4 * 5 * 25, "complex": 4 * 24 * 3 * 2}
        dense = sum(elements.get(kind, 0) for kind in kinds)
        # of what is sparse, as many as the words of this rank
        rows = counters["plain_elements"] - dense
        assert rows == (4 * 7 * 4 if "sparse" in kinds else 0)
        assert counters["compressed_elements"] == 4 * 24 * 25
        assert (
            "averaged by torch"
            in Counters(**{k: v for k, v in counters.items() if k != "ratio"}).summary()
        )


@pytest.mark.parametrize("kind", ODD)
def test_what_is_not_finite_in_them_reaches_no_weight(pool, kind):
    for weights, counters, raised in pool.run(train, "commpress", (kind,), {"codec": "none"}, (2,)):
        assert all(
            torch.isfinite(torch.view_as_real(w) if w.is_complex() else w).all()
            for w in weights.values()
        )
        assert (counters["skipped_steps"], counters["skipped_buckets"], raised) == (1, 2, [])
    for _weights, counters, raised in pool.run(
        train, "commpress", (kind,), {"on_nonfinite": "raise"}, (2,)
    ):
        assert (counters["skipped_steps"], raised) == (1, [2])
