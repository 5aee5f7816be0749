"""Saved residuals of a group, several calls under way, and NCCL's way on a twin."""

import io
import time
from datetime import timedelta
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

import commpress.collectives.allreduce as allreduce
import commpress.integrations.process_group.call as call
import commpress.integrations.process_group.group as group_module
import commpress.integrations.process_group.inner as inner
import commpress.integrations.process_group.reducer as reducer
from commpress.collectives.frame import LateHeaders
from commpress.errors import Mismatch
from commpress.feedback import add_reduced
from commpress.integrations.process_group.group_options import GroupOptions
from group_calls import as_world
from ranks import caught

ROW, STEPS, BAD = 301, 4, 2


def numbers(seed, numel, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_options(file, options, function, *args):
    return as_world("commpress", file, function, *args, pg_options=options)


def counters():
    return dist.group.WORLD.counters.as_dict()


class InBackward(torch.autograd.Function):
    """Calls ``reduce`` on the gradient that comes back."""

    @staticmethod
    def forward(ctx, x, reduce, results):
        ctx.reduce, ctx.results = reduce, results
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.results.append(ctx.reduce(gradient.contiguous()))
        return gradient, None, None


def reduced(gradients, reduce):
    """Results of ``reduce`` for these gradients in one backward, the last one first."""
    results = []
    inputs = [torch.zeros(g.numel(), requires_grad=True, dtype=g.dtype) for g in gradients]
    sum(
        (InBackward.apply(x, reduce, results) * g).sum()
        for x, g in zip(inputs, gradients, strict=True)
    ).backward()
    return results


def summed(gradient, op=dist.ReduceOp.SUM):
    gradient = gradient.clone()
    dist.all_reduce(gradient, op)
    return gradient


# ---------------------------------------------------------------- checkpoints


def trained(first, last, state):
    """Steps of three all-reduces in a backward; the state after them."""
    group, rank, results = dist.group.WORLD, dist.get_rank(), []
    if state is not None:
        group.load_state_dict(*state)
    for step in range(first, last):
        results += reduced([numbers(1000 * step + 10 * i + rank, 906) for i in range(3)], summed)
    file = io.BytesIO()
    torch.save(group.state_dict(), file)
    file.seek(0)
    return results, torch.load(file, weights_only=True)


SEVERAL = pytest.mark.parametrize(
    "options", [GroupOptions("int4", 100), GroupOptions("terngrad", 100)], ids=lambda o: o.codec
)


@SEVERAL
def test_a_run_that_was_saved_goes_on_bit_for_bit(pool, tmp_path, options):
    whole = pool.run(with_options, f"{tmp_path}/whole", options, trained, 0, 6, None, size=3)
    begun = pool.run(with_options, f"{tmp_path}/begun", options, trained, 0, 3, None, size=3)
    states = [state for _, state in begun]
    ended = pool.run(resumed, f"{tmp_path}/ended", options, states, size=3)
    for (expected, last), (before, _), (after, state) in zip(whole, begun, ended, strict=True):
        assert all(map(torch.equal, expected, before + after))
        assert last["calls"] == state["calls"]
        assert last["residuals"].keys() == state["residuals"].keys()
        assert last["residuals"] or options.codec == "terngrad"
        for key, kept in last["residuals"].items():
            assert all(torch.equal(kept[name], state["residuals"][key][name]) for name in kept)


def resumed(file, options, states):
    return with_options(file, options, trained, 3, 6, [states[dist.get_rank()]])


def refusals(states):
    group, rank = dist.group.WORLD, dist.get_rank()
    own, other = states[rank], states[1 - rank]
    wrong = [
        own | {"codecs": {"all_reduce": "int8/256"}},
        other,
        {"format": 1},
        own | {"format": 2},
    ]
    return [str(caught(group.load_state_dict, state)) for state in wrong], group.state_dict()[
        "calls"
    ]


def test_a_state_of_something_else_is_refused_by_name(pool, tmp_path):
    states = [
        state
        for _, state in pool.run(
            with_options, f"{tmp_path}/one", GroupOptions("int4", 100), trained, 0, 1, None, size=2
        )
    ]
    for errors, calls in pool.run(
        with_options, f"{tmp_path}/two", GroupOptions("int4", 100), refusals, states, size=2
    ):
        wanted = (
            "with the codecs",
            "load each rank's own",
            "something else",
            "of another version",
        )
        assert all(text in error for text, error in zip(wanted, errors, strict=True)), errors
        assert calls == {}, "nothing was loaded"


def test_all_reduces_of_another_number_of_ranks_owe_the_same(pool, tmp_path):
    options = GroupOptions("sign", 100)
    states = [
        state
        for _, state in pool.run(with_options, f"{tmp_path}/three", options, summing, None, size=3)
    ]
    for size in (2, 4):
        loaded = pool.run(with_options, f"{tmp_path}/{size}", options, summing, states, size=size)
        torch.testing.assert_close(
            owed([state for _, state in loaded]), owed(states), rtol=1e-5, atol=1e-6
        )


def summing(states):
    """Three steps, or what a state of others becomes."""
    group, rank = dist.group.WORLD, dist.get_rank()
    if states is not None:
        group.load_state_dict(*states)
    for step in range(3 if states is None else 0):
        reduced([numbers(10 * step + rank, 903)], summed)
    return None, group.state_dict()


def owed(states):
    """R of all ranks."""
    total = torch.zeros(903)
    for state in states:
        (kept,) = state["residuals"].values()
        part = kept["sent"].clone()
        add_reduced(part, kept["reduced"], state["rank"], state["size"])
        total += part / len(states)
    return total


# ---------------------------------------------------------------- several at once


def mixed():
    """Compressed and exact calls at once, waited for in another order; then another one on rank
    1."""
    rank = dist.get_rank()
    tensors = [numbers(10 * i + rank, 4000) for i in range(3)]
    works = [dist.all_reduce(x, async_op=True) for x in (*tensors, torch.ones(3))]
    for work in reversed(works):
        work.wait()
    wrong = torch.float32 if rank else torch.bfloat16
    error = caught(dist.all_reduce, torch.ones(2000, dtype=wrong))
    return tensors, error, counters()


def test_several_under_way_at_once_and_a_disagreement_named(pool, tmp_path):
    options = GroupOptions("int8", 100, only="everything")
    one, two = pool.run(with_options, f"{tmp_path}/file", options, mixed, size=2)
    for i, (x, y) in enumerate(zip(one[0], two[0], strict=True)):
        assert torch.equal(x, y)
        total = numbers(10 * i, 4000) + numbers(10 * i + 1, 4000)
        torch.testing.assert_close(x, total, rtol=0, atol=0.1)
    for _, error, counted in (one, two):
        assert isinstance(error, Mismatch)
        assert "2000 bfloat16, sum, codec 'int8/256'" in str(error)
        assert (counted["compressed_calls"], counted["exact_calls"]) == (3, {"small": 1})


# ---------------------------------------------------------------- NCCL's way


class GlooAsNccl(inner.CardTransport):
    """Torch's collectives in an order of their own, without checksums, in a group that torch does
    not know."""

    given_up: ClassVar[list[str]] = []

    def abandon(self, reason):
        self.given_up.append(reason)
        super().abandon(reason)


def gloo_group(store, rank, size, timeout):
    # nothing ends a wait of Gloo's earlier, as NCCL's abort does
    timeout = min(timeout, timedelta(seconds=10))
    kinds, group = dist.ProcessGroup.BackendType, dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(
        torch.device("cpu"), kinds.GLOO, dist.ProcessGroupGloo(store, rank, size, timeout)
    )
    return group


def on_a_twin(file, options, function, *args):
    """As ``with_options``; tensors of the processor go as those on a card do: early, over NCCL,
    headers of rows read late."""
    waits, read, private = [], LateHeaders.read, inner.private_transports
    GlooAsNccl.given_up.clear()

    def with_card(given, store, rank, size, timeout, check):
        card = partial(GlooAsNccl, dist.PrefixStore("card", store), rank, size, timeout)
        return {**private(given, store, rank, size, timeout, check), "card": card}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inner, "card_group", gloo_group)
        patched.setattr(group_module, "private_transports", with_card)
        patched.setattr(reducer.GroupReducer, "_kind", lambda self, device: "card")
        patched.setattr(group_module, "at_once", lambda inner, tensors: bool(tensors))
        patched.setattr(allreduce, "reads_late", lambda *_: True)
        patched.setattr(LateHeaders, "read", lambda self: (waits.append(1), read(self))[1])
        done = with_options(file, options, function, *args)
        return done, len(waits), list(GlooAsNccl.given_up)


