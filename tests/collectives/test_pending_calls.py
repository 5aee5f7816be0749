"""Calls that wait for agreement: none begins before all peers have come to it, and no two ranks
begin different ones as one."""

import random

import pytest
import torch

from commpress.integrations.process_group.pending_calls import PendingCollectives
from commpress.integrations.process_group.records import RECORD, all_to_all, call, numbered, unpack


class Call:
    """The part of a call that pending collectives need."""

    def __init__(self, record):
        self.record, self.expected = record, {}


def test_a_number_is_all_that_numbering_changes():
    plain = call("all_reduce", [], reduction=3, codec=b"sign")
    assert len(plain) == RECORD
    assert unpack(numbered(plain, 7)) == unpack(plain)._replace(sequence=7)
    assert unpack(numbered(plain, 2**32 + 7)).sequence == 7, "numbers begin anew"


def test_a_call_waits_until_every_peer_has_come_to_it():
    pending, barrier = PendingCollectives([1, 2]), call("barrier", [])
    works = [Call(barrier), Call(barrier)]
    sent = [pending.enter(work, work.record, None) for work in works]
    assert [unpack(each[1]).sequence for each in sent] == [0, 1]
    assert pending.missing() == [1, 2]
    for each in sent:
        pending.received(1, each[1])
    assert pending.missing() == [2]
    assert [pending.late(work) for work in works] == [[2], [2]]
    pending.received(2, sent[0][2])
    assert (pending.missing(), pending.wrong(), pending.late(works[1])) == ([], [], [2])
    assert pending.take() is works[0]
    assert (pending.missing(), pending.oldest()) == ([2], works[1])


def test_a_peer_that_calls_another_or_is_ahead_is_known():
    pending = PendingCollectives([1])
    other = numbered(call("all_reduce", [], reduction=0), 0)
    pending.received(1, other)
    assert pending.does_instead(1) == unpack(other)
    pending.enter(Call(call("barrier", [])), call("barrier", []), None)
    assert pending.does_instead(1) is None
    assert pending.wrong() == [(1, other)]


def test_what_one_gives_the_other_must_take():
    # elements that each rank gives to and takes from each
    counts = ([1, 2], [1, 3]), ([3, 5], [2, 5])
    ours, theirs = (
        all_to_all("all_to_all", torch.float32, gives, takes, 0) for gives, takes in counts
    )
    pending = PendingCollectives([1])
    work = Call(None)
    sent = pending.enter(work, {1: ours[1].pack()}, {1: ours[1].mirrored().pack()})
    assert (unpack(sent[1]).give, unpack(sent[1]).take) == (2, 3)
    pending.received(1, numbered(theirs[0].pack(), 0))
    assert pending.wrong() == []
    assert pending.take() is work


@pytest.mark.parametrize("seed", range(6))
def test_no_two_ranks_begin_different_calls_under_one_number(seed):
    """Programs that part ways somewhere, records that arrive late: whatever begins is the same on
    all ranks."""
    chance = random.Random(seed)
    kinds = [call("all_reduce", [], root=kind) for kind in range(3)]
    pattern = [chance.randrange(3) for _ in range(chance.choice([1, 3, 5]))]
    parting = {rank: chance.randrange(30, 60) for rank in range(3)}
    programs = {
        r: [
            kinds[pattern[i % len(pattern)] if i < parting[r] else chance.randrange(3)]
            for i in range(90)
        ]
        for r in range(3)
    }
    pending = {r: PendingCollectives([p for p in range(3) if p != r]) for r in range(3)}
    on_the_way = {(a, b): bytearray() for a in range(3) for b in range(3) if a != b}
    entered, begun, failed = dict.fromkeys(range(3), 0), {r: [] for r in range(3)}, set()
    for _ in range(6000):
        rank = chance.randrange(3)
        if rank in failed:
            continue
        if entered[rank] < len(programs[rank]) and entered[rank] - len(begun[rank]) < 4:
            record = programs[rank][entered[rank]]
            entered[rank] += 1
            for peer, own in pending[rank].enter(Call(record), record, None).items():
                on_the_way[rank, peer] += own
        peer = chance.choice([p for p in range(3) if p != rank])
        count = chance.randrange(4) * RECORD
        came = bytes(on_the_way[peer, rank][:count])
        del on_the_way[peer, rank][:count]
        for at in range(0, len(came), RECORD):
            pending[rank].received(peer, came[at : at + RECORD])
        while pending[rank] and rank not in failed:
            if pending[rank].wrong():
                failed.add(rank)
            elif pending[rank].missing():
                break
            else:
                begun[rank].append(pending[rank].take().record)
    assert failed
    assert min(map(len, begun.values())) >= min(parting.values()) - 1
    for calls in zip(*begun.values(), strict=False):
        assert len(set(calls)) == 1
