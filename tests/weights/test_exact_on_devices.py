"""The exact block code of CUDA, from its source thread by thread on the CPU: the bytes of the law,
hashes of xxh3, and a publisher whose copies lie beside the weights."""

import numpy as np
import pytest
import torch

import exact_law as law
from commpress.checksum import checksum_of
from commpress.errors import Damaged
from commpress.integrations.weights import own_part
from commpress.kernels.cuda import exact_blocks as exact
from commpress.kernels.cuda.modules import EXACT
from commpress.tiered_mem.store import TieredStore
from commpress.weights import Publisher, Receiver
from cuda_shim import Shim, compiler

SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if compiler() is None:
        pytest.skip("no g++")
    return Shim(tmp_path_factory.mktemp("cuda"), [EXACT])


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def shim(built, monkeypatch, request):
    """``reverse``: threads and blocks take their turns the other way round."""
    monkeypatch.setattr(built, "reverse", request.param)
    monkeypatch.setattr(exact, "execute", built.execute)
    return built


def tensors(blocks):
    return [torch.from_numpy(block.view(SIGNED[block.itemsize]).copy()) for block in blocks]


def pairs(itemsize, rng):
    """Blocks of several lengths and densities, some of them far apart in value."""
    top = 1 << 8 * itemsize
    for numel, share, most in [
        (1, 1, 1),
        (5000, 0, 1),
        (31, 0.2, 1),
        (2048, 0.3, 3),
        (2049, 0.02, 1),
        (7000, 0.0005, 1 << 30),  # gaps of more than one tile
        (6001, 0.1, 40),
        (40_000, 0.0003, 2),
        (3000, 1, top),
    ]:
        old = rng.integers(0, top, numel).astype(f"u{itemsize}")
        new, which = old.copy(), rng.random(numel) < share
        new[which] += rng.integers(-most, most + 1, int(which.sum())).astype(new.dtype)
        yield old, new
    old = np.zeros(9000, f"u{itemsize}")
    old[:40], new = 3, old.copy()
    new[:9], new[40], new[-1] = top // 2, top - 1, 1  # a burst, and an escaped gap
    yield old, new


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_codes_are_those_of_the_law_and_lead_to_the_new_block(shim, itemsize):
    olds, news = zip(*pairs(itemsize, np.random.default_rng(itemsize)), strict=True)
    codes = exact.encode(tensors(olds), tensors(news))
    sparse = 0
    for old, new, code in zip(olds, news, codes, strict=True):
        expected = law.encode(old, new)
        if expected[0] == law.SAME or 5 * len(expected) <= 3 * new.nbytes:
            assert code == expected
            sparse += code[0] == law.SPARSE
        else:
            assert code is None
    assert sparse >= 5
    chosen = [i for i, code in enumerate(codes) if code is not None and code[0] == law.SPARSE]
    targets = tensors([olds[i] for i in chosen])
    exact.decode([codes[i] for i in chosen], targets)
    for i, target in zip(chosen, targets, strict=True):
        assert np.array_equal(target.numpy().view(news[i].dtype), news[i])


def test_a_damaged_code_is_refused_as_the_law_refuses_it_and_writes_nothing(shim):
    rng = np.random.default_rng(3)
    old = rng.integers(0, 1 << 16, 400).astype(np.uint16)
    new = old + (rng.random(400) < 0.1).astype(np.uint16)
    whole = law.encode(old, new)
    codes = [whole[:n] for n in range(1, len(whole), 3)]
    for _ in range(150):
        code = bytearray(whole)
        code[rng.integers(1, len(code))] ^= 1 << int(rng.integers(8))
        codes.append(bytes(code))
    refused = 0
    for code in codes:
        expected, target = old.copy(), tensors([old])
        try:
            law.decode(code, expected)
        except ValueError:
            refused += 1
            with pytest.raises(Damaged, match="block 0 of 1"):
                exact.decode([code], target)
        else:
            exact.decode([code], target)
        assert np.array_equal(target[0].numpy().view(np.uint16), expected)
    assert refused > len(codes) // 4


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_hashes_are_those_of_xxh3(shim, itemsize):
    rng = np.random.default_rng(4)
    sizes = [1025, 1088, 1089, 2047, 2048, 2049, 5000, 32 * 1024, 32 * 1024 + 1, 33 * 1024, 70_001]
    blocks = [rng.integers(0, 256, -(-n // itemsize) * itemsize).astype(np.uint8) for n in sizes]
    seeds = [0, 1, 1 << 36, 5 << 44 | 3, (1 << 64) - 1, *range(6)]
    given = tensors([block.view(f"u{itemsize}") for block in blocks])
    assert exact.hashes(given, seeds) == [
        checksum_of(block.data, seed) for block, seed in zip(blocks, seeds, strict=True)
    ]


# ---------------------------------------------------------------- a publisher


@pytest.fixture
def beside(shim, monkeypatch):
    """Weights that a publisher takes for those of a GPU."""
    monkeypatch.setattr(own_part, "on_device", lambda tensors: True)
    calls = []
    launch = exact.execute
    monkeypatch.setattr(exact, "execute", lambda each: (calls.append(each.kernel), launch(each)))
    return calls


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
    beside, tmp_path, monkeypatch
):
    """The same files, byte for byte; and a publisher that follows goes on."""
    for where in ("device", "host"):
        if where == "host":
            assert set(beside) == {"encode_blocks", "hash_blocks", "decode_blocks"}
            monkeypatch.setattr(own_part, "on_device", lambda tensors: False)
            count = len(beside)
        reader, publisher = None, None
        for turn, weights in enumerate(trained(torch.Generator().manual_seed(0))):
            if turn in (0, 3):
                if publisher is not None:
                    publisher.close()
                publisher = Publisher(
                    weights, tmp_path / where, dtype=torch.bfloat16, anchor_every=100, keep=9
                )
            publisher.publish()
            reader = reader or Receiver(tmp_path / where)
            reader.prepare()
            reader.install()
            for name, value in weights.items():
                sent = value.bfloat16() if value.is_floating_point() else value
                assert torch.equal(reader.weights[name].view(torch.uint8), sent.view(torch.uint8))
        publisher.close()
    assert len(beside) == count
    for kind in ("difference", "anchor"):
        one, other = (sorted((tmp_path / w).glob(f"*.{kind}")) for w in ("device", "host"))
        assert [path.name for path in one] == [path.name for path in other]
        assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_copies_in_a_store_stay_there(beside, tmp_path):
    weights = {"w": torch.zeros(5000)}
    with (
        TieredStore.open(tmp_path / "store", host="1MiB") as store,
        Publisher(weights, tmp_path / "run", store=store) as publisher,
    ):
        publisher.publish()
        weights["w"][7] = 1
        publisher.publish()
    assert not beside
