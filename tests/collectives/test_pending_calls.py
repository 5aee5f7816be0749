"""Calls that wait for agreement: none begins before all peers have come to it, and no two ranks
begin different ones as one."""

import random

import msgpack
import pytest
import torch

from commpress.integrations.process_group.guard import PendingCollectives
from commpress.integrations.process_group.records import Record, all_to_all, call


class Call:
    """The part of a call that pending collectives need."""

    def __init__(self, record):
        self.record, self.expected = record, {}


def enter(pending, work, record):
    records = dict.fromkeys(pending._received, record)
    return pending.enter(work, records, records)


def test_a_record_comes_as_it_was_sent_and_anything_else_is_none():
    record = call("all_reduce", [], reduction=3, codec="sign")
    assert Record.of(msgpack.unpackb(msgpack.packb(record))) == record
    for other in (None, {}, [*record, 1], [*record][:-1], [*record[:-1], 3]):
        assert Record.of(other) is None


def test_a_call_waits_until_every_peer_has_come_to_it():
    pending, barrier = PendingCollectives([1, 2]), call("barrier", [])
    works = [Call(barrier), Call(barrier)]
    sent = [enter(pending, work, work.record) for work in works]
    assert [each[1].sequence for each in sent] == [0, 1]
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
    other = call("all_reduce", [], reduction=0)
    pending.received(1, other)
    assert pending.does_instead(1) == other
    enter(pending, Call(call("barrier", [])), call("barrier", []))
    assert pending.does_instead(1) is None
    assert pending.wrong() == [(1, other)]


def test_what_one_gives_the_other_must_take():
    # elements that each rank gives to and takes from each
    counts = ([1, 2], [1, 3]), ([3, 5], [2, 5])
    ours, theirs = (
        all_to_all("all_to_all", torch.float32, gives, takes) for gives, takes in counts
    )
    pending = PendingCollectives([1])
    work = Call(None)
    sent = pending.enter(work, {1: ours[1]}, {1: ours[1].mirrored()})
    assert (sent[1].give, sent[1].take) == (2, 3)
    pending.received(1, theirs[0])
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
    on_the_way = {(a, b): [] for a in range(3) for b in range(3) if a != b}
    entered, begun, failed = dict.fromkeys(range(3), 0), {r: [] for r in range(3)}, set()
    for _ in range(6000):
        rank = chance.randrange(3)
        if rank in failed:
            continue
        if entered[rank] < len(programs[rank]) and entered[rank] - len(begun[rank]) < 4:
            record = programs[rank][entered[rank]]
            entered[rank] += 1
            for peer, own in enter(pending[rank], Call(record), record).items():
                on_the_way[rank, peer].append(own)
        peer = chance.choice([p for p in range(3) if p != rank])
        count = chance.randrange(4)
        for each in on_the_way[peer, rank][:count]:
            pending[rank].received(peer, each)
        del on_the_way[peer, rank][:count]
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