@SEVERAL
def test_over_nccl_come_the_bits_of_the_processor(pool, tmp_path, options):
    plain = pool.run(with_options, f"{tmp_path}/plain", options, trained, 0, 4, None, size=3)
    twins = pool.run(on_a_twin, f"{tmp_path}/twin", options, trained, 0, 4, None, size=3)
    for (expected, last), ((results, state), waits, given_up) in zip(plain, twins, strict=True):
        assert all(map(torch.equal, results, expected))
        assert state["calls"] == last["calls"]
        for key, kept in last["residuals"].items():
            assert all(torch.equal(kept[name], state["residuals"][key][name]) for name in kept)
        assert waits == 12, "one wait for an all-reduce"
        assert not given_up


def bad_then_different():
    """NaN on one rank, then another shape on one rank."""
    rank = dist.get_rank()
    x = torch.full((903,), float("nan") if rank == 1 else 1.0)
    dist.all_reduce(x)
    error = caught(dist.all_reduce, torch.ones(903 + rank))
    deadline = time.monotonic() + 30
    while not GlooAsNccl.given_up and time.monotonic() < deadline:  # by the guard's thread
        time.sleep(0.01)
    return x.isnan().all().item(), error, counters()


def test_over_nccl_a_disagreement_is_named_and_ends_what_is_under_way(pool, tmp_path):
    options = GroupOptions("int8", 100, only="everything")
    for (bad, error, counted), _, given_up in pool.run(
        on_a_twin, f"{tmp_path}/file", options, bad_then_different, size=2
    ):
        assert bad
        assert isinstance(error, Mismatch)
        assert "another shape" in str(error) or "903 float32" in str(error)
        assert (counted["skipped_calls"], counted["compressed_calls"]) == (1, 1)
        assert given_up


