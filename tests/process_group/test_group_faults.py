"""On the backend "commpress" a rank that disagrees, dies or stalls is named by every other, and the
others can go on."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sources
from commpress.backend import GroupOptions
from commpress.collectives.transports.torch import connections_of
from commpress.errors import CommunicationError, Mismatch, PeerFailure
from faults import (
    ANYBODY,
    CALLS,
    COMPRESSED,
    FAULTS,
    MARK,
    applies,
    make,
)
from group_calls import as_world
from ranks import meet

LAST = 2  # the rank at fault, of three
POINT_TO_POINT = ("send", "recv", ANYBODY)


def caught(function, *args):
    start = time.monotonic()
    try:
        function(*args)
    except Exception as error:
        return error, time.monotonic() - start
    raise AssertionError("nothing was raised")


def joined(file, size, seconds, options=None):
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "commpress",
        init_method=f"file://{file}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
        pg_options=options,
    )


# ---------------------------------------------------------------- disagreement


def disagreements(folder, cases, seconds):
    """Every case in a group of its own; the error, or None on the rank at fault."""
    errors = []
    for i, (call, fault) in enumerate(cases):
        at_fault = dist.get_rank() == LAST
        options = None
        if call == COMPRESSED:
            codec = "int8" if at_fault and fault == "wrong codec" else "bf16"
            options = GroupOptions(codec, min_numel=1, only="everything")
        meet(f"case {i}", 3)
        joined(f"{folder}/{i}", 3, seconds, options)
        make(call if "repeated" in call else "barrier", None)
        error, _ = caught(make, call, fault if at_fault else None)
        again, _ = caught(make, "barrier", None)
        assert type(again) is type(error)
        assert "failed before" in str(again)
        errors.append(error)
        meet("seen", 3)
    return errors


def check_disagreements(pool, folder, cases, seconds):
    for rank, errors in enumerate(
        pool.run(disagreements, str(folder), cases, seconds, size=3, seconds=200)
    ):
        for case, error in zip(cases, errors, strict=True):
            assert type(error) is Mismatch, (case, error)
            # who of two others is wrong, a rank that receives from anybody cannot know
            if rank == LAST or case[0] == ANYBODY:
                assert {*error.ranks} <= {0, 1, 2} - {rank}, (case, error)
            else:
                assert error.ranks == (LAST,), (case, error)


DISAGREE = [f for f in FAULTS if f.startswith("wrong")]
EVERY = [
    (call, fault) for call in [*CALLS, COMPRESSED] for fault in DISAGREE if applies(call, fault)
]
AT_ONCE = [
    (call, fault) for call, fault in EVERY if call not in POINT_TO_POINT or fault != "wrong op"
]


def test_every_disagreement_is_named_before_data_moves(pool, tmp_path):
    """With a timeout that no machine reaches: they are told at once, and no message that is too
    long ends a process."""
    assert len(AT_ONCE) > 50
    check_disagreements(pool, tmp_path, AT_ONCE, 300)


def test_a_peer_that_is_busy_with_another_call_is_named_at_the_timeout(pool, tmp_path):
    cases = [(call, "wrong op") for call in POINT_TO_POINT]
    seen = pool.run(disagreements, str(tmp_path), cases, 3, size=3)
    for errors in seen[:LAST]:
        for error in errors:
            assert isinstance(error, CommunicationError)
            assert error.ranks == (LAST,)
            assert "calls broadcast" in str(error) or "has given up" in str(error)


def reductions_and_roots(folder):
    rank, errors = dist.get_rank(), []
    calls = [
        lambda: dist.all_reduce(
            torch.ones(4), dist.ReduceOp.MAX if rank == LAST else dist.ReduceOp.SUM
        ),
        lambda: dist.broadcast(torch.ones(4), 1 if rank == LAST else 0),
        lambda: dist.all_reduce(torch.ones(2, 3) if rank == LAST else torch.ones(3, 2)),
        lambda: dist.all_to_all_single(
            torch.ones(6), torch.ones(6), [2, 2, 2], [3, 1, 2] if rank == LAST else None
        ),
    ]
    for i, call in enumerate(calls):
        meet(f"call {i}", 3)
        joined(f"{folder}/{i}", 3, 60)
        errors.append(caught(call)[0])
        meet("seen", 3)
    return errors


def test_reduction_root_shape_and_splits_are_compared(pool, tmp_path):
    seen = pool.run(reductions_and_roots, str(tmp_path), size=3)
    for errors in seen[:LAST]:
        assert [type(e) for e in errors] == [Mismatch] * 4
        assert [e.ranks for e in errors] == [(LAST,)] * 4
    texts = [str(e) for e in seen[0]]
    assert "max" in texts[0] or "given up" in texts[0]
    assert "another shape" in texts[2] or "given up" in texts[2]


def no_false_alarms():
    """Calls that differ between ranks in what may differ: sizes by peer, tags, order of
    point-to-point, late ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gives = [(rank + 2 * peer) % 4 for peer in range(size)]
    takes = [(peer + 2 * rank) % 4 for peer in range(size)]
    out = torch.empty(sum(takes))
    dist.all_to_all_single(out, torch.full((sum(gives),), float(rank)), takes, gives)
    assert out.tolist() == [float(p) for p in range(size) for _ in range(takes[p])]
    dist.broadcast(torch.ones(2, 3) if rank else torch.ones(6), 0)
    time.sleep(0.2 * rank)
    late = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(20)]
    if rank == 0:  # a send that waits does not hold up the collectives behind it
        sent = dist.isend(torch.ones(5), 1, tag=9)
        dist.all_reduce(torch.ones(7))
        sent.wait()
    else:
        dist.all_reduce(torch.ones(7))
        if rank == 1:
            dist.recv(torch.ones(5), 0, tag=9)
    for work in late:
        work.wait()
    others = [torch.empty(2) for _ in range(3)]
    if rank == 0:
        works = [dist.irecv(t, 1, tag=i) for i, t in enumerate(others)]
        for work in works:
            work.wait()
        assert [t[0].item() for t in others] == [0, 1, 2]
    elif rank == 1:
        works = [dist.isend(torch.full((2,), float(i)), 0, tag=i) for i in (2, 0, 1)]
        for work in works:
            work.wait()
    dist.barrier()


