"""A reader takes what follows from what it holds, whole or not at all, and says why it refuses
anything else."""

import os
import shutil
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from commpress.errors import Damaged, InvalidArgument, StateMismatch
from commpress.integrations.weights.weight_layout import (
    DescribedTensor,
    WeightLayout,
    WeightPiece,
)
from commpress.integrations.weights.weight_records import (
    HeadRecord,
    VersionRecord,
    pack,
    unpack,
    version_name,
)
from commpress.weights import Publisher, Receiver, pull, stat, verify

SHAPES = {"a": (300, 40), "b": (40,), "c": (7, 3, 5)}


def at(version):
    """The weights of a version, as anybody can compute them."""
    draws = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn(shape, generator=draws).bfloat16() for name, shape in SHAPES.items()
    }
    for later in range(1, version):
        draws = torch.Generator().manual_seed(later)
        for value in values.values():
            value += (torch.rand(value.shape, generator=draws) < 0.03) * value * 2.0**-7
    return values


def publish(folder, versions, begin=1, **options):
    live = at(begin)
    with Publisher(live, folder, **options) as publisher:
        for version in versions:
            for name, value in at(version).items():
                live[name].copy_(value)
            publisher.publish()
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Eight versions, with anchors at 1 and 5."""
    return publish(tmp_path_factory.mktemp("run") / "run", range(1, 9), anchor_every=4)


@pytest.fixture
def folder(published, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(published, tmp_path / "run"))


def same(weights, version):
    return all(
        torch.equal(weights[name].view(torch.int16), value.view(torch.int16))
        for name, value in at(version).items()
    )


def reader_at(folder, version):
    reader = Receiver(folder)
    reader.prepare(version)
    reader.install()
    assert same(reader.weights, version)
    return reader


def files(folder, version, kind=""):
    return sorted(
        path
        for path in Path(folder).iterdir()
        if path.name.startswith(version_name(version)) and kind in path.name
    )


def edited(folder, number, /, **changes):
    """The record of a version, as another publisher might have written it."""
    path = Path(folder, version_name(number))
    record = unpack(VersionRecord, path.read_bytes(), path.name)
    path.write_bytes(pack(record._replace(**changes)))


def head(folder):
    return unpack(HeadRecord, Path(folder, "head").read_bytes(), "head")


# ---------------------------------------------------------------- what follows


@pytest.mark.parametrize("held", range(9))
@pytest.mark.parametrize("target", [5, 7, 8])
def test_a_reader_of_any_version_comes_to_any_later_one(published, held, target):
    if held >= target:
        pytest.skip("not later")
    reader = reader_at(published, held) if held else Receiver(published)
    assert reader.prepare(target) == target
    assert reader.version == held, "nothing is installed by preparing"
    assert not held or same(reader.weights, held)
    assert reader.install() == target
    assert same(reader.weights, target)


def test_there_may_be_nothing_new_or_nothing_at_all(published, tmp_path):
    reader = reader_at(published, 8)
    assert reader.prepare() is None
    assert Receiver(tmp_path).prepare() is None
    with pytest.raises(StateMismatch, match=r"call prepare\(\) first"):
        reader.install()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base": 3}, "are from version 3, but version 5 is held"),
        ({"base": 5, "version": 7}, "holds version 7"),
        ({"base_digest": 12345}, "digest 0000000000003039"),
        ({"run": "another"}, "of run another"),
        ({"epoch": 0}, "an old publisher still writes"),
    ],
)
def test_a_version_that_does_not_follow_is_refused_by_name(folder, changes, says):
    reader = reader_at(folder, 5)
    edited(folder, 6, **changes)
    with pytest.raises((StateMismatch, Damaged), match=says):
        reader.prepare(6)
    assert same(reader.weights, 5)


def test_differences_of_other_blocks_are_refused(folder):
    reader = reader_at(folder, 5)
    record = unpack(VersionRecord, files(folder, 6)[0].read_bytes(), "v")
    (hashes,), (file,) = record.hashes, record.differences
    more = file._replace(sizes=file.sizes.repeat(2))
    edited(folder, 6, hashes=(hashes.repeat(2),), differences=(more,))
    with pytest.raises(Damaged, match="have other blocks"):
        reader.prepare(6)


def test_versions_that_come_again_or_out_of_order_are_refused(folder):
    reader = reader_at(folder, 6)
    for version in (6, 5):
        with pytest.raises(
            StateMismatch, match=f"version {version} was applied already: version 6 is held"
        ):
            reader.prepare(version)
    with pytest.raises(InvalidArgument, match="expected one that is kept"):
        reader.prepare(99)
    for one, other in zip(files(folder, 7), files(folder, 8), strict=True):  # 8 under the name of 7
        shutil.copy(other, one)
    with pytest.raises(Damaged, match="holds version 8"):
        reader.prepare(7)
    assert same(reader.weights, 6)


def test_a_source_that_went_back_or_began_anew_is_refused(folder, tmp_path):
    reader = reader_at(folder, 8)
    older = head(folder)
    older = older._replace(versions=older.versions[:-1])
    Path(folder, "head").write_bytes(pack(older))
    with pytest.raises(StateMismatch, match="it is an older copy of the run"):
        reader.prepare()
    shutil.rmtree(folder)
    publish(folder, range(1, 10))
    with pytest.raises(StateMismatch, match="make a new Receiver to begin with that run"):
        reader.prepare()
    assert same(reader.weights, 8)


def test_another_version_of_the_same_number_is_refused(folder):
    reader = reader_at(folder, 8)
    record = unpack(VersionRecord, files(folder, 8)[0].read_bytes(), "v")
    edited(folder, 8, hashes=tuple(each + 1 for each in record.hashes))
    with pytest.raises(StateMismatch, match="the one held here"):
        reader.prepare()


def test_of_two_publishers_the_earlier_one_is_stopped(tmp_path):
    """Even if the later one has only begun."""
    first = Publisher(at(1), tmp_path / "run")
    first.publish()
    second = Publisher(at(2), tmp_path / "run")
    for _ in range(2):
        with pytest.raises(
            StateMismatch, match=r"another publisher has gone on|could not be published"
        ):
            first.publish()
    assert second.publish().version == 2
    with Publisher(at(3), tmp_path / "run") as third:
        assert third.publish().version == 3
    with pytest.raises(StateMismatch, match="another publisher"):
        second.publish()
    assert [each.version for each in verify(tmp_path / "run")] == [1, 2, 3]
    assert same(reader_at(tmp_path / "run", 3).weights, 3)


# ---------------------------------------------------------------- bytes that are lost or changed


@pytest.mark.parametrize("kind", ["", "difference", "anchor", "head"])
def test_any_bit_that_flips_is_found_and_nothing_is_installed(folder, kind):
    """Or it is in a byte of padding that no number depends on, and the weights are right."""
    every = [folder / "head", *files(folder, 5)]
    found = next(p for p in every if (kind in p.name if kind else p.name == version_name(5)))
    original, steps = found.read_bytes(), max(1, 8 * found.stat().st_size // 50)
    for bit in range(0, 8 * len(original), steps):
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << bit % 8
        found.write_bytes(changed)
        reader = (
            Receiver(folder) if kind == "anchor" else reader_of(folder, 4, found, original, changed)
        )
        try:
            reader.prepare(5)
            reader.install()
        except (Damaged, StateMismatch):
            assert kind == "anchor" or same(reader.weights, 4)
        else:
            assert same(reader.weights, 5)
    found.write_bytes(original)


def reader_of(folder, version, found, original, changed):
    found.write_bytes(original)
    reader = reader_at(folder, version)
    found.write_bytes(changed)
    return reader


@pytest.mark.parametrize("how", ["cut", "gone"])
@pytest.mark.parametrize("kind", ["difference", "record"])
def test_a_version_that_is_lost_stops_a_reader_until_the_next_anchor(folder, how, kind):
    reader, first = reader_at(folder, 2), reader_at(folder, 2)
    victim = next(p for p in files(folder, 3) if (kind in p.name) == (kind == "difference"))
    if how == "cut":
        os.truncate(victim, victim.stat().st_size - 1)
    else:
        victim.unlink()
    for target in (3, 4):
        with pytest.raises(Damaged):
            reader.prepare(target)
    assert reader.version == 2
    assert same(reader.weights, 2)
    assert first.prepare() == 8, "anchor 5 is beyond the gap"
    first.install()
    assert same(first.weights, 8)
    with pytest.raises(Damaged):
        verify(folder)


def test_a_reader_behind_all_that_is_kept_begins_with_an_anchor(tmp_path):
    folder = publish(tmp_path / "run", [1])
    reader = reader_at(folder, 1)
    publish(folder, range(2, 12), anchor_every=2, keep=1)
    assert stat(folder)[0].version > 2
    assert len(list(folder.iterdir())) < 12, "older versions are removed"
    assert reader.prepare() == 11
    reader.install()
    assert same(reader.weights, 11)


def test_anchors_come_when_differences_weigh_as_much(tmp_path):
    found = stat(publish(tmp_path / "run", range(1, 60), keep=100))
    anchors = [each.version for each in found if each.anchor_bytes]
    assert len(anchors) >= 2
    for first, last in pairwise(anchors):
        sizes = [each.bytes for each in found if first < each.version <= last]
        assert sum(sizes[:-1]) < found[0].anchor_bytes <= sum(sizes)


def test_nothing_writes_to_the_weights_of_a_try_that_failed(tmp_path, monkeypatch):
    """The next one begins with the same memory, and has it alone."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    receiver, busy, writing = Receiver(tmp_path), threading.Event(), []

    class TwoParts:
        layout = WeightLayout((DescribedTensor("w", "float32", (2,)),))
        blocks = tuple([[WeightPiece(0, (part,), (1,), 0, 1)]] for part in range(2))

        def into(self, part, block, content):
            if part == 0:
                busy.wait()
                raise Damaged("of part 0")
            writing.append(part)
            busy.set()
            time.sleep(0.3)
            writing.remove(part)

    receiver._spare = {"w": torch.zeros(2)}
    with pytest.raises(Damaged):
        receiver._fill(TwoParts(), {})
    assert not writing


