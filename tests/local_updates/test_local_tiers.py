"""Local updates whose shared weights, outer state and residuals lie in a tiered store between
exchanges."""

import random
from typing import ClassVar

import pytest
import torch

import local_twin
from commpress.errors import InvalidArgument
from commpress.optim.outer import Average, Gossip, Nesterov, SlowMo, SparseLoCo
from local_twin import Ranks, equal, noise
from small_store import open_store, read
from variants import every_second


@pytest.fixture
def large(monkeypatch):
    """Parameters of 520 kB in all, of which two fragments do not fit into the store's memory
    together."""
    monkeypatch.setattr(
        local_twin,
        "SHAPES",
        [(250, 100), (5,), (310, 100), (24000,), (7, 4, 2), (200, 250)],
    )


def stores(tmp_path, size, **options):
    return [open_store(tmp_path / f"store-{rank}", **options) for rank in range(size)]


def kept_in(stores, **options):
    """Ranks, each with a store of its own."""
    return Ranks(len(stores), keeps=stores, **options)


PLANS = {
    "blocking": {"codec": "int4", "outer": Nesterov(), "fragments": 3, "every": 6},
    "overlapped": {
        "codec": "sign",
        "outer": Nesterov(),
        "fragments": 3,
        "every": 6,
        "overlap": 1,
        "alpha": 0.25,
    },
    "matrices": {"codec": "powersgd-2", "outer": SlowMo(), "fragments": 2},
    "gathered": {"codec": "topk-64+bits2", "outer": SparseLoCo(), "fragments": 2, "overlap": 1},
    "gossip": {
        "codec": None,
        "outer": Gossip(),
        "fragments": 3,
        "every": 6,
        "overlap": 1,
        "alpha": "keep",
    },
    "exact": {"codec": None, "outer": Average(), "fragments": 3, "feedback_decay": 1.0},
}


@pytest.mark.parametrize("plan", every_second(PLANS))
def test_a_store_changes_no_bit(tmp_path, large, plan):
    host, kept = (
        Ranks(2, **PLANS[plan]),
        kept_in(stores(tmp_path, 2, host="1600KiB"), **PLANS[plan]),
    )
    for step in range(14):
        host.step(noise(2, step))
        kept.step(noise(2, step))
        for a, b in zip(host.parameters, kept.parameters, strict=True):
            assert equal(a, b), step
    assert [each.digest() for each in host.local] == [each.digest() for each in kept.local]
    host.drain()
    kept.drain()
    assert [each.digest() for each in host.local] == [each.digest() for each in kept.local]


def test_one_fragment_at_a_time_is_in_memory(tmp_path, large):
    """The store's memory holds one of four fragments: they come ahead of their exchange and go to
    the disk by turns."""
    (store,) = stores(tmp_path, 1, host="1280KiB")
    ranks = kept_in([store], codec="sign", outer=Nesterov(), fragments=4, every=8)
    fragments = ranks.local[0].fragments
    with_residuals = sum(4 * f.numel * (f.tensors + 2) for f in fragments)
    assert with_residuals > 1.5 * store.usage().host_capacity
    for step in range(24):
        ranks.step(noise(1, step))
        assert all(
            f.weights.numel() == 0 and not f.state["momentum"].numel() for f in fragments if f.state
        )
        assert not ranks.local[0].exchanges.residuals.every()
    assert store.traffic()[0] > 0
    assert store.counters.prefetched > 0


@pytest.mark.parametrize("overlap", [0, 2])
def test_what_the_store_is_just_large_enough_for_always_fits(tmp_path, monkeypatch, overlap):
    """Wherever other tensors lie: these are read and dropped in between, in an order that is
    drawn."""
    monkeypatch.setattr(local_twin, "SHAPES", [(160, 100), (150, 100), (170, 100)])
    plan = {"codec": "sign", "outer": Nesterov(), "fragments": 3, "every": 6, "overlap": overlap}
    plan |= {"alpha": "keep"} if overlap else {}
    with pytest.raises(InvalidArgument, match="needs") as refused:
        kept_in(stores(tmp_path / "refused", 1, host="128KiB"), **plan)
    (store,) = stores(
        tmp_path, 1, host=f"{refused.value.args[0].split('needs ')[1].split(' KiB')[0]}KiB"
    )
    for i in range(20):
        store.put(f"other/{i}", torch.zeros(500 + 1000 * i))
    ranks, draw = kept_in([store], **plan), random.Random(1)
    for step in range(30):
        for i in draw.sample(range(20), 3):
            read(store, f"other/{i}")
        ranks.step(noise(1, step))
        ranks.saved()


