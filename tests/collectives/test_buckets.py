"""Cutting tensors into messages: where the cuts are, and what tells two messages apart."""

import pytest

from commpress.codecs.family import EXACT, NAMES
from commpress.codecs.policy import ByName, Same
from commpress.collectives import buckets
from commpress.collectives.buckets import Span, messages, one_message
from commpress.kernels.pieces import NUMEL, RESIDUAL, SOURCE

SIGN = Same(NAMES["sign"])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(buckets, "PIECE", 100)
    monkeypatch.setattr(buckets, "MESSAGE", 250)


def spans(*numels: int, names: str = "abcdefgh") -> list[Span]:
    made, at = [], 0
    for name, numel in zip(names, numels, strict=False):
        made.append(Span(name, at, numel))
        at += numel
    return made


def cuts(numels, policy=SIGN):
    return [list(m.keys) for m in messages(spans(*numels), policy, 2)]


def test_tensors_are_cut_at_fixed_multiples_and_messages_are_closed_before_they_are_too_long():
    assert cuts([250]) == [[("a", 0), ("a", 100), ("a", 200)]]
    assert cuts([30, 100, 100, 100]) == [[("a", 0), ("b", 0), ("c", 0)], [("d", 0)]]
    assert cuts([249, 1, 1]) == [[("a", 0), ("a", 100), ("a", 200), ("b", 0)], [("c", 0)]]
    assert cuts([0, 5, 0]) == [[("b", 0)]]
    assert cuts([]) == []


def test_every_element_travels_once():
    plan = messages(spans(250, 7, 333, 100, 1), ByName({"c": EXACT}, SIGN), 3)
    runs = sorted((int(line[SOURCE]), int(line[NUMEL])) for m in plan for line in m.pieces.table)
    at = 0
    for source, numel in runs:
        assert source == at
        at += numel
    assert at == 250 + 7 + 333 + 100 + 1
    assert sum(m.pieces.numel for m in plan) == at
    assert {
        key[0]
        for m in plan
        for key, line in zip(m.keys, m.pieces.table, strict=True)
        if line[RESIDUAL] < 0
    } == {"c"}


def test_a_whole_buffer_is_one_message_however_long():
    message = one_message(1000, NAMES["sign"], 2)
    assert message.keys == (("", 0),)
    assert message.pieces.numel == message.pieces.residual_numel == 1000
    assert one_message(1000, EXACT, 2).pieces.residual_numel == 0
    assert one_message(1000, NAMES["sign"], 2, feedback=False).pieces.residual_numel == 0
    assert one_message(8, EXACT, 2, name="a").label != one_message(8, EXACT, 2, name="b").label


def test_the_label_tells_messages_apart():
    """Equal headers must mean rows of equal size: what is not in the header is in the label."""
    others = [
        spans(60, 40, names="ba"),
        spans(40, 60),
        spans(60, 40, names="ax"),
        spans(60, 39),
        spans(60, 39, 1),
    ]
    every = [messages(each, SIGN, 2) for each in (spans(60, 40), *others)]
    assert len({message.label for (message,) in every}) == 6
    (again,) = messages(spans(60, 40), SIGN, 2)
    assert again.label == every[0][0].label


def test_the_description_tells_which_tensor_has_which_codec():
    def described(**rules):
        policy = ByName({name: NAMES[codec] for name, codec in rules.items()}, SIGN)
        (message,) = messages(spans(60, 40, 10), policy, 2)
        return message.codec

    assert described() == NAMES["sign"].spec
    assert described(a="int8", b="int8", c="int8") == NAMES["int8"].spec
    some = [{}, {"a": "int8"}, {"b": "int8"}, {"a": "int8", "b": "int8"}, {"a": "none"}]
    every = {described(**rules) for rules in some}
    assert len(every) == len(some)
    assert max(map(len, every)) <= 24
