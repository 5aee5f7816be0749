"""Ranks that disagree, die, fall silent or send rubbish are named, by everybody else, in time."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import codec_named
from commpress.collectives.allreduce import Call, Workspace, compressed_allreduce, reduce_message
from commpress.collectives.buckets import one_message
from commpress.collectives.frame import ALL_TO_ALL, Frame
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import CommunicationError, Corrupted, Mismatch, PeerFailure
from commpress.work import run
from faulty import Faulty
from ranks import meet
from variants import few
from ways import transport_by

PATIENT = timedelta(seconds=60)
NUMEL = 5000


def reduce(transport, *, codec="sign", numel=NUMEL, name="", sequence=0):
    """One message; ``name`` is what a parameter's name is to a hook."""
    message = one_message(numel, codec_named(codec), transport.size, name=name)
    steps = reduce_message(
        torch.ones(numel),
        None,
        message=message,
        call=Call(transport=transport, workspace=Workspace(), sequence=sequence),
    )
    return run(steps)


def frame(size, *, codec="sign", numel=NUMEL, name="", sequence=0, checked=True):
    label = one_message(1, codec_named(codec), size, name=name).label
    return Frame(ALL_TO_ALL, size, codec_named(codec).spec, numel, sequence, label, checked=checked)


def caught(function, *args, **kwargs):
    """The error, when the call was issued and when it raised, in seconds of the machine's clock."""
    start = time.monotonic()
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error, start, time.monotonic()
    raise AssertionError("nothing was raised")


# ---------------------------------------------------------------- disagreement


def disagree(calls, way):
    """One good exchange, then what each rank takes to be the next one, then one more."""
    transport = transport_by(way, PATIENT)
    reduce(transport, sequence=0)
    dist.barrier()
    outcome = caught(reduce, transport, **calls[dist.get_rank()])
    dist.barrier()
    again = caught(reduce, transport)[0] if way != "collectives" else None
    return *outcome, again


DISAGREEMENTS = {
    "codec": ({"codec": "sign"}, {"codec": "int8"}),
    "scale": ({"codec": "sign"}, {"codec": "sign-l1"}),
    "size": ({"numel": 5000}, {"numel": 5008}),
    "far larger": ({"numel": 5000}, {"numel": 3_000_000}),
    "order": ({"name": "first.weight"}, {"name": "second.weight"}),
}


@pytest.mark.parametrize(("what", "size"), few(DISAGREEMENTS, [2, 3]), ids=str)
def test_disagreement_is_named_on_both_sides_at_once(pool, what, size):
    """Rank 1 is the odd one out: it sees all others differ, they see only rank 1. Within a second
    of the last call. The transport is not used again: payloads that nobody took would be taken for
    those of the next call."""
    ours, theirs = ({"sequence": 1, **call} for call in DISAGREEMENTS[what])
    calls = [theirs if rank == 1 else ours for rank in range(size)]
    seconds = []
    for _ in range(10):  # a loaded machine may hold a process up
        outcomes = pool.run(disagree, calls, "sockets", size=size)
        for rank, (error, _, _, again) in enumerate(outcomes):
            assert type(error) is Mismatch, error
            assert type(again) is CommunicationError
            for said in ("failed before: the ranks disagreed", "build a new one"):
                assert said in str(again)
            others = tuple(r for r in range(size) if calls[r] != calls[rank])
            assert error.ranks == others
            expected = f"rank {rank} expected {frame(size, **calls[rank]).describe()}, but "
            got = "; ".join(f"rank {r} sent {frame(size, **calls[r]).describe()}" for r in others)
            assert str(error).startswith(expected + got)
        issued = max(start for _, start, *_ in outcomes)
        seconds.append(max(end for _, _, end, _ in outcomes) - issued)
        if seconds[-1] < 1.0:
            return
    pytest.fail(f"seconds until every rank knew: {seconds}")