@pytest.mark.parametrize("at", [5, 7])
@pytest.mark.parametrize("back", ["store", "host"])
def test_resumes_in_every_bit_from_a_store(tmp_path, at, back):
    """``at`` 7: an exchange is under way. A state from a store fits one in memory, and the other
    way round."""
    options = {
        "codec": "int4",
        "outer": Nesterov(),
        "fragments": 2,
        "every": 6,
        "overlap": 2,
        "alpha": "keep",
        "min_numel": 0,
    }
    one = kept_in(stores(tmp_path / "one", 2), **options)
    two = Ranks(2, **options) if back == "host" else kept_in(stores(tmp_path / "two", 2), **options)
    for step in range(15):
        one.step(noise(2, step))
        if step + 1 == at:
            states, weights = one.saved()
            assert (states[0]["flight"] is not None) == (at == 7)
    two.go_on(states, weights)
    for step in range(at, 15):
        two.step(noise(2, step))
    assert equal(one.parameters, two.parameters)


def test_a_store_that_is_too_small_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(local_twin, "SHAPES", [(300, 300), (300, 300)])
    (store,) = stores(tmp_path, 1, host="1MiB")
    with pytest.raises(
        InvalidArgument, match=r"fragment 0 needs .* larger host=, or pass more fragments="
    ):
        kept_in([store], outer=Nesterov(), codec="int4")
    with pytest.raises(InvalidArgument, match="whose state stays in memory"):
        kept_in([store], outer=lambda p: torch.optim.SGD(p, lr=1.0))


# ---------------------------------------------------------------- memory


def nbytes(*roots, without):
    """Bytes of all tensors that these objects hold, each storage once; ``without`` are not
    entered."""
    seen, found, left = {id(one) for one in without}, {}, list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or one is None or isinstance(one, str | bytes | int | float | type):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if not one.is_meta:
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            left += one
        elif hasattr(one, "__dict__") and type(one).__module__.startswith("commpress"):
            left += vars(one).values()
    return sum(found.values())


class Watched(Nesterov):
    """Nesterov that counts what is in memory as a mean arrives."""

    peaks: ClassVar[list] = []
    count: ClassVar = None

    def step(self, *args, **kwargs):
        super().step(*args, **kwargs)
        self.peaks.append(type(self).count())


BYTES = {None: 4.0, "int4": 0.52, "bits2": 0.29, "sign": 0.13}


@pytest.mark.parametrize(
    ("size", "codec", "fragments", "stored"),
    [
        (2, None, 1, False),
        (2, "int4", 4, False),
        (4, "sign", 1, False),
        (1, "bits2", 2, False),
        (2, "int4", 4, True),
        (3, None, 2, True),
    ],
)
def test_memory_is_what_the_documentation_says(
    tmp_path, monkeypatch, size, codec, fragments, stored
):
    monkeypatch.setattr(local_twin, "SHAPES", [(250, 80)] * 8)
    Watched.peaks.clear()
    options = {
        "codec": codec,
        "outer": Watched(),
        "fragments": fragments,
        "overlap": 1,
        "every": 2 * fragments,
    }
    ranks = (
        kept_in(stores(tmp_path, size, host="3MiB"), **options)
        if stored
        else Ranks(size, **options)
    )
    local, numel = ranks.local[0], 8 * 250 * 80
    outside = [*local.inner, *ranks.parameters[0], local.channel.inner, local.store]
    Watched.count = lambda: nbytes(local, without=outside)
    for step in range(4 * fragments + 1):
        ranks.step(noise(size, step))
    lossy, b = codec is not None, BYTES[codec]
    proposed = (4 + 4 / size) * lossy / fragments
    messages = (2 + 1 / size) * b / fragments
    if stored:
        during = (4 + (4 + 4 / size) * lossy) / fragments + proposed + messages
        arena = local.store.usage().host_capacity  # of which Θ and momentum are views
        assert (max(Watched.peaks) - arena) / numel == pytest.approx(during, rel=0.05)
        assert nbytes(local, without=outside) < 0.05 * numel
    else:
        expected = 4 + 4 + 4 + (4 + 4 / size) * lossy + proposed + messages
        assert nbytes(local, without=outside) / numel == pytest.approx(expected, rel=0.05)