def by_future():
    """As DDP waits: for the future, not the work."""
    x = torch.full((4000,), 127.0)
    work = dist.all_reduce(x, async_op=True)
    (out,) = work.get_future().wait()
    return out.data_ptr() == x.data_ptr(), x.unique().tolist()


def test_futures_hold_the_tensor_itself(pool, tmp_path):
    options = GroupOptions("int8", 100, only="everything")
    assert (
        pool.run(with_options, f"{tmp_path}/file", options, by_future, size=2)
        == [(True, [254.0])] * 2
    )
    assert [
        seen for seen, *_ in pool.run(on_a_twin, f"{tmp_path}/twin", options, by_future, size=2)
    ] == [(True, [254.0])] * 2


def test_futures_of_calls_on_a_card_are_those_of_its_streams(monkeypatch):
    """Whoever waits for one of them, C++ among them, has its stream wait for the job's."""
    asked = []
    monkeypatch.setattr("commpress.work.torch.futures.Future", lambda **given: asked.append(given))
    work = call.GroupWork(None, lambda work: None, [OnCard()])
    work.get_future()
    assert asked == [{"devices": [torch.device("cuda", 0)]}]


class OnCard:
    """Stand-in for a tensor."""

    device = torch.device("cuda", 0)
    is_cuda = True


def test_tensors_on_cuda_go_over_nccl_where_it_is_and_by_the_host_where_not(monkeypatch):
    here, store = dist.ProcessGroup(dist.HashStore(), 0, 1), dist.HashStore()
    for available, kinds in ((True, {"cpu", "cuda"}), (False, {"cpu"})):
        monkeypatch.setattr(inner, "has_nccl", lambda available=available: available)
        assert inner.private_transports(here, store, 0, 1, timedelta(seconds=1)).keys() == kinds
        assert inner.at_once(here, [OnCard()]) == available
    monkeypatch.setattr(inner, "has_nccl", lambda: True)
    assert inner.private_transports(object(), store, 0, 1, timedelta(seconds=1)).keys() == {
        "cpu"
    }, "over MPI"
