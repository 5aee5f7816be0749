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
from commpress.collectives.channel import Channel
from commpress.collectives.transports import factory
from commpress.collectives.transports.loopback import Loopback
from commpress.integrations.fsdp.prefetch import DeferredReductions
from commpress.integrations.fsdp.shard_weights import Gathering
from fsdp_twin import Plan, Session, Trained, equal
from gpu.card_twin import CARD, Stream, card_twin


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


# ---------------------------------------------------------------- threads and streams


def over_torch(overlap: bool) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """Weights over torch's own collectives, which must be called in one order on all ranks; which
    channels have a worker."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(factory, "plainly_gloo", lambda group: False)
        session = Session(Plan(codec="int4", options={"overlap": overlap})).run()
    state = session.state
    channels = [*state.reducing.values(), *state.gathering.values()]
    assert all(channel.inner.ordered for channel in channels)
    return session.trained().parameters, [channel._worker is not None for channel in channels]


def test_ordered_collectives_are_called_by_one_worker(pool):
    results = [pool.run(over_torch, overlap, size=2) for overlap in (True, False)]
    for (late, workers), (prompt, none) in zip(*results, strict=True):
        assert workers == [True, False]
        assert none == [False, False]
        assert all(torch.equal(late[name], prompt[name]) for name in prompt)


class Backward(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call()
        return gradient, None


def test_a_reduction_in_backward_waits_for_every_stream():
    """Torch calls it on a stream of its own, on which it makes the gradient from zeros."""
    with card_twin():
        channel, deferred = Channel(Loopback(1).transport(0)), DeferredReductions()
        theirs, gradients = Stream(name="reduce-scatter"), torch.ones(1000).to(CARD)
        out, made = torch.zeros(1000).to(CARD), torch.empty(1000).to(CARD)

        def steps():
            out.copy_(gradients).mul_(2)
            return True
            yield

        def reduce():
            with torch.no_grad():
                gradients.mul_(3)
                theirs.wait_stream(torch.cuda.current_stream())
                with theirs:
                    deferred.submit(channel, steps(), gradients, out, take=take)
                    made.zero_()

        def take(finite):
            assert finite
            made.add_(out)

        Backward.apply(torch.ones(1, requires_grad=True), reduce).backward()
        assert made.cpu().tolist() == [6.0] * 1000
        channel.close()


def test_a_gather_in_the_background_is_waited_for_by_the_stream_that_computes():
    with card_twin() as twin:
        channel, theirs = Channel(Loopback(1).transport(0)), Stream(name="all-gather")
        row, whole = torch.ones(1000).to(CARD), torch.empty(1000).to(CARD)

        def steps():
            whole.copy_(row).mul_(2)
            return
            yield

        theirs.wait_stream(torch.cuda.current_stream())
        with theirs:
            work = Gathering(channel.submit(steps(), row, whole))
        twin.counts.clear()
        work.wait()
        doubled = whole * 2
        assert twin.counts["waits of the caller"] == 0
        assert doubled.cpu().tolist() == [4.0] * 1000
        channel.close()
