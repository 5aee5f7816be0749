"""States passed along the ranks against their sums in one process, and what trains on them."""

import pytest
import torch
import torch.distributed as dist

from gallery import gallery

pytestmark = pytest.mark.slow


def drawn(size):
    generator = torch.Generator().manual_seed(0)
    states, gradients = torch.randn(2, size, 3, 4, 4, dtype=torch.float64, generator=generator)
    return states, gradients, torch.rand(size, 3, 1, 1, dtype=torch.float64, generator=generator)


def passed():
    states, gradients, decays = (part[dist.get_rank()] for part in drawn(dist.get_world_size()))
    states.requires_grad_()
    before = gallery("lasp").Chain().prefix(states, decays)
    before.backward(gradients)
    return before.detach(), states.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_states_are_passed_on(pool, size):
    """The decayed sum of all states before, bit for bit, and its transpose for gradients."""
    states, gradients, decays = drawn(size)
    states.requires_grad_()
    before, truth = torch.zeros_like(states[0]), []
    for r in range(size):
        truth.append(before)
        before = before * decays[r] + states[r]
    (torch.stack(truth) + 0 * states).backward(gradients)
    found = pool.run(passed, size=size)
    for r, (own, gradient) in enumerate(found):
        assert torch.equal(own, truth[r])
        torch.testing.assert_close(gradient, states.grad[r], atol=1e-12, rtol=0)


def trained(codec, length):
    names = gallery("lasp")
    losses, chain = names.train(20, codec, length=length)
    return losses, names.train(20, length=length)[0], chain.sent_bytes


def test_a_model_trains_as_in_one_process_and_bytes_do_not_depend_on_the_length(pool):
    short, long, coded = (
        pool.run(trained, *how, size=3) for how in (("none", 50), ("none", 300), ("int8", 50))
    )
    for found, near in ((short, 1e-4), (long, 1e-3), (coded, 0.05)):
        for losses, alone, _ in found:
            assert losses == pytest.approx(alone, abs=near)
            assert losses[-1] < 0.3 * losses[0]
    assert short[1][2] == long[1][2] > 3.5 * coded[1][2]
