"""Sketched SGD of the gallery: linear tables, and momentum SGD where nothing is left out."""

import pytest
import torch
import torch.distributed as dist

from gallery import gallery


def test_the_sum_of_sketches_is_the_sketch_of_the_sum_and_shows_large_elements():
    sketch = gallery("sketched_sgd").CountSketch(5000, 5, 400)
    x, y = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) / 100
    x[17], y[4000] = 3.0, -5.0
    torch.testing.assert_close(sketch.of(x) + sketch.of(y), sketch.of(x + y))
    found = sketch.estimate(sketch.of(x) + sketch.of(y))
    assert set(found.abs().topk(2).indices.tolist()) == {17, 4000}
    assert abs(found[4000] + 5.0) < 0.5


def stepped(k):
    """Weights after six steps, and what is applied and waits against what came."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(30, 10))
    twin = torch.nn.Parameter(weight.detach().clone())
    optimizer = gallery("sketched_sgd").SketchedSGD([weight], 0.1, k=k, columns=300)
    plain = torch.optim.SGD([twin], 0.1, momentum=0.0)
    for step in range(6):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        weight.grad = torch.randn(30, 10, generator=draw)
        twin.grad = weight.grad.clone()
        dist.all_reduce(twin.grad)
        twin.grad /= dist.get_world_size()
        optimizer.step()
        plain.step()
    return weight.detach().clone(), twin.detach().clone(), int((weight != twin).sum())


def test_with_all_elements_it_is_sgd(pool):
    """Everything moves at once, so nothing is left of momentum either."""
    ranks = pool.run(stepped, 300)
    for ours, plain, _ in ranks:
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_ranks_stay_equal_where_elements_wait(pool):
    (ours, _, different), (others, _, _) = pool.run(stepped, 20)
    assert torch.equal(ours, others)
    assert different > 0


def learnt():
    losses, _, share = gallery("sketched_sgd").train(400)
    return losses[0], losses[-1], share


@pytest.mark.slow
def test_it_learns_from_a_fifth_of_the_floats(pool):
    for first, last, share in pool.run(learnt):
        assert last < first / 100
        assert share < 0.2