def test_what_was_prepared_before_an_error_is_not_installed(folder):
    """Its tensors are those that the next version is decoded into."""
    reader = reader_at(folder, 5)
    assert reader.prepare(6) == 6
    found = files(folder, 7, "difference")[0]
    found.write_bytes(found.read_bytes()[:-1] + b"x")
    with pytest.raises(Damaged):
        reader.prepare(7)
    with pytest.raises(StateMismatch, match=r"call prepare\(\) first"):
        reader.install()
    assert same(reader.weights, 5)
    reader.prepare(6)
    assert reader.install() == 6
    assert same(reader.weights, 6)


# ---------------------------------------------------------------- into models


class Model(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


def test_a_model_gets_all_or_nothing(published):
    reader = reader_at(published, 3)
    reader.prepare(6)
    wrong = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    for change, says in (
        (
            {"c": torch.zeros(7, 3, 4, dtype=torch.bfloat16)},
            r"'c' is torch.bfloat16 of \[7, 3, 4\]",
        ),
        ({"c": torch.zeros(7, 3, 5, dtype=torch.float16)}, "'c' is torch.float16"),
        ({"d": torch.zeros(3)}, "'d' of the model is not published"),
    ):
        with pytest.raises(StateMismatch, match=says):
            reader.install(wrong | change)
    with pytest.raises(StateMismatch, match="'c' is published, and the model has no such tensor"):
        reader.install({name: wrong[name] for name in "ab"})
    assert not any(value.any() for value in wrong.values())
    assert reader.version == 3
    model = Model()
    assert reader.install(model) == 6
    assert same(dict(model.named_parameters()), 6)


def test_a_model_whose_tensors_are_tied_takes_only_weights_that_are_alike(tmp_path):
    """Two tensors of which the model has room for one are refused, unless they have the same
    bits."""
    apart, tied = nn.Linear(4, 4), nn.Linear(4, 4)
    apart.register_parameter("head", nn.Parameter(torch.zeros(4, 4)))
    tied.register_parameter("head", tied.weight)
    before = tied.weight.detach().clone()
    with Publisher(apart, tmp_path / "run") as publisher:
        publisher.publish()
        reader = Receiver(tmp_path / "run")
        reader.prepare()
        with pytest.raises(StateMismatch, match="'weight' and 'head' are one tensor of the model"):
            reader.install(tied)
        assert torch.equal(tied.weight, before)
        with torch.no_grad():
            apart.head.copy_(apart.weight)
        publisher.publish()
    reader.prepare()
    reader.install(tied)
    assert torch.equal(tied.head, apart.head)


def test_wider_floats_take_the_same_numbers(published):
    reader, model = Receiver(published), Model(torch.float32)
    reader.prepare()
    reader.install(model)
    assert same({name: value.detach().bfloat16() for name, value in model.named_parameters()}, 8)


@pytest.mark.parametrize(
    ("published", "there", "fits"),
    [
        ("float8_e4m3fn", "float32", True),
        ("float8_e8m0fnu", "float64", True),
        ("float32", "float64", True),
        ("float8_e4m3fn", "bfloat16", False),
        ("float8_e4m3fn", "float8_e5m2", False),
        ("float16", "bfloat16", False),
        ("float32", "bfloat16", False),
        ("int64", "float32", False),
        ("uint8", "float32", False),
        ("uint8", "int16", False),
    ],
)
def test_a_model_takes_its_own_type_and_wider_floats(tmp_path, published, there, fits):
    value = torch.arange(0, 120, 8, dtype=torch.uint8)
    dtype = getattr(torch, published)
    value = value.view(dtype) if dtype.itemsize == 1 else value.to(dtype)
    model = {"w": torch.zeros(15, dtype=getattr(torch, there))}
    with Publisher({"w": value}, tmp_path) as publisher:
        publisher.publish()
    reader = Receiver(tmp_path)
    reader.prepare()
    if fits:
        reader.install(model)
        assert torch.equal(model["w"], value.to(model["w"].dtype))
    else:
        with pytest.raises(StateMismatch, match=r"'w' is torch\.\w+ of .* in the model"):
            reader.install(model)


def test_a_mapping_names_and_makes_tensors(published):
    reader = Receiver(published)
    reader.prepare()
    model = {
        "first": torch.zeros(40, 300, dtype=torch.bfloat16),
        "both": torch.zeros(145, dtype=torch.bfloat16),
    }
    reader.install(
        model,
        {
            "first": lambda weights: weights["a"].t(),
            "both": lambda weights: torch.cat([weights["b"], weights["c"].flatten()]),
        },
    )
    assert torch.equal(model["first"], at(8)["a"].t())
    renamed = {
        f"model.{name}": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()
    }
    again = Receiver(published)
    again.prepare()
    again.install(renamed, {f"model.{name}": name for name in SHAPES})
    assert same({name: renamed[f"model.{name}"] for name in SHAPES}, 8)


def test_masters_are_published_in_another_type(tmp_path):
    """And what is published is what rounding makes of them: a change by the law of rounding."""
    torch.manual_seed(0)
    master = torch.randn(1 << 18) * 0.02
    with Publisher({"w": master}, tmp_path / "run", dtype=torch.bfloat16) as publisher:
        publisher.publish()
        moves = 1e-6 * torch.randn(master.shape)
        ulp = torch.exp2(torch.floor(torch.log2(master.abs())) - 7)
        master += moves
        report = publisher.publish()
    reader = Receiver(tmp_path / "run")
    reader.prepare()
    reader.install()
    assert torch.equal(reader.weights["w"].view(torch.int16), master.bfloat16().view(torch.int16))
    expected = float((moves.abs() / ulp).clamp(max=1).mean())
    assert report.density == pytest.approx(expected, rel=0.05)  # of 262,144 draws
    assert report.bytes < 0.02 * report.dense_bytes


def test_more_weights_than_a_reader_allows_are_refused_before_memory_is_taken(published):
    with pytest.raises(InvalidArgument, match=r"limit is 1 KiB, and .* has weights of"):
        Receiver(published, limit="1KiB").prepare()


def test_a_publisher_goes_on_from_a_copy_and_readers_follow_it(tmp_path):
    """A copy has no sign of earlier publishers but their epoch in its head."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    for begin in range(3):
        publish(run, [begin + 1], begin=begin)
    pull(run, copy)
    reader = reader_at(run, 3)
    publish(copy, [4], begin=3)
    follower = Receiver(copy)
    follower._live, follower._spare, follower._held = reader._live, reader._spare, reader._held
    assert follower.prepare() == 4
    assert [each.epoch for each in verify(copy)][-1] == 4
    for source in (run, copy):
        with pytest.raises(InvalidArgument, match="that a publisher writes to: name another"):
            pull(source, copy)


def test_a_copy_of_a_copy_is_the_run(published, tmp_path):
    assert pull(published, tmp_path / "one") == pull(tmp_path / "one", tmp_path / "two") == 8
    reader_at(tmp_path / "two", 8)
    assert [each.version for each in verify(tmp_path / "two")] == [5, 6, 7, 8]
    assert pull(published, tmp_path / "two") == 8


def test_object_stores_of_fsspec_are_places(tmp_path):
    pytest.importorskip("fsspec")
    for url in (f"memory://{tmp_path.name}/run", f"local://{tmp_path}/run"):
        publish(url, range(1, 4))
        publish(url, range(4, 6), begin=3)
        reader_at(url, 5)
        assert stat(url)[-1].version == 5
        assert [each.epoch for each in verify(url)] == [1, 1, 1, 2, 2]


def test_what_another_process_writes_to_an_object_store_is_seen(tmp_path):
    """Though fsspec keeps what it knew of a file."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class Remembering(MemoryFileSystem):
        protocol, known = "remembering", {}

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.replace("remembering:", "memory:"))

        def info(self, path, **options):
            return self.known.setdefault(path, super().info(path, **options))

        def invalidate_cache(self, path=None):
            self.known.clear()

    fsspec.register_implementation("remembering", Remembering)
    for version in range(1, 4):
        publish(f"memory://{tmp_path.name}", [version], begin=max(version - 1, 1))
        assert stat(f"remembering://{tmp_path.name}")[-1].version == version


@pytest.mark.parametrize(
    "text", ["", "http://host:port", "http://", "http://a/b", "nothing://here"]
)
def test_a_source_that_is_none_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument):
        Receiver(text or "no folder here")
    with pytest.raises(InvalidArgument):
        Publisher({"a": torch.zeros(2)}, text) if text else Publisher({"a": 3}, tmp_path)