def test_what_may_differ_raises_no_alarm(pool, tmp_path):
    pool.run(as_world, "commpress", f"{tmp_path}/file", no_false_alarms, size=3)


# ---------------------------------------------------------------- death and silence


def lost_in_transfer(folder, fault, seconds):
    """The last rank is killed or stopped while 256 MB are under way; the others go on in a group of
    two."""
    rank = dist.get_rank()
    joined(f"{folder}/first", 3, seconds)
    dist.barrier()
    work = dist.all_reduce(torch.ones(1 << 26), async_op=True)
    if rank == LAST:
        while not work.settled:
            time.sleep(0.001)
        os.kill(os.getpid(), fault)
    error, seconds = caught(work.wait)
    dist.destroy_process_group()
    dist.init_process_group(
        "commpress", init_method=f"file://{folder}/second", rank=rank, world_size=2
    )
    tensor = torch.full((4,), rank + 1.0)
    dist.all_reduce(tensor)
    return error, seconds, tensor.tolist()


@pytest.mark.parametrize(
    ("fault", "timeout", "limit"),
    [pytest.param(signal.SIGKILL, 60, 40, marks=pytest.mark.slow), (signal.SIGSTOP, 5, 40)],
)
def test_a_rank_lost_in_the_middle_of_a_transfer(mortal, tmp_path, fault, timeout, limit):
    """A death is told by the closed connection, long before the timeout."""
    outcomes = mortal.outcomes(lost_in_transfer, str(tmp_path), fault, timeout, size=3, lost={LAST})
    for error, seconds, after in outcomes[:LAST]:
        assert type(error) is PeerFailure, error
        assert error.ranks == (LAST,)
        assert seconds < limit
        assert after == [3.0] * 4


