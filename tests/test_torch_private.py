"""Every use of torch beyond its promises does what its entry in ``commpress.torch_private`` says, on this version."""

import inspect
from importlib.metadata import EntryPoint

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import commpress.backend
import sources
from commpress import torch_private
from commpress.errors import InvalidArgument, MissingPackage

FSDP2 = torch_private.RELEASE >= (2, 9)


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam_steps_as_the_optimizers_of_torch(decoupled):
    start, gradient = torch.arange(6.0) - 2, torch.tensor([1.0, -2, 0, 3, 0.5, -0.1])
    twin = start.clone().requires_grad_()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([twin], lr=0.1, weight_decay=0.3, fused=True)
    ours, m, v, count = start.clone(), torch.zeros(6), torch.zeros(6), torch.zeros(())
    for _ in range(3):
        twin.grad = gradient.clone()
        optimizer.step()
        torch_private.adam(
            [ours], [gradient.clone()], [m], [v], [], [count], fused=True, amsgrad=False, beta1=0.9, beta2=0.999, lr=0.1,
            weight_decay=0.3, eps=1e-8, maximize=False, decoupled_weight_decay=decoupled,
        )  # fmt: skip
    assert torch.equal(ours, twin.detach())


def test_single_collectives_have_their_names(pool):
    assert pool.run(_gather_and_scatter, size=2) == [([0.0, 0.0, 1.0, 1.0], [4.0])] * 2


def _gather_and_scatter():
    every, own = torch.empty(4), torch.empty(1)
    torch_private.all_gather_single(every, torch.full((2,), float(dist.get_rank())))
    torch_private.reduce_scatter_single(own, torch.full((2,), 2.0))
    return every.tolist(), own.tolist()


def test_a_backend_numbers_its_calls_without_a_warning(capfd):
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    torch_private.begin_sequence(backend)
    assert backend._get_sequence_number_for_group() >= 0
    assert "deprecated" not in capfd.readouterr().err


def test_the_refusing_backend_refuses():
    if torch_private.RELEASE < (2, 10):
        with pytest.raises(MissingPackage, match=r"needs torch 2\.10"):
            torch_private.refusing_backend(0, 1, lambda options: None)
        return
    given = []
    backend = torch_private.refusing_backend(0, 1, given.append)
    assert len(given) == 1
    with pytest.raises(RuntimeError):
        backend.allreduce([torch.ones(1)], dist.AllreduceOptions())


@pytest.mark.skipif(FSDP2, reason="this torch takes communication of others'")
def test_fsdp2_of_old_is_refused():
    with pytest.raises(MissingPackage, match=r"from torch 2\.9 on"):
        torch_private.fsdp_communication()


@pytest.mark.skipif(not FSDP2, reason="FSDP2 takes communication of others' from torch 2.9 on")
def test_fsdp2_hands_buffers_over_as_ours_take_them():
    gather, scatter = torch_private.fsdp_communication()
    for kind, needed in ((gather, ["output_tensor", "input_tensor", "group"]), (scatter, ["output_tensor", "op"])):
        taken = inspect.signature(kind.__call__).parameters
        assert set(needed) | {"async_op"} <= set(taken)
        assert {"size", "dtype", "device"} <= set(inspect.signature(kind.allocate).parameters)


def test_the_groups_of_a_unit(pool):
    assert pool.run(_units, size=2) == [[["0.weight", "0.bias"]]] * 2


def _units():
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    names = {id(p): name for name, p in model.named_parameters()}
    return [[names[id(p.sharded_param)] for p in group.fsdp_params] for group in torch_private.fsdp_groups(model)]


# ---------------------------------------------------------------- the backend's entry point


def test_the_entry_point_registers_both_backends():
    """An answer as torch 2.14 gives it to a name that it does not know."""
    points = sources.project()["project"]["entry-points"]["torch.distributed.backends"]
    assert set(points) == {"commpress", "commpress_mpi"}
    for name, value in points.items():
        EntryPoint(name, value, "torch.distributed.backends").load()()
        assert dist.is_backend_available(name)
        assert name.upper() in dist.Backend._plugins


def test_reconfiguring_is_neither_promised_nor_taken(pool, tmp_path):
    said = pool.run(_reconfigure, str(tmp_path / "store"), size=2)
    assert all(promised is False and "keeps its ranks" in error for promised, error in said)


def _reconfigure(file):
    group = commpress.backend.ProcessGroup(dist.FileStore(file, 2), dist.get_rank(), 2)
    with pytest.raises(InvalidArgument) as caught:
        group.reconfigure(None)
    return group.supports_reconfigure, str(caught.value)


def test_asking_for_reconfiguration_is_refused():
    class Asked:
        enable_reconfigure = True

    make = dist.Backend._plugins["COMMPRESS"].creator_fn
    with pytest.raises(InvalidArgument, match="enable_reconfigure is True"):
        make(Asked(), None)
