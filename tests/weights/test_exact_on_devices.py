"""Weights that lie on a device: compared there by torch, published as those of the host are."""

import pytest
import torch

from commpress.errors import StateMismatch
from commpress.integrations.weights import own_part
from commpress.tiered_mem.store import TieredStore
from commpress.weights import Publisher, Receiver


@pytest.fixture
def fetched(monkeypatch):
    """Blocks that come from a device; those of the CPU are taken for such."""
    monkeypatch.setattr(own_part, "is_device", lambda device: True)
    found, fetch = [], own_part.OwnPart._fetch
    monkeypatch.setattr(
        own_part.OwnPart, "_fetch", lambda *args: found.append(fetch(*args)) or found[-1]
    )
    return found


def trained(rng):
    """Weights of several types, and versions of them that change little, nothing or all."""
    weights = {
        "a": torch.randn(50, 70, generator=rng),
        "b": torch.randn(30, generator=rng).bfloat16(),
        "c": torch.randint(0, 9, (700,), generator=rng),
        "d": torch.randn(2000, generator=rng).half(),
    }
    yield weights
    for change in (0.0, 1e-4, 10.0, 1e-4):
        for value in weights.values():
            moved = torch.rand(value.shape, generator=rng) < (0.05 if change < 1 else 1)
            value[moved] += change if value.is_floating_point() else int(change > 0)
        yield weights


def test_what_is_published_from_a_device_is_what_is_published_from_the_host(
    fetched, tmp_path, monkeypatch
):
    """The same files, byte for byte; and a publisher that follows goes on."""
    for where in ("device", "host"):
        if where == "host":
            few = [(at, values) for at, values in fetched if at is not None]
            assert len(few) > 5, "of blocks that changed little only the changes cross"
            assert all(len(at) == len(values) for at, values in few)
            assert any(at is None for at, _ in fetched[4:]), "others cross whole"
            monkeypatch.setattr(own_part, "is_device", lambda device: False)
            count = len(fetched)
        reader, publisher = None, None
        for turn, weights in enumerate(trained(torch.Generator().manual_seed(0))):
            if turn in (0, 3):
                if publisher is not None:
                    publisher.close()
                publisher = Publisher(
                    weights, tmp_path / where, dtype=torch.bfloat16, anchor_every=100, keep=9
                )
            sent = {
                name: (value.bfloat16() if value.is_floating_point() else value).clone()
                for name, value in weights.items()
            }
            publisher.publish(wait=False)
            for value in weights.values():
                value += 1  # they may change as soon as they were compared
            publisher.wait()
            for value in weights.values():
                value -= 1
            reader = reader or Receiver(tmp_path / where)
            reader.prepare()
            reader.install()
            for name, value in sent.items():
                assert torch.equal(reader.weights[name].view(torch.uint8), value.view(torch.uint8))
        publisher.close()
    assert len(fetched) == count
    for kind in ("difference", "anchor"):
        one, other = (sorted((tmp_path / w).glob(f"*.{kind}")) for w in ("device", "host"))
        assert [path.name for path in one] == [path.name for path in other]
        assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_copies_in_a_store_stay_there(fetched, tmp_path):
    weights = {"w": torch.zeros(5000)}
    with (
        TieredStore.open(tmp_path / "store", host="1MiB") as store,
        Publisher(weights, tmp_path / "run", store=store) as publisher,
    ):
        publisher.publish()
        weights["w"][7] = 1
        publisher.publish()
    assert not fetched


def test_a_publisher_that_was_interrupted_ends_and_the_next_one_goes_on(
    fetched, tmp_path, monkeypatch
):
    """Copies beside the weights may be of two versions then."""
    weights = {"a": torch.zeros(700), "b": torch.zeros(700).bfloat16()}
    publisher = Publisher(weights, tmp_path / "run")
    publisher.publish()
    for value in weights.values():
        value[3] += 1
    fetch, fetched[:] = own_part.OwnPart._fetch, []

    def interrupted(*args):
        if fetched:
            raise KeyboardInterrupt
        return fetch(*args)

    with monkeypatch.context() as patched:
        patched.setattr(own_part.OwnPart, "_fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish()
    with pytest.raises(StateMismatch, match="make a new Publisher"):
        publisher.publish()
    publisher.close()
    with Publisher(weights, tmp_path / "run") as publisher:
        publisher.publish()
    reader = Receiver(tmp_path / "run")
    reader.prepare()
    reader.install()
    assert all(torch.equal(reader.weights[name], value) for name, value in weights.items())