def stopped_before_backward(folder):
    rank = dist.get_rank()
    joined(f"{folder}/first", 3, 4)
    model = DistributedDataParallel(nn.Linear(8, 8))
    for _ in range(20):
        model(torch.ones(2, 8)).sum().backward()
    loss = model(torch.ones(2, 8)).sum()
    dist.barrier()
    if rank == LAST:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    error, seconds = caught(loss.backward)
    dist.destroy_process_group()
    return error, seconds


def test_a_rank_that_is_stopped_is_named_inside_backward(mortal, tmp_path):
    for error, seconds in mortal.outcomes(
        stopped_before_backward, str(tmp_path), size=3, lost={LAST}
    )[:LAST]:
        assert type(error) is PeerFailure, error
        assert error.ranks == (LAST,)
        assert seconds < 30


def cut_while_waiting(folder):
    """Ranks 0 and 1 wait for the last, which is alive and never comes; then rank 0 cuts its
    connections."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(f"{folder}/store", size)
    make_group = partial(dist.ProcessGroupGloo, store, rank, size, timeout=timedelta(minutes=5))
    group, connections = connections_of(make_group, size - 1)
    group.barrier().wait()
    if rank < LAST:
        work = group.allreduce([torch.ones(1 << 18)])
        meet("calling", 2)
        if rank == 0:
            connections.cut()
            error, seconds = caught(work.wait)
            start = time.monotonic()
            del work, group
            meet("ended", 2)
            return len(connections), str(error), seconds, time.monotonic() - start
    meet("ended", 2)
    return len(connections), "", 0.0, 0.0


def test_a_call_under_way_in_gloo_can_be_cut(pool, tmp_path):
    seen = pool.run(cut_while_waiting, str(tmp_path), size=3)
    assert [count for count, *_ in seen] == [2, 2, 2]
    _, error, seconds, destroyed = seen[0]
    assert "Connection closed" in error or "Connection reset" in error, error
    assert seconds < 20
    assert destroyed < 20


def test_connections_that_others_may_have_opened_are_not_taken():
    """Two more than there should be."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (one, other), connections = connections_of(
            lambda: (socket.create_connection(listener.getsockname()), listener.accept()[0]), 1
        )
        assert len(connections) == 0
        connections.cut()
        one.sendall(b"!")
        assert other.recv(1) == b"!"
        one.close()
        other.close()


# ---------------------------------------------------------------- the table in docs/backend.md


def test_the_command_reports_what_survivors_see(tmp_path):
    """In a process of its own: it forks."""
    arguments = [
        "faults",
        "--calls",
        "all_reduce",
        "--faults",
        "kill -9",
        "wrong shape",
        "--timeout",
        "30",
    ]
    command = [
        sys.executable,
        str(sources.ROOT / "benchmarks"),
        *arguments,
        "--docs",
        str(page := tmp_path / "f.md"),
    ]
    page.write_text(f"# Before\n\n{MARK}\n\n| old |\n| --- |\n\nAfter.\n")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ok    2 cases" in ran.stdout
    assert re.fullmatch(
        rf"# Before\n\n{MARK}\n\n\| call \| kill -9 \| SIGSTOP \| a wrong call \|\n"
        r"(\| --- ){4}\|\n"
        r"\| all_reduce \| \d+\.\d\d s \| – \| \d+\.\d\d s \|\n\nAfter\.\n",
        page.read_text(),
    )


def test_the_page_has_every_call_and_only_typed_errors_that_name_the_right_rank():
    page = (sources.ROOT / "docs" / "backend.md").read_text()
    lines = page.partition(f"{MARK}\n\n")[2].split("\n\n")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines][2:]
    assert [row[0] for row in rows] == [*CALLS, COMPRESSED]
    for row in rows:
        for fault, cell in zip(("kill -9", "SIGSTOP", "wrong op"), row[1:], strict=True):
            took = r"\d\.\d\d s" if applies(row[0], fault) else "–"
            assert re.fullmatch(took, cell), (row[0], fault, cell)