@pytest.mark.parametrize("what", ["codec", "far larger", "order"])
def test_torchs_collectives_are_not_entered_with_other_rows(pool, what):
    """Rows of different size would hang or end the process."""
    calls = [{"sequence": 1, **call} for call in DISAGREEMENTS[what]]
    for rank, (error, *_) in enumerate(pool.run(disagree, calls, "collectives")):
        assert type(error) is Mismatch, error
        assert error.ranks == (1 - rank,)
        mine, theirs = (frame(2, checked=False, **calls[r]).describe() for r in (rank, 1 - rank))
        if what != "order":
            assert f"rank {rank} sends {mine} in rows of " in str(error)
            assert f"but rank {1 - rank} sends {theirs} in rows of " in str(error)


# ---------------------------------------------------------------- through DistributedDataParallel


def linear(width=64, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
    )
    return DistributedDataParallel(model, **options), model


def backward(ddp, width=64):
    ddp(torch.ones(2, width)).sum().backward()


def train_unlike(what, options):
    """With another codec on rank 1, or where rank 0 saves an elastic state, which is a
    collective."""
    ddp, _ = linear(**options)
    codecs = ["sign", "int8" if what == "codec" else "sign", "sign"]
    state = commpress.compress(ddp, codecs[dist.get_rank()], min_numel=8)
    if what == "alone":
        for _ in range(2):  # the second one rebuilds DDP's buckets, a collective of its own
            backward(ddp)
    saves = what == "alone" and dist.get_rank() == 0
    outcome = caught(state.elastic_state_dict) if saves else caught(backward, ddp)
    meet("all know", dist.get_world_size())
    return outcome[:1]  # an error by itself would be raised


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"bucket_cap_mb": 0.01}], ids=str)
def test_backward_raises_the_error_itself(pool, options):
    """Not DDP's "Unable to cast": in the usual backward, in the first one of a static graph, with
    several buckets."""
    for rank, (error,) in enumerate(pool.run(train_unlike, "codec", options, size=3)):
        assert type(error) is Mismatch, error
        assert error.ranks == ((1,) if rank != 1 else (0, 2))
        for said in (f"rank {rank} expected all_to_all number 0 ", "'sign/rms/2048'", "'int8/256'"):
            assert said in str(error)


def test_a_collective_that_one_rank_calls_alone_is_named(pool):
    for rank, (error,) in enumerate(pool.run(train_unlike, "alone", {})):
        assert type(error) is Mismatch, error
        assert error.ranks == (1 - rank,)


# ---------------------------------------------------------------- death and silence


def lose_a_rank(how, sequence, seconds, way):
    """Rank 2 ends or stops itself before its operation number ``sequence``; the others say what
    they see."""
    transport = transport_by(way, timedelta(seconds=seconds))
    for i in range(sequence):
        reduce(transport, sequence=i)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), how)
    outcome = caught(reduce, transport, sequence=sequence)
    again = caught(reduce, transport, sequence=sequence + 1)[0]
    meet("both know", 2)  # or the first to leave would look dead to the other
    return *outcome, again


@pytest.mark.parametrize(
    ("how", "seconds", "way", "says", "least", "most"),
    [
        (signal.SIGKILL, 60, "sockets", "rank 2 closed its connection", 0, 30),
        (signal.SIGSTOP, 3, "sockets", "rank 2 was silent for 3.", 2.9, 13),
        (signal.SIGKILL, 60, "collectives", "a collective failed: ", 0, 30),
        (signal.SIGKILL, 60, "device", "rank 2 closed its connection", 0, 30),
        (signal.SIGSTOP, 3, "device", "rank 2 was silent for 3.", 2.9, 13),
    ],
)
def test_a_lost_rank_is_named(mortal, how, seconds, way, says, least, most):
    """A dead one without waiting for the timeout, a silent one when it is over. torch's collectives
    do not tell which rank it was."""
    first, second, _ = mortal.outcomes(lose_a_rank, how, 2, seconds, way, size=3, lost=[2])
    for error, start, end, again in (first, second):
        assert type(error) is PeerFailure, error
        assert error.ranks == ((2,) if way != "collectives" else error.ranks)
        assert says in str(error)
        assert least <= end - start < most
        assert type(again) is CommunicationError
        assert "failed before" in str(again)


