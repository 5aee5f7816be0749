"""Promises of calls to come: which are made, and that no two ranks ever begin different calls under one number."""

import random
from zlib import crc32

import pytest

from commpress.integrations.process_group.forecast import AHEAD, NOTHING, Forecast, checksum
from commpress.integrations.process_group.pending_calls import BATCH, Ledger, Said
from commpress.integrations.process_group.records import RECORD, Record, call


class Call:
    """What a ledger needs of a call."""

    def __init__(self, said, *, foreseeable=True):
        self.said, self.foreseeable = said, foreseeable
        self.number, self.call, self.expected = -1, NOTHING, {}


def promises(calls):
    """The promise that goes with each call, for AHEAD calls later."""
    forecast = Forecast([])
    return [forecast.promise(number, each) for number, each in enumerate(calls)]


@pytest.mark.parametrize("period", [1, 2, 7, AHEAD, 40])
def test_what_repeats_is_foreseen(period):
    calls = [1 + i % period for i in range(4 * period + 40)]
    promised = promises(calls)
    first = 2 * period + 8
    assert promised[first:-AHEAD] == calls[first + AHEAD :]


def test_what_was_never_seen_is_not_promised():
    assert promises(range(1, 30)) == [NOTHING] * 29


def test_the_longer_past_decides():
    step = [5, 5, 5, 1, 5, 5, 5, 2]
    calls = step * 12
    assert promises(calls)[24:-AHEAD] == calls[24 + AHEAD :]


def test_a_number_is_no_part_of_what_is_promised():
    one, two = (Record(operation=4, give=9, take=9, sequence=s).pack() for s in (3, 4))
    assert one != two
    assert checksum(one) == checksum(two) != checksum(Record(operation=4, give=8, take=9).pack())
    assert checksum(one) == crc32(one[12:60], crc32(one[:8]))


def heard_by(ledger, peer, words):
    for at in range(0, len(words), RECORD):
        ledger.note(peer, words[at : at + RECORD])


def test_one_call_after_another_begins_on_promises_and_is_said_in_batches():
    ledgers = {0: Ledger([1], forecasts=True), 1: Ledger([0], forecasts=True)}
    said, at_once = call("barrier", []), {0: 0, 1: 0}
    for _ in range(100):
        for rank, ledger in ledgers.items():
            ledger.enter(Call(said), said)
            begun = []
            at_once[rank] += ledger.begin_foreseen(begun.append) and len(begun) == 1
            heard_by(ledgers[1 - rank], rank, ledger.take_unsaid(BATCH if begun else 1))
        for ledger in ledgers.values():
            while ledger and not ledger.missing():
                assert not ledger.wrong()
                ledger.agreed()
    assert min(at_once.values()) > 70


def test_with_forecasts_off_nothing_begins_before_all_have_said_it():
    ledger = Ledger([1], forecasts=False)
    said = call("barrier", [])
    for _ in range(50):
        ledger.enter(Call(said), said)
        assert not ledger.begin_foreseen(lambda work: pytest.fail("it began"))
        heard_by(ledger, 1, ledger.take_unsaid())
        ledger.agreed()


@pytest.mark.parametrize("seed", range(6))
def test_no_two_ranks_begin_different_calls_under_one_number(seed):
    """Programs that repeat themselves and then part ways, words that arrive late: whatever begins is the same on all ranks."""
    chance = random.Random(seed)
    kinds = [call("all_reduce", [], root=kind) for kind in range(3)]
    pattern = [chance.randrange(3) for _ in range(chance.choice([1, 3, 5]))]
    parting = {rank: chance.randrange(60, 90) for rank in range(3)}
    programs = {
        r: [kinds[pattern[i % len(pattern)] if i < parting[r] else chance.randrange(3)] for i in range(120)] for r in range(3)
    }
    ledgers = {r: Ledger([p for p in range(3) if p != r], forecasts=True) for r in range(3)}
    on_the_way = {(a, b): bytearray() for a in range(3) for b in range(3) if a != b}
    begun = {r: {} for r in range(3)}

    def begin(rank, work):
        begun[rank][work.number] = work.said

    failed = set()
    for _ in range(4000):
        rank = chance.randrange(3)
        ledger, program = ledgers[rank], programs[rank]
        if rank in failed:
            continue
        if len(begun[rank]) < len(program) and not ledger.waiting:
            work = Call(program[len(begun[rank])])
            ledger.enter(work, work.said)
            ledger.begin_foreseen(lambda work, rank=rank: begin(rank, work))
        words = ledger.take_unsaid(chance.choice([1, BATCH]))
        for peer in range(3):
            if peer != rank:
                on_the_way[rank, peer] += words
        peer = chance.choice([p for p in range(3) if p != rank])
        count = chance.randrange(4) * RECORD
        heard_by(ledger, peer, bytes(on_the_way[peer, rank][:count]))
        del on_the_way[peer, rank][:count]
        while ledger and rank not in failed:
            work = ledger.oldest()
            if ledger.wrong():
                failed.add(rank)
            elif ledger.missing():
                break
            else:
                ledger.agreed()
                if not isinstance(work, Said):
                    begin(rank, work)
        ledger.begin_foreseen(lambda work, rank=rank: begin(rank, work))
    assert failed
    assert min(len(b) for b in begun.values()) >= min(parting.values()) - 1
    for number in range(120):
        assert len({b[number] for b in begun.values() if number in b}) <= 1, number
