"""The file of links, and the choice between one level and two that follows from it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.collectives.levels import choose, flat_seconds, hierarchical_seconds
from commpress.collectives.measured_links import (
    FILE,
    BufferTrial,
    Link,
    Links,
    Stack,
    load_links,
)
from commpress.collectives.topology import Topology
from commpress.errors import InvalidArgument

FAST, SLOW = Link(3e-5, 2e9, 1e9), Link(1e-3, 1.2e7, 1.2e7)
CLUSTER = Links(Topology.of(2, 2), FAST, SLOW)
positive = st.floats(1e-9, 1e12)
links = st.builds(Link, positive, positive, positive, st.just(0.0) | positive)
stacks = st.builds(
    Stack,
    positive,
    positive,
    positive,
    positive,
    st.integers(0, 64),
    positive,
    positive,
    uneven=positive,
)

tried = st.lists(
    st.builds(BufferTrial, st.integers(1, 1 << 40), positive, positive),
    max_size=4,
    unique_by=lambda t: t.numel,
)
trials = st.dictionaries(
    st.sampled_from(["none", "sign"]),
    tried.map(lambda ts: tuple(sorted(ts, key=lambda t: t.numel))),
)


# ---------------------------------------------------------------- the file


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    inside=st.none() | links,
    between=st.none() | links,
    stack=st.none() | stacks,
    trials=trials,
)
def test_what_is_saved_is_loaded(tmp_path_factory, sizes, inside, between, stack, trials):
    file = tmp_path_factory.mktemp("links") / "links.json"
    saved = Links(Topology.of(*sizes), inside, between, stack, trials)
    saved.save(file)
    assert load_links(file) == saved


LINK = {"latency": 1e-3, "bandwidth": 1e7, "together": 1e7}
STACK = {"exchange": 1, "message": 1, "byte": 0, "ring": 1, "cores": 2}


def changed(**what):
    """A file from before rings were measured, changed."""
    head = {"format": "commpress links", "version": 1, "nodes": [[0, 1], [2]]}
    return json.dumps(head | {"inside": LINK, "between": None, "stack": STACK} | what)


def test_a_file_from_before_rings_were_measured_is_loaded(tmp_path):
    (tmp_path / "links").write_text(changed())
    assert load_links(tmp_path / "links").stack == Stack(1, 1, 0, 1, 2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 30_000, "no JSON"),
        (changed(version=2), "version 2, expected 'commpress links', version 1"),
        (changed(nodes=[[0, 1], 2]), "expected lists of ranks"),
        (changed(nodes=[[0, True]]), "expected lists of ranks"),
        (changed(nodes=[[0, 1], [1]]), "every rank from 0 on exactly once"),
        (changed(inside=[1, 2, 3]), "expected latency, bandwidth and together"),
        (changed(inside={"latency": 1}), "expected latency, bandwidth and together"),
        (changed(inside=LINK | {"latency": "1"}), "latency of a link is '1'"),
        (changed(inside=LINK | {"latency": float("nan")}), "latency of a link is nan"),
        (changed(inside=LINK | {"bandwidth": 0}), "expected a positive number"),
        (changed(inside=LINK | {"burst": -1}), "burst of a link is -1"),
        (changed(stack=STACK | {"wings": 1}), "expected exchange, message, byte, ring and cores"),
        (changed(stack=STACK | {"message": -1}), "message of the stack is -1"),
        (changed(trials=[]), "trials"),
        (changed(trials={"none": 3}), "trials"),
        (changed(trials={"none": [[1, 2]]}), "trials"),
        (changed(trials={"none": [[1, 0.0, 2.0]]}), "flat of a trial is 0.0"),
        (changed(trials={"none": [["a", 1, 1]]}), "numel of a trial is 'a'"),
        (" " * (FILE.limit + 1), f"more than {FILE.limit} bytes"),
    ],
)
def test_what_is_no_file_of_links_is_refused(tmp_path, content, says):
    (tmp_path / "links").write_text(content)
    with pytest.raises(InvalidArgument, match=says):
        load_links(tmp_path / "links")


# ---------------------------------------------------------------- the choice


@settings(max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=2, max_size=4).filter(lambda s: max(s) > 1),
    inside=links,
    between=links,
    numel=st.integers(1, 1 << 27),
    codec=st.sampled_from(["none", "sign", "int8"]),
)
def test_the_choice_is_the_cheaper_by_the_model(sizes, inside, between, numel, codec):
    measured = Links(Topology.of(*sizes), inside, between)
    flat, levels = (
        flat_seconds(numel, codec, measured),
        hierarchical_seconds(numel, codec, measured),
    )
    assert {"flat": flat, "hierarchical": levels}[choose(numel, codec, measured)] == min(
        flat, levels
    )


def test_large_buffers_take_two_levels_and_small_ones_one():
    """Across a slow link bytes decide; where only latency counts, four exchanges cost more than
    two."""
    assert choose(1 << 23, "none", CLUSTER) == "hierarchical"
    assert choose(1 << 23, "sign", CLUSTER) == "hierarchical"
    far = Links(Topology.of(4, 4), Link(1e-6, 1e11, 1e11), Link(1e-6, 1e7, 1e7))
    assert choose(1 << 23, "powersgd-4", far) == "hierarchical"
    for codec in ("none", "powersgd-4"):
        assert choose(64, codec, Links(Topology.of(2, 2), Link(1e-3, 1e9, 1e9), SLOW)) == "flat"


def test_what_was_tried_decides_up_to_the_largest_trial():
    """Here it says the opposite of the model, and only for the codec that was tried."""
    tried = {"none": (BufferTrial(1 << 10, 2e-3, 1e-3), BufferTrial(1 << 20, 1e-3, 4e-3))}
    far = Links(Topology.of(2, 2), Link(1e-3, 1e9, 1e9), SLOW, trials=tried)
    model = replace(far, trials={})
    assert (choose(64, "none", far), choose(64, "none", model)) == ("hierarchical", "flat")
    assert (choose(1 << 20, "none", far), choose(1 << 20, "none", model)) == (
        "flat",
        "hierarchical",
    )
    assert choose(64, "sign", far) == "flat"
    assert choose(1 << 23, "none", far) == "hierarchical"
    crossing = round(2 ** (10 + 10 / 3))  # the gain falls from 2 to 1/4
    assert choose(crossing - 20, "none", far) == "hierarchical"
    assert choose(crossing + 20, "none", far) == "flat"


def test_there_is_no_choice_with_one_level():
    for sizes in ((4,), (1, 1, 1)):
        assert choose(1 << 23, "none", Links(Topology.of(*sizes), FAST, SLOW)) == "flat"
    assert choose(1 << 23, "none", Links(Topology.of(2, 2), None, SLOW)) == "flat"


@pytest.mark.parametrize("codec", ["none", "sign"])
def test_a_slow_wire_costs_its_bytes(codec):
    """With everything else free, the times have the ratio of the bytes that leave a node: 2·g·(P −
    g)/P to 2·(m − 1)/m."""
    free = Link(1e-9, 1e18, 1e18)
    wire = Links(Topology.of(4, 4), free, Link(1e-9, 1e7, 1e7))
    ratio = flat_seconds(1 << 24, codec, wire) / hierarchical_seconds(1 << 24, codec, wire)
    assert ratio == pytest.approx(4, rel=0.02)
