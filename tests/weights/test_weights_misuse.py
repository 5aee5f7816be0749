"""Misuse and misfortune around published weights is refused or survived: models that change under a
publisher, places that vanish or are full, modes and clocks of the process."""

import resource
import shutil
import threading
import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from commpress.errors import Damaged, InvalidArgument, StateMismatch
from commpress.integrations.weights.weight_layout import NUMBERS
from commpress.weights import Publisher, Receiver, WeightServer, pull, verify
from ranks import FORKS, caught
from variants import first


def installed(folder):
    reader = Receiver(folder)
    reader.prepare()
    reader.install()
    return dict(reader.weights)


# ---------------------------------------------------------------- models


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.tokens.weight


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.bfloat16(), "is bfloat16 of .*; it was float32 of"),
        (
            lambda m: setattr(m, "tokens", nn.Embedding(8, 4)),
            "one tensor and are two|of .8, 4",
        ),
        (lambda m: setattr(m, "head", nn.Linear(4, 9, bias=False)), "were one tensor and are two"),
        (lambda m: delattr(m, "tokens"), "'tokens.weight' is missing"),
    ],
)
def test_a_model_that_became_another_is_refused(tmp_path, change, says):
    model = Tied()
    publisher = Publisher(model, tmp_path / "run")
    publisher.publish()
    change(model)
    with pytest.raises(StateMismatch, match=says):
        publisher.publish()
    before = installed(tmp_path / "run")
    assert len(verify(tmp_path / "run")) == 1
    assert before["head.weight"] is before["tokens.weight"]
    publisher.close()


