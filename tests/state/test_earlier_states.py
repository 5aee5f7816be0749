"""States that earlier versions saved: two ranks of each object, written by commit 4edf090."""

import gzip
import io
from pathlib import Path

import pytest
import torch

from state_worlds import KINDS, Local, Mean, apart, stored
from test_laws import close

FILE = gzip.decompress((Path(__file__).parent / "data" / "earlier.pt.gz").read_bytes())
EARLIER = torch.load(io.BytesIO(FILE), weights_only=True)
SHAPES = ((5, 7), (11,), (3,))


ELASTIC = [name for name in EARLIER if "elastic" in EARLIER[name]]


def small(name, monkeypatch):
    if KINDS[name].of is not Mean:
        monkeypatch.setattr(KINDS[name].of, "shapes", SHAPES)
    return KINDS[name], EARLIER[name]


def in_the_present_form(state):
    """A level less, the object under one name in all of them."""
    if "choices" in state:  # of local updates
        inner = state.pop("residuals") | state.pop("choices") | {"object": "LocalUpdates"}
        if state.get("flight"):
            state["flight"]["kept"] = 1.0
        return state | inner
    if "commpress" not in state:
        return state
    part = dict(state["commpress"])
    part |= part.pop("schedule") | part.pop("waiting", {}) | {"object": part.pop("optimizer")}
    return state | {"commpress": part}


@pytest.mark.parametrize("name", EARLIER)
def test_as_many_ranks_have_every_bit_of_it(name, monkeypatch):
    kind, earlier = small(name, monkeypatch)
    world = kind.world(2, earlier["at"])
    world.load((earlier["exact"], []), "own")
    found = [state for _, state in world.numbers()]
    wanted = [in_the_present_form(state) for state in stored(earlier["exact"])]
    seen = [rank.seen(state) for rank, state in zip(world.ranks, wanted, strict=True)]
    assert not apart(found, seen)


@pytest.mark.parametrize("name", ELASTIC)
def test_other_ranks_go_on_with_all_residuals(name, monkeypatch):
    kind, earlier = small(name, monkeypatch)
    one, two = kind.world(2, earlier["at"]), kind.world(3, earlier["at"])
    one.load((earlier["exact"], []), "own")
    two.load((earlier["elastic"], []), "all")
    if kind.of is not Local:  # whose weights are in the model alone
        close(two.total(), one.total())
        assert not apart(two.alike(), one.alike())
    two.run(range(earlier["at"], earlier["at"] + 3))
    assert two.agree()
