"""Reading a distributed checkpoint that somebody else may have changed: nothing is executed,
nothing is believed."""

import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

import commpress
from commpress.errors import InvalidArgument, StateMismatch


class Runs:
    """Unpickled by a call of ``function``."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def made(steps=3):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(300, 3))]
    optimizer = commpress.OneBitAdam(parameters, lr=0.01, exact_steps=1)
    for step in range(steps):
        parameters[0].grad = torch.full((300, 3), 0.1 * step)
        optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path):
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    commpress.save_distributed(made(), tmp_path / "saved")
    yield tmp_path / "saved"
    dist.destroy_process_group()


def changed(folder, change):
    """Pass the metadata through ``change``, and write back what it returns."""
    file = folder / ".metadata"
    content = change(pickle.loads(file.read_bytes()))
    file.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))


def state_of(optimizer):
    return torch.utils._pytree.tree_leaves(optimizer.state_dict())


@pytest.mark.parametrize("place", ["all", "within"])
@pytest.mark.parametrize(
    "function",
    [os.system, eval, exec, getattr, pickle.loads, torch.load, shutil.rmtree],
    ids=lambda f: f.__name__,
)
def test_metadata_that_names_a_function_is_refused_and_runs_nothing(
    saved, tmp_path, function, place
):
    mark = tmp_path / "executed"
    evil = (
        Runs(os.system, f"touch {mark}") if function is os.system else Runs(function, str(tmp_path))
    )
    if place == "within":
        changed(
            saved,
            lambda metadata: Metadata(metadata.state_dict_metadata, evil, metadata.storage_data),
        )
    else:
        changed(saved, lambda _: evil)
    with pytest.raises(
        StateMismatch, match=rf"names [\w.]+\.{function.__name__}, which.*Nothing was executed"
    ):
        commpress.load_distributed(made(0), saved)
    assert not mark.exists()
    assert tmp_path.exists()


@pytest.mark.parametrize("path", ["_get_layout.__globals__", "_get_layout.cache.__class__"])
def test_an_attribute_of_an_allowed_name_is_not_allowed(saved, path):
    text = b"".join(
        b"\x8c" + bytes([len(each)]) + each for each in (b"torch.serialization", path.encode())
    )
    (saved / ".metadata").write_bytes(b"\x80\x04" + text + b"\x93.")
    with pytest.raises(StateMismatch, match=path):
        commpress.load_distributed(made(0), saved)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_of_other_versions_is_read(saved, protocol):
    def older(metadata):
        for name in ("storage_meta", "version"):
            vars(metadata).pop(name, None)
        for each in metadata.storage_data.values():
            vars(each).pop("transform_descriptors", None)
        metadata.state_dict_metadata["bytes"] = BytesStorageMetadata()
        return pickle.dumps(metadata, protocol)

    changed(saved, older)
    fresh = made(0)
    commpress.load_distributed(fresh, saved)
    expected = state_of(made())
    assert len(expected) > 3
    for mine, theirs in zip(state_of(fresh), expected, strict=True):
        assert torch.equal(mine, theirs) if torch.is_tensor(mine) else mine == theirs


def test_a_folder_named_by_a_path_of_another_python_is_read(saved):
    def elsewhere(metadata):
        metadata.storage_meta = StorageMeta(checkpoint_id=Path("there"))
        return pickle.dumps(metadata, 2).replace(b"cpathlib\n", b"cpathlib._local\n")

    changed(saved, elsewhere)
    assert b"pathlib._local" in (saved / ".metadata").read_bytes()
    commpress.load_distributed(made(0), saved)


def test_tensors_larger_than_the_files_are_not_allocated(saved):
    def larger(metadata):
        metadata.state_dict_metadata["rank0/0"].size = torch.Size([1 << 50])
        return metadata

    changed(saved, larger)
    with pytest.raises(StateMismatch, match=r"describes tensors of \d{16} bytes, the files have"):
        commpress.load_distributed(made(0), saved)


@pytest.mark.parametrize(
    "content", [b"", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(Metadata(3))], ids=repr
)
def test_metadata_of_something_else_is_named(saved, content):
    (saved / ".metadata").write_bytes(content)
    with pytest.raises(StateMismatch, match=r"\.metadata (is no metadata|contains)"):
        commpress.load_distributed(made(0), saved)


@pytest.mark.parametrize(
    "name", ["x/0", "rankone/0", "rank0/outlines", "rank-1/outline", "rank99999999999999999999/0"]
)
def test_names_that_no_rank_wrote_are_left_alone(saved, name):
    def renamed(metadata):
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata["rank0/0"]
        return metadata

    changed(saved, renamed)
    commpress.load_distributed(made(0), saved)


def test_a_missing_part_is_named(saved):
    def without(metadata):
        del metadata.state_dict_metadata["rank0/0"]
        return metadata

    changed(saved, without)
    with pytest.raises(StateMismatch, match="outline of rank 0 is broken: KeyError"):
        commpress.load_distributed(made(0), saved)


def _hook_resumed(folder):
    states = []
    for load in (False, True):
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(31, 7))
        state = commpress.compress(ddp, "int4", min_numel=1)
        if load:
            commpress.load_distributed(state, folder)
        else:
            ddp(torch.full((5, 31), 1.0 + dist.get_rank())).square().sum().backward()
            commpress.save_distributed(state, folder)
        states.append(torch.utils._pytree.tree_leaves(state.state_dict()))
    tensors = [[x for x in leaves if torch.is_tensor(x)] for leaves in states]
    return len(tensors[0]) > 0 and all(map(torch.equal, *tensors))


def test_residuals_of_the_hook_come_back_in_every_bit(pool, tmp_path):
    assert pool.run(_hook_resumed, str(tmp_path / "hook"), size=2) == [True, True]


def test_what_has_no_elastic_state_is_refused_with_the_cure(tmp_path):
    weights = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(InvalidArgument, match="SGD has no elastic_state_dict: leave it out"):
        commpress.save_distributed(torch.optim.SGD(weights, 0.1), tmp_path, elastic=True)