def unsharded(folder):
    """After a forward of FSDP2's root its parameters are whole tensors, of other elements than
    those that this rank publishes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    fully_shard(model)
    with Publisher(lambda: dict(model.named_parameters()), folder) as publisher:
        publisher.publish()
        with torch.no_grad():
            model(torch.ones(1, 6))
        whole = not isinstance(next(model.parameters()), DTensor)
        error = caught(publisher.publish)
    with Publisher(model, folder) as publisher:  # a module's state is sharded again by torch
        with torch.no_grad():
            model(torch.ones(1, 6))
        density = publisher.publish().density
    return whole, type(error), str(error), density


def test_shards_that_are_whole_for_a_while_are_not_taken_for_shards(pool, tmp_path):
    for whole, kind, says, density in pool.run(unsharded, str(tmp_path / "run"), size=2):
        assert whole
        assert kind is StateMismatch
        assert "sharded anew" in says
        assert density == 0


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({0: torch.zeros(2)}, "weights are 0 with a Tensor, expected a module"),
        (lambda: {"w": [1.0]}, "'w' with a list"),
        (lambda: None, "with a NoneType"),
        (nn.Linear(2, 2).parameters(), "with a Tensor"),
        ("model.pt", "with a str"),
        (5, "with a int"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "sparse"),
        ({"w": torch.zeros(2, device="meta")}, "on meta"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, "one of bool, int8, uint8"),
    ],
)
def test_what_is_no_tensor_in_memory_is_refused(tmp_path, weights, says):
    with pytest.raises(InvalidArgument, match=says):
        Publisher(weights, tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"to": None}, "None is no place, expected a folder"),
        ({"to": ""}, "'' is no place"),
        ({"to": "http://a:1"}, "serve it with commpress weights serve"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', expected floats"),
        ({"keep": 0}, "keep is 0, expected a whole number of at least 1"),
        ({"anchor_every": 1.5}, "anchor_every is 1.5"),
        ({"store": "disk"}, "store is 'disk', expected a TieredStore"),
    ],
)
def test_an_option_that_cannot_be_is_named(tmp_path, options, says):
    with pytest.raises(InvalidArgument, match=says):
        Publisher({"w": torch.zeros(2)}, **{"to": tmp_path / "run"} | options)


@pytest.mark.parametrize("version", [2.5, "3", True, 1, 1 << 60])
def test_a_version_is_a_larger_whole_number(tmp_path, version):
    with Publisher({"w": torch.zeros(2)}, tmp_path) as publisher:
        publisher.publish()
        with pytest.raises(InvalidArgument, match="expected a whole number above 1, the last one"):
            publisher.publish(version)


def test_a_version_whose_wait_was_interrupted_is_still_waited_for(tmp_path, monkeypatch):
    """The next call would compare weights with copies that are about to change."""
    weights, written = {"w": torch.zeros(3)}, threading.Event()
    with Publisher(weights, tmp_path / "run") as publisher:
        write = publisher._place.write
        monkeypatch.setattr(
            publisher._place,
            "write",
            lambda *args, **named: written.wait() and write(*args, **named),
        )
        publisher.publish(wait=False)
        with monkeypatch.context() as interrupted:
            interrupted.setattr(
                publisher._pending, "result", mock.Mock(side_effect=KeyboardInterrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                publisher.wait()
        threading.Timer(0.2, written.set).start()
        assert publisher.wait().version == 1
        weights["w"] += 1
        assert publisher.publish().version == 2
    assert torch.equal(installed(tmp_path / "run")["w"], weights["w"])


def test_a_publisher_that_was_closed_says_so(tmp_path):
    with Publisher({"w": torch.zeros(2)}, tmp_path) as publisher:
        pass
    publisher.close()
    with pytest.raises(StateMismatch, match=r"it was closed\): make a new Publisher"):
        publisher.publish()


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        (["w"], "expected a name of the model"),
        ({"w": 5}, "mapping has 'w': 5"),
        ({"typo": "w"}, "mapping has 'typo'"),
    ],
)
def test_a_mapping_that_names_nothing_is_refused(tmp_path, mapping, says):
    with Publisher({"w": torch.ones(2)}, tmp_path) as publisher:
        publisher.publish()
    reader, model = Receiver(tmp_path), {"w": torch.zeros(2)}
    reader.prepare()
    with pytest.raises(InvalidArgument, match=says):
        reader.install(model, mapping)
    with pytest.raises(StateMismatch, match="'w' of the model is not published"):
        reader.install(model, {"w": lambda named: named["w"].numpy()})
    assert not model["w"].any()
    reader.install(model)


@pytest.mark.parametrize("wait", ["5", -1, float("nan"), float("inf")])
def test_a_wait_is_seconds(tmp_path, wait):
    with pytest.raises(InvalidArgument, match="expected seconds of at least 0"):
        Receiver(tmp_path).prepare(wait=wait)


KINDS = [getattr(torch, name) for name in NUMBERS]


@pytest.mark.parametrize("dtype", KINDS, ids=list(NUMBERS))
def test_numbers_of_every_type_arrive_in_every_bit(tmp_path, dtype):
    """Any patterns, so with zeros of both signs and payloads of NaN; transposed, alone, none."""
    draws = torch.Generator().manual_seed(0)
    octets = torch.randint(0, 256, (8 * 700,), dtype=torch.uint8, generator=draws)
    whole = octets.view(dtype) if dtype != torch.bool else octets > 99
    weights = {"w": whole, "t": whole[:42].reshape(6, 7).t(), "one": whole[3], "no": whole[:0]}
    reader, other = Receiver(tmp_path), {k: torch.zeros_like(v) for k, v in weights.items()}
    with Publisher(weights, tmp_path) as publisher:
        for _ in range(2):
            publisher.publish()
            reader.prepare()
            reader.install(other)
            for name, value in weights.items():
                pair = [v.contiguous().view(-1).view(torch.uint8) for v in (value, other[name])]
                assert torch.equal(*pair), name
            whole.view(torch.uint8)[::37] ^= 1


def test_models_of_no_elements_and_versions_without_a_change_are_published(tmp_path):
    weights = {"none": torch.zeros(0, 4), "w": torch.zeros(70), "scalar": torch.tensor(2)}
    for name, given in (("some", weights), ("empty", {"none": torch.zeros(3, 0)}), ("no", {})):
        with Publisher(given, tmp_path / name) as publisher:
            for version in (1, 2):
                report = publisher.publish()
                assert report.density == (name == "some" and version == 1)
        assert [each.version for each in verify(tmp_path / name)] == [1, 2]
        found = installed(tmp_path / name)
        assert {k: v.shape for k, v in found.items()} == {k: v.shape for k, v in given.items()}


def test_a_model_in_another_order_takes_weights_by_their_names(tmp_path):
    weights = {"a": torch.rand(3), "b": torch.rand(3), "c": torch.rand(3)}
    with Publisher(weights, tmp_path / "run") as publisher:
        publisher.publish()
    reader = Receiver(tmp_path / "run")
    reader.prepare()
    with pytest.raises(StateMismatch, match="'d' of the model is not published"):
        reader.install({name: torch.zeros(3) for name in "dcba"})
    model = {name: torch.zeros(3) for name in "cab"}
    reader.install(model)
    assert all(torch.equal(model[name], value) for name, value in weights.items())


def test_adapters_alone_and_merged_weights_reach_another_model(tmp_path):
    """Merge by peft, whose merged weights are other numbers than its modules hold."""
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(0)
        base = nn.ModuleDict({"q": nn.Linear(16, 16), "o": nn.Linear(16, 4)})
        base.config = {"model_type": "custom"}
        base.forward = lambda x: base["o"](base["q"](x))
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q"]))

    def adapters(model):
        return {name: p for name, p in model.named_parameters() if "lora_" in name}

    def merged():
        layer = trained.base_model.model["q"]
        return {"q.weight": layer.base_layer.weight + layer.get_delta_weight("default")}

    trained, served, plain = adapted(), adapted(), nn.Linear(16, 16)
    with (
        Publisher(adapters(trained), tmp_path / "adapters") as alone,
        Publisher(merged, tmp_path / "merged") as whole,
    ):
        for _ in range(3):
            with torch.no_grad():
                for value in adapters(trained).values():
                    value += 0.1 * torch.randn_like(value)
            report = alone.publish()
            whole.publish()
    assert report.dense_bytes == 4 * 2 * (16 + 16)
    reader = Receiver(tmp_path / "adapters")
    reader.prepare()
    reader.install(adapters(served))
    x = torch.randn(5, 16)
    assert torch.equal(served(x), trained(x))
    reader = Receiver(tmp_path / "merged")
    reader.prepare()
    reader.install({"q.weight": plain.weight})
    assert torch.equal(plain.weight, merged()["q.weight"])


# ---------------------------------------------------------------- modes of the process


def test_inference_mode_and_another_default_device_change_nothing(tmp_path):
    """Readers live in loops under inference_mode, and engines set a default device to load."""
    with torch.inference_mode():
        weights, model = {"w": torch.randn(300), "s": torch.ones(3)}, {"w": torch.zeros(300)}
        model["s"], reader = torch.zeros(3), None
    torch.set_default_device("meta")
    try:
        for turn in range(4):  # made and used inside and outside of the mode
            with torch.inference_mode(turn % 2 == 0), Publisher(weights, tmp_path) as publisher:
                publisher.publish()
                reader = reader or Receiver(tmp_path)
                reader.prepare()
            with torch.inference_mode(turn < 2):
                reader.install(model)
            assert torch.equal(model["w"], weights["w"])
            with torch.inference_mode():
                weights["w"] += 1
    finally:
        torch.set_default_device(None)
    parameter = nn.Linear(3, 3)
    with Publisher(parameter, tmp_path / "module") as publisher:
        publisher.publish()
    reader = Receiver(tmp_path / "module")
    reader.prepare()
    reader.install(parameter)
    parameter(torch.ones(1, 3)).sum().backward()  # it is still a leaf that training goes on with
    assert parameter.weight.grad is not None


def test_a_wrong_clock_changes_nothing(tmp_path, monkeypatch):
    server, times = None, iter([4e9, 0.0, 2e9, 5.0] * 1000)
    monkeypatch.setattr(time, "time", lambda: next(times))
    weights = {"w": torch.zeros(40)}
    with Publisher(weights, tmp_path / "run") as publisher:
        server = WeightServer(tmp_path / "run", key=b"k" * 32)
        reader = Receiver(server.url, key=b"k" * 32)
        for version in (1, 2):
            publisher.publish()
            assert reader.prepare(wait=5) == version
            reader.install()
    server.close()


# ---------------------------------------------------------------- places


def full(folder, room, said):
    """Publish with so many bytes left in any file."""
    with Publisher({"w": torch.randn(20_000)}, folder) as publisher:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        said.put(type(caught(publisher.publish)).__name__)


@pytest.mark.parametrize("room", first(2, [100, 10_000, 0]))
def test_a_disk_that_is_full_leaves_what_was_published(tmp_path, room):
    """Whichever file is the first that does not fit; and a publisher with room goes on."""
    folder, said = tmp_path / "run", FORKS.Queue()
    with Publisher({"w": torch.zeros(20_000)}, folder) as publisher:
        publisher.publish()
    reader = Receiver(folder)
    reader.prepare()
    reader.install()
    publishing = FORKS.Process(target=full, args=(folder, room, said))
    publishing.start()
    assert said.get(timeout=60) == "OSError"
    publishing.join()
    assert not list(folder.glob("*.part"))
    assert len(verify(folder)) == 1
    assert reader.prepare() is None
    with Publisher({"w": torch.ones(20_000)}, folder) as publisher:
        assert publisher.publish().version == 2
    assert reader.prepare() == 2
    reader.install()
    assert float(reader.weights["w"].min()) == 1


def test_a_place_that_vanishes_is_named_and_the_live_weights_stay(tmp_path):
    folder, copy = tmp_path / "run", tmp_path / "copy"
    publisher = Publisher({"w": torch.ones(5)}, folder)
    publisher.publish()
    server = WeightServer(folder)
    readers = [Receiver(folder), Receiver(server.url)]
    for reader in readers:
        reader.prepare()
        reader.install()
    pull(folder, copy)
    shutil.rmtree(folder)
    for reader in readers:
        with pytest.raises(Damaged, match="has no versions any more, version 1 is held"):
            reader.prepare(wait=0.1)
        assert float(reader.weights["w"][0]) == 1
    with pytest.raises(Damaged, match="has no versions any more"):
        pull(server.url, copy)
    assert len(verify(copy)) == 1
    with pytest.raises(FileNotFoundError):
        publisher.publish()
    with pytest.raises(StateMismatch, match="make a new Publisher"):
        publisher.publish()
    publisher.close()
    server.close()


def test_a_file_in_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is no folder"):
        Publisher({"w": torch.ones(5)}, tmp_path / "file")
