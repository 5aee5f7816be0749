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
from commpress.codecs.family import NAMES
from commpress.collectives.allreduce import Workspace, compressed_allreduce, reduce_message
from commpress.collectives.buckets import one_message
from commpress.collectives.frame import ALL_GATHER, ALL_TO_ALL, HEADER, Frame
from commpress.collectives.transports.loopback import Faulty, Loopback, simulate
from commpress.errors import CommunicationError, Corrupted, Mismatch, PeerFailure
from commpress.work import run
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
        transport=transport,
        workspace=Workspace(),
        sequence=sequence,
    )
    return run(steps)


def frame(
    size, *, operation=ALL_TO_ALL, codec="sign", numel=NUMEL, name="", sequence=0, checked=True
):
    label = one_message(1, codec_named(codec), size, name=name).label
    return Frame(operation, size, codec_named(codec).spec, numel, sequence, label, checked=checked)


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
    """One good exchange, then what each rank takes to be the next one; then nothing goes any
    more."""
    transport = transport_by(way, PATIENT)
    reduce(transport, sequence=0)
    dist.barrier()
    outcome = caught(reduce, transport, **calls[dist.get_rank()])
    dist.barrier()
    return outcome


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
    of the last call."""
    ours, theirs = ({"sequence": 1, **call} for call in DISAGREEMENTS[what])
    calls = [theirs if rank == 1 else ours for rank in range(size)]
    seconds = []
    for _ in range(10):  # a loaded machine may hold a process up
        outcomes = pool.run(disagree, calls, "sockets", size=size)
        for rank, (error, _, _) in enumerate(outcomes):
            assert type(error) is Mismatch, error
            others = tuple(r for r in range(size) if calls[r] != calls[rank])
            assert error.ranks == others
            expected = f"rank {rank} expected {frame(size, **calls[rank]).describe()}, but "
            got = "; ".join(f"rank {r} sent {frame(size, **calls[r]).describe()}" for r in others)
            assert str(error).startswith(expected + got)
        issued = max(start for _, start, _ in outcomes)
        seconds.append(max(end for _, _, end in outcomes) - issued)
        if seconds[-1] < 1.0:
            return
    pytest.fail(f"seconds until every rank knew: {seconds}")


@pytest.mark.parametrize("what", ["codec", "size", "far larger"])
def test_torchs_collectives_are_not_entered_with_rows_of_different_size(pool, what):
    """They would hang or end the process."""
    calls = [{"sequence": 1, **call} for call in DISAGREEMENTS[what]]
    for rank, (error, _, _) in enumerate(pool.run(disagree, calls, "collectives")):
        assert type(error) is Mismatch, error
        assert error.ranks == (1 - rank,)
        mine, theirs = (frame(2, checked=False, **calls[r]).describe() for r in (rank, 1 - rank))
        assert f"rank {rank} sends {mine} in rows of " in str(error)
        assert f"but rank {1 - rank} sends {theirs} in rows of " in str(error)


def test_torchs_collectives_notice_rows_of_the_same_size_too(pool):
    calls = [{"sequence": 1, **call} for call in DISAGREEMENTS["order"]]
    for rank, (error, _, _) in enumerate(pool.run(disagree, calls, "collectives")):
        assert type(error) is Mismatch, error
        assert error.ranks == (1 - rank,)


def go_on_after_a_mismatch(way):
    transport = transport_by(way, PATIENT)
    caught(reduce, transport, codec=["sign", "int8"][dist.get_rank()])
    dist.barrier()
    return caught(reduce, transport, codec="sign")[0]


def test_after_a_mismatch_the_transport_is_not_used_again(pool):
    """Payloads that nobody took would be taken for those of the next call."""
    for error in pool.outcomes(go_on_after_a_mismatch, "sockets"):
        assert type(error) is CommunicationError
        assert "failed before: the ranks disagreed" in str(error)
        assert "build a new one" in str(error)


def one_state_saves_alone():
    """An elastic state is a collective: rank 0 calls it where the others train."""
    ddp, _ = linear()
    state = commpress.compress(ddp)
    for _ in range(2):  # the second one rebuilds DDP's buckets, which is a collective of its own
        backward(ddp)
    outcome = caught(state.elastic_state_dict) if dist.get_rank() == 0 else caught(backward, ddp)
    meet("both know", dist.get_world_size())
    return outcome


def test_a_collective_that_one_rank_calls_alone_is_named(pool):
    for rank, (error, _, _) in enumerate(pool.run(one_state_saves_alone)):
        assert type(error) is Mismatch, error
        assert error.ranks == (1 - rank,)


# ---------------------------------------------------------------- through DistributedDataParallel


def linear(width=64, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
    )
    return DistributedDataParallel(model, **options), model


def backward(ddp, width=64):
    ddp(torch.ones(2, width)).sum().backward()


def train_with_other_codecs(options):
    ddp, _ = linear(**options)
    commpress.compress(ddp, ["sign", "int8", "sign"][dist.get_rank()], min_numel=8)
    outcomes = [caught(backward, ddp)[0]]
    meet("both know", dist.get_world_size())
    return outcomes


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"bucket_cap_mb": 0.01}], ids=str)
def test_backward_raises_the_error_itself(pool, options):
    """Not DDP's "Unable to cast": in the usual backward, in the first one of a static graph, with
    several buckets."""
    for rank, (error,) in enumerate(pool.run(train_with_other_codecs, options, size=3)):
        assert type(error) is Mismatch, error
        assert error.ranks == ((1,) if rank != 1 else (0, 2))
        mine, theirs = (
            NAMES[name].spec for name in (("sign", "int8") if rank != 1 else ("int8", "sign"))
        )
        assert f"rank {rank} expected all_to_all number 0 " in str(error)
        assert f"codec {mine!r}" in str(error)
        assert f"codec {theirs!r}" in str(error)


# ---------------------------------------------------------------- death and silence


def lose_a_rank(how, sequence, seconds, way):
    """Rank 2 ends or stops itself before its operation number ``sequence``; the others say what
    they see."""
    timeout = timedelta(seconds=seconds)
    transport = transport_by(way, timeout)
    for i in range(sequence):
        reduce(transport, sequence=i)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), how)
    outcome = caught(reduce, transport, sequence=sequence)
    again = caught(reduce, transport, sequence=sequence + 1)[0]
    meet("both know", 2)  # or the first to leave would look dead to the other
    return *outcome, again


def test_a_dead_rank_is_named_without_waiting_for_the_timeout(mortal):
    first, second, _ = mortal.outcomes(
        lose_a_rank, signal.SIGKILL, 2, 60, "sockets", size=3, lost=[2]
    )
    for error, start, end, again in (first, second):
        assert type(error) is PeerFailure, error
        assert error.ranks == (2,)
        assert "rank 2 closed its connection" in str(error)
        assert end - start < 30
        assert type(again) is CommunicationError
        assert "failed before" in str(again)


def test_a_silent_rank_is_named_when_the_time_is_over(mortal):
    first, second, _ = mortal.outcomes(
        lose_a_rank, signal.SIGSTOP, 2, 3, "sockets", size=3, lost=[2]
    )
    for rank, (error, start, end, again) in enumerate((first, second)):
        assert type(error) is PeerFailure, error
        assert error.ranks == (2,)
        assert f"rank {rank}: rank 2 was silent for 3." in str(error)
        assert 2.9 < end - start < 3 + 10
        assert type(again) is CommunicationError


def test_torchs_collectives_fail_typed_when_a_rank_dies(mortal):
    """They do not tell which rank it was."""
    first, second, _ = mortal.outcomes(
        lose_a_rank, signal.SIGKILL, 2, 60, "collectives", size=3, lost=[2]
    )
    for error, _, _, again in (first, second):
        assert type(error) is PeerFailure, error
        assert "a collective failed: " in str(error)
        assert type(again) is CommunicationError


def lose_a_rank_in_backward(how, seconds):
    """Rank 2 has reduced the bucket of its last layer with the others when it goes, and owes them
    the next."""
    ddp, model = linear(bucket_cap_mb=0.01)
    commpress.compress(ddp, min_numel=8, timeout=timedelta(seconds=seconds))
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


def flip(rows):
    rows[:, HEADER + 11] ^= 0x10


def deface(rows):
    rows[:, 9] ^= 0x10


def send_rubbish(faulty_rank, after, fault):
    transport = transport_by("sockets", PATIENT)
    if dist.get_rank() == faulty_rank:
        transport = Faulty(transport, after=after, fault=fault)
    outcomes = []
    for i in range(2):
        try:
            reduce(transport, sequence=i)
            outcomes.append("fine")
        except CommunicationError as error:
            outcomes.append(error)
            break
    meet("all know", dist.get_world_size())
    return outcomes


@pytest.mark.parametrize("operation", [ALL_TO_ALL, ALL_GATHER])
@pytest.mark.parametrize("size", [2, 3])
def test_a_damaged_payload_is_named_by_every_rank(pool, operation, size):
    after = 2 + (operation == ALL_GATHER)
    told = (
        f"payload of rank 1 in {frame(size, operation=operation, sequence=1).describe()} is damaged"
    )
    for outcomes in pool.run(send_rubbish, 1, after, flip, size=size):
        first, error = outcomes
        assert first == "fine"
        assert type(error) is Corrupted, error
        assert error.ranks == (1,)
        assert told in str(error)


def test_a_damaged_header_is_named_by_every_rank(pool):
    told = f"expected {frame(3, sequence=1).describe()}, but rank 1 sent bytes that are no header"
    for outcomes in pool.run(send_rubbish, 1, 2, deface, size=3):
        first, error = outcomes
        assert first == "fine"
        assert type(error) is Corrupted, error
        assert error.ranks == (1,)
        assert told in str(error)


def test_simulated_faults_are_those_of_the_wire():
    """``Faulty`` over the simulation: any test can break any rank without a process."""
    transports = Loopback(3).transports()
    transports[1] = Faulty(transports[1], after=1, fault=deface)
    with pytest.raises(
        Corrupted,
        match=r"rank 0 expected all_gather number 0 .* rank 1 sent bytes that are no header",
    ):
        simulate(
            [compressed_allreduce(torch.ones(9), codec="sign", transport=t) for t in transports]
        )
    transports = Loopback(3).transports()
    transports[1] = Faulty(transports[1], after=1, fault=OSError("cable"))
    with pytest.raises(OSError, match="cable"):
        simulate(
            [compressed_allreduce(torch.ones(9), codec="sign", transport=t) for t in transports]
        )


def test_a_rank_missing_from_the_simulation_is_named():
    transports = Loopback(3).transports()
    with pytest.raises(PeerFailure, match="no message number 0 from ranks") as caught_error:
        simulate(
            [compressed_allreduce(torch.ones(9), codec="sign", transport=t) for t in transports[:2]]
        )
    assert caught_error.value.ranks == (2,)
