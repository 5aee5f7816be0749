"""Healing: newcomers and ranks that are behind become like the donors in every bit, or nothing of
them changes."""

import copy
from collections import Counter

import pytest
import torch

from commpress.collectives.channel import Channel
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import Corrupted, InvalidArgument, PeerFailure, StateMismatch
from commpress.integrations.elastic.healing import dealt, hash_of, nbytes, packed, unpacked
from commpress.integrations.elastic.shared_state import SharedState, heal
from faulty import Faulty


def trained(seed=0, steps=3):
    """A run's objects after so many steps: batch norm, AdamW, a scheduler, a scaler's numbers."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 50])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + seed))
    for _ in range(steps):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {"optimizer": optimizer, "model": model, "schedule": schedule, "scaler": scaler}


def hashes(objects):
    document, tensors = SharedState(objects).taken_apart()
    return document, [hash_of(each) for each in tensors]


def healing(objects, donors, needy, transports=None, **options):
    transports = transports or Loopback(len(objects)).transports()
    channels = [Channel(each) for each in transports]
    every = zip(objects, channels, strict=True)
    return simulate(
        [heal(SharedState(each), c, donors=donors, needy=needy, **options) for each, c in every]
    )


@pytest.mark.parametrize(
    ("donors", "needy"), [([0], [1]), ([0, 1], [2]), ([1, 2], [0, 3]), ([0, 1, 2], [3])]
)
def test_needy_ranks_become_like_the_donors_in_every_bit(donors, needy):
    size = max(donors + needy) + 1
    objects = [
        trained(seed=0 if r in donors else 7, steps=3 if r in donors else r % 2)
        for r in range(size)
    ]
    reports = healing(objects, donors, needy, slice_bytes=64)
    assert len({str(hashes(each)) for each in objects}) == 1
    assert len({each.hash for each in reports}) == 1
    assert sum(reports[0].given.values()) == reports[0].nbytes
    assert set(reports[0].given) == set(donors)
    if len(donors) > 1:  # side by side: each gives its part
        assert max(reports[0].given.values()) - min(reports[0].given.values()) <= 64
    for each in objects:  # and all go on alike
        torch.manual_seed(1)
        each["model"](torch.randn(4, 6)).sum().backward()
        each["optimizer"].step()
        each["schedule"].step()
    assert len({str(hashes(each)[1]) for each in objects}) == 1


def test_what_donors_have_apart_is_the_first_ones():
    objects = [trained() for _ in range(3)]
    objects[1]["model"][1].running_mean += 1
    reports = healing(objects, [0, 1], [2])
    assert reports[0].differing == 1
    assert hashes(objects[2]) == hashes(objects[0])
    assert hashes(objects[1]) != hashes(objects[0])  # who is healthy is left alone


def test_a_donor_with_other_numbers_gives_nothing():
    objects = [trained() for _ in range(3)]
    objects[1]["optimizer"].param_groups[0]["lr"] = 0.5
    reports = healing(objects, [0, 1], [2])
    assert set(reports[0].given) == {0}
    assert hashes(objects[2]) == hashes(objects[0])


@pytest.mark.parametrize("after", range(6))
def test_a_donor_that_dies_while_giving_has_spoilt_nothing_and_the_others_give_again(after):
    objects = [trained(), trained(), trained(seed=5)]
    before = hashes(objects[2])
    transports = Loopback(3).transports()
    transports[1] = Faulty(transports[1], after=after, fault=PeerFailure("dies", ranks=(1,)))
    with pytest.raises(PeerFailure):
        healing(objects, [0, 1], [2], transports=transports, slice_bytes=90)
    assert hashes(objects[2]) == before
    healing([objects[0], objects[2]], [0], [1], slice_bytes=200)
    assert hashes(objects[2]) == hashes(objects[0])


def test_bytes_that_change_in_memory_are_not_loaded():
    objects = [trained(), trained(seed=5)]

    def spoil(*_):
        objects[0]["model"][0].weight.data[0, 0] += 1  # after its hash was told

    before, transports = hashes(objects[1]), Loopback(2).transports()
    transports[0] = Faulty(transports[0], after=2, fault=spoil)
    with pytest.raises(Corrupted, match="another hash"):
        healing(objects, [0], [1], transports=transports, slice_bytes=100)
    assert hashes(objects[1]) == before


def test_nobody_to_heal_sends_nothing():
    assert healing([trained(), trained()], [0, 1], []) == [None, None]


@pytest.mark.parametrize("donors", [[], [0, 1]])
def test_donors_who_are_needy_are_refused(donors):
    with pytest.raises(InvalidArgument, match="donors"):
        healing([trained(), trained()], donors, [1])


def test_objects_of_other_names_are_refused_and_nothing_is_loaded():
    mine = trained(seed=3)
    before = hashes(mine)
    other = dict(mine)
    other["rate"] = other.pop("schedule")
    with pytest.raises(StateMismatch, match="'schedule'"):
        healing([trained(), other], [0], [1])
    assert hashes(mine) == before


def test_a_long_transfer_tells_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr("commpress.integrations.elastic.healing.TELL_EVERY", 0.0)
    with caplog.at_level("INFO", "commpress"):
        healing([trained(), trained()], [0], [1], slice_bytes=256)
    assert len(caplog.records) > 4
    assert "healing: 100 % of 0.0 MB from 1 donors" in caplog.text


# ---------------------------------------------------------------- documents


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, 2: [True, None, 1.5, "x", b"y"]},
        (0.9, 0.999),
        {"milestones": Counter({3: 2})},
        {1, 5},
        {"seed": 2**64 - 1},
        [[], {}, ()],
        -(2**70),
    ],
)
def test_documents_hold_what_state_dicts_are_made_of(value):
    again = unpacked(packed(copy.deepcopy(value), []), [])
    assert again == value
    assert type(again) is type(value) or isinstance(value, dict)


@pytest.mark.parametrize(
    "value", [object(), {"f": print}, {("a", 1): 2}, torch.ones(3).to_sparse()]
)
def test_what_would_have_to_be_evaluated_is_refused_by_its_place(value):
    with pytest.raises(InvalidArgument, match="state"):
        packed(value, [])


def test_an_object_without_a_state_is_refused():
    with pytest.raises(InvalidArgument, match="'step'"):
        SharedState({"step": 3})


# ---------------------------------------------------------------- slices


@pytest.mark.parametrize("donors", [1, 2, 3, 5])
@pytest.mark.parametrize("slice_bytes", [1, 7, 100])
def test_every_byte_is_given_once_and_evenly(donors, slice_bytes):
    lengths = [5, 0, 40, 1, 1, 13]
    queues = dealt(lengths, [tuple(range(donors))] * len(lengths), slice_bytes)
    covered = [0] * len(lengths)
    for part in (part for queue in queues.values() for each in queue for part in each):
        covered[part.tensor] += part.stop - part.start
    assert covered == lengths
    loads = [sum(map(nbytes, queue)) for queue in queues.values()]
    assert max(loads) - min(loads) <= slice_bytes
    assert all(nbytes(each) <= slice_bytes for queue in queues.values() for each in queue)