def wait_for_a_device(how, seconds, work):
    """Rank 1 goes while the others wait for their device, which never ends; unless it has ``work``
    for so many looks only."""
    transport = transport_by("device", timedelta(seconds=seconds))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), how)
    looks = []

    def done():
        looks.append(0)
        return 0 < work < len(looks)

    if work:
        time.sleep(1.0)  # until rank 1 is gone
        transport.until(done)
        return None
    return *caught(transport.until, done), caught(reduce, transport)[0]


@pytest.mark.parametrize(
    ("how", "seconds", "says", "ranks", "least", "most"),
    [
        (signal.SIGKILL, 60, "rank 1 closed its connection", (1,), 5, 30),
        (signal.SIGSTOP, 2, "a collective on a device did not end within 2.", (), 2, 10),
    ],
)
def test_nobody_waits_for_a_device_whose_peer_is_gone(
    mortal, how, seconds, says, ranks, least, most
):
    """The wait ends, and the transport, once what the peer had sent before can no longer come."""
    first, _, third = mortal.outcomes(wait_for_a_device, how, seconds, 0, size=3, lost=[1])
    for error, start, end, again in (first, third):
        assert type(error) is PeerFailure, error
        assert error.ranks == ranks
        assert says in str(error)
        assert least <= end - start < most
        assert "failed before" in str(again)


def test_what_a_peer_had_sent_before_it_went_is_waited_for(mortal):
    first, _, third = mortal.outcomes(wait_for_a_device, signal.SIGKILL, 60, 500, size=3, lost=[1])
    assert first is third is None


def lose_a_rank_in_backward(how, seconds):
    """Rank 2 has reduced the bucket of its last layer with the others when it goes, and owes them
    the next."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    ddp, model = linear(bucket_cap_mb=0.01, process_group=group)
    commpress.compress(ddp, min_numel=8)
    for _ in range(3):
        backward(ddp)
    if dist.get_rank() == 2:

        def go(gradient):
            time.sleep(0.5)
            os.kill(os.getpid(), how)

        model[0].weight.register_hook(go)
    outcome = caught(backward, ddp)
    meet("both know", 2)
    return outcome


@pytest.mark.parametrize(
    ("how", "seconds"), [(signal.SIGKILL, 60), (signal.SIGSTOP, 3)], ids=["killed", "stopped"]
)
def test_backward_names_the_rank_that_went(mortal, how, seconds):
    first, second, _ = mortal.outcomes(lose_a_rank_in_backward, how, seconds, size=3, lost=[2])
    for error, start, end in (first, second):
        assert type(error) is PeerFailure, error
        assert error.ranks == (2,)
        assert end - start < 30


# ---------------------------------------------------------------- rubbish


def deface(rows):
    rows[:, 9] ^= 0x10


def test_any_test_can_break_any_rank_of_a_simulation():
    """``Faulty`` without a process; a rank that is missing is named."""
    for fault, error, says in (
        (deface, Corrupted, r"rank 0 expected all_gather number 0 .* rank 1 sent bytes that are"),
        (OSError("cable"), OSError, "cable"),
        (None, PeerFailure, r"no message number 0 from ranks \[2\]"),
    ):
        transports = Loopback(3).transports()
        if fault is None:
            transports.pop()
        else:
            transports[1] = Faulty(transports[1], after=1, fault=fault)
        with pytest.raises(error, match=says):
            simulate(
                [compressed_allreduce(torch.ones(9), codec="sign", transport=t) for t in transports]
            )
