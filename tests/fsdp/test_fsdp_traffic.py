"""FSDP2: what travels when, and what the overlap of communication with computing must not
change."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import commpress
from commpress import torch_private
from fsdp_twin import Plan, Session, Trained, equal


def weights_sent(plan: Plan) -> tuple[list[int], Trained]:
    """Bytes of weights in each step."""
    torch.set_num_threads(1)
    session, sent = Session(plan), [0]
    for step in range(plan.steps):
        session.step(step)
        sent.append(session.state.weights.wire_bytes)
    return [b - a for a, b in pairwise(sent)], session.trained()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_kept_from_forward_are_those_that_would_be_sent_again(pool, dtype):
    options = {"recompute": True, "dtype": dtype, "clip": 1.0}
    kept = pool.run(weights_sent, Plan(**options), size=2)
    again = pool.run(weights_sent, Plan(**options, options={"regather": True}), size=2)
    alone = pool.run(weights_sent, Plan(**options, options={"overlap": False}), size=2)
    for (few, one), (many, two), (same, three) in zip(kept, again, alone, strict=True):
        equal(one, two)
        equal(one, three)
        assert few == same
        # the root's are gathered once either way
        assert all(1.4 * a < b < 2 * a for a, b in zip(few, many, strict=True))


def looked_at() -> tuple[list[int], list[torch.Tensor]]:
    """Bytes and outputs of: a first look, a second, one after a rank has changed its weights,
    another."""
    torch.set_num_threads(1)
    session = Session(Plan(steps=2)).run()
    sent, outputs, x = [session.state.weights.wire_bytes], [], torch.arange(6)
    for change in (False, False, True, False):
        with torch.no_grad():
            if change and dist.get_rank() == 1:
                for parameter in session.model.parameters():
                    parameter.to_local().mul_(1.5)
            outputs.append(session.model(x))
        session.model.reshard()
        sent.append(session.state.weights.wire_bytes)
    return [b - a for a, b in pairwise(sent)], outputs


def test_evaluation_sends_weights_only_if_a_rank_has_changed_them(pool):
    results = pool.run(looked_at, size=2)
    for (first, second, changed, last), outputs in results:
        assert 0 < second < 0.5 * first
        assert changed > 2 * second
        assert last == second
        assert torch.equal(outputs[0], outputs[1])
        assert not torch.equal(outputs[1], outputs[2])
        assert torch.equal(outputs[2], outputs[3])
        assert all(torch.equal(*both) for both in zip(outputs, results[0][1], strict=True))


def _logical(reduce_dtype) -> tuple[int, int]:
    """Bytes of one step's gradients as torch would have sent them, and as they went."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    fully_shard(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    )
    state = commpress.compress_fsdp(model, codec="int8", weights=None, overlap=False)
    model(torch.ones(2, 64)).float().sum().backward()
    return state.gradients.logical_bytes, state.gradients.wire_bytes


def test_the_baseline_is_what_this_torch_would_send(pool):
    """Since 2.14 FSDP2 reduces in float32 unless told otherwise: the baseline doubles, what we send
    does not."""
    (unsaid, sent), *_ = pool.run(_logical, None, size=2)
    (told, as_told), *_ = pool.run(_logical, torch.bfloat16, size=2)
    (float32, _), *_ = pool.run(_logical, torch.float32, size=2)
    assert float32 == 2 * told
    assert unsaid == (float32 if torch_private.RELEASE >= (2, 14) else told)
    assert sent == as_told


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("broken")


def interrupted(compressed: bool) -> Trained:
    """After two steps a backward that fails halfway, its gradients thrown away; two more."""
    torch.set_num_threads(1)
    session = Session(Plan(codec="none", weights=None, steps=2, compressed=compressed)).run()
    hook = session.model.blocks[0].register_forward_hook(
        lambda _module, _args, out: Broken.apply(out)
    )
    with pytest.raises(ArithmeticError):
        session.backward(7)
    hook.remove()
    session.model.reset_iter_state()
    session.optimizer.zero_grad()
    for step in (2, 3):
        session.step(step)
    return session.trained()


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="torch has no way back from a failed backward",
)
def test_gradients_of_a_backward_that_failed_never_land(pool):
    plain, ours = (pool.run(interrupted, compressed, size=2) for compressed in (False, True))
    for one, two in zip(plain, ours, strict=True):
        equal(one, two)


def watched() -> tuple[bool, list[bool]]:
    """True if a hook that reads a gradient during backward sees it; which units gather ahead before
    and in the second step."""
    torch.set_num_threads(1)
    seen = []
    session = Session(Plan(steps=1)).run()
    before = [each.prefetches for each in session.state.param_groups]
    session.model.head.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(float(p.grad.to_local().abs().sum()))
    )
    session.step(1)
    return seen[0] > 0, [*before, *(each.prefetches for each in session.state.param_groups)]


def test_a_hook_sees_its_gradient_and_units_gather_ahead_from_the_second_step_on(pool):
    for seen, prefetches in pool.run(watched, size=2):
        assert seen
        assert prefetches == [False] * 3 + [True, True, False]


def set_by_hand() -> list[int]:
    session = Session(Plan(steps=0))
    first, second = session.model.blocks
    first.set_modules_to_forward_prefetch([second])
    for step in range(2):
        session.step(step)
    return [each.prefetches for each in session.state.param_groups]


def test_prefetching_set_by_the_user_stays(pool):
    assert pool.run(set_by_hand, size=2) == [[False, True, False]] * 2


def optimizer_in_backward(overlap: bool) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    session = Session(Plan(steps=0, lr=0.0, options={"overlap": overlap}))

    def update(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter.to_local().sub_(0.1 * parameter.grad.to_local())
        parameter.grad = None

    for parameter in session.model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(3):
        session.backward(step)
    return {name: p.full_tensor().detach() for name, p in session.model.named_parameters()}


def test_an_optimizer_in_backward_works(pool):
    late, prompt = (pool.run(optimizer_in_backward, overlap, size=2) for overlap in (True, False))
    for one, two in zip(late, prompt, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
