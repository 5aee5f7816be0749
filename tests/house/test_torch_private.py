"""Every use of torch beyond its promises does what its entry in ``commpress.torch_private`` says,
on this version."""

import dataclasses
import inspect
import io
from datetime import timedelta
from importlib.metadata import EntryPoint

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend
from torch.utils.checkpoint import checkpoint

import commpress
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
            [ours],
            [gradient.clone()],
            [m],
            [v],
            [],
            [count],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=0.1,
            weight_decay=0.3,
            eps=1e-8,
            maximize=False,
            decoupled_weight_decay=decoupled,
        )
    assert torch.equal(ours, twin.detach())


def test_a_backward_within_another_is_told_from_the_others():
    """Checkpoints with use_reentrant=True begin one, and a function's own backward does not."""
    found = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            found.append(torch_private.in_nested_backward())
            return gradient

    def backward(reentrant):
        x = torch.zeros(3, requires_grad=True)
        checkpoint(Noted.apply, x, use_reentrant=reentrant).sum().backward()
        torch.autograd.grad(Noted.apply(x).sum(), x)

    backward(True)
    backward(False)
    assert found == [True, False, False, False]
    assert not torch_private.in_nested_backward()


def test_a_loss_scale_is_read_again_whenever_it_was_written():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    reads, scale = [], torch_private.LossScale()
    asked = scaler.get_scale
    scaler.get_scale = lambda: reads.append(0) or asked()
    assert scale.of(None) == 1.0
    assert scale.of(scaler) == 8.0, "before the first loss"
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    found = []
    for factor in (1.0, 1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        reads.clear()
        found.append([scale.of(scaler) for _ in range(3)])
        assert len(reads) <= 1
        scaler.step(optimizer)
        scaler.update()
    assert found == [[8.0] * 3, [8.0] * 3, [16.0] * 3, [8.0] * 3]
    scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0})
    assert scale.of(scaler) == 4.0
    scaler.update(2.0)
    assert scale.of(scaler) == 2.0


def test_single_collectives_have_their_names(pool):
    assert pool.run(_gather_and_scatter, size=2) == [([0.0, 0.0, 1.0, 1.0], [4.0])] * 2


def _gather_and_scatter():
    every, own = torch.empty(4), torch.empty(1)
    torch_private.all_gather_single(every, torch.full((2,), float(dist.get_rank())))
    torch_private.reduce_scatter_single(own, torch.full((2,), 2.0))
    return every.tolist(), own.tolist()


def test_a_schedule_tells_its_stages_and_a_stage_what_learns(pool):
    assert pool.run(_pipeline, size=1) == [(True, True, None, (True, False))]


class _Two(nn.Linear):
    def forward(self, x):
        return super().forward(x), x > 0


def _pipeline():
    stage = pipelining.PipelineStage(_Two(2, 2), 0, 1, torch.device("cpu"))
    single = pipelining.ScheduleGPipe(stage, 1, loss_fn=lambda y, _: y[0].sum())
    several = pipelining.ScheduleInterleaved1F1B([stage], 1, loss_fn=lambda y, _: y[0].sum())
    before = torch_private.learning(stage, outputs=True)
    single.step(torch.ones(1, 2), target=torch.ones(1))
    after = torch_private.learning(stage, outputs=True)
    same = [torch_private.pipeline_stages(schedule) == [stage] for schedule in (single, several)]
    return *same, before, after if torch_private.RELEASE >= (2, 13) else (True, False)


def test_a_model_tells_whether_it_has_a_hook(pool):
    assert pool.run(_hook_or_none, size=1) == [("", "allreduce_hook", "")]


def _hook_or_none():
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    before = torch_private.hook_of(ddp)
    ddp.register_comm_hook(None, allreduce_hook)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return (
        before,
        torch_private.hook_of(ddp),
        torch_private.hook_of(torch.load(file, weights_only=False)),
    )


def test_a_backend_numbers_its_calls_without_a_warning(capfd):
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    torch_private.begin_sequence(backend)
    assert backend._get_sequence_number_for_group() >= 0
    assert "deprecated" not in capfd.readouterr().err


def test_gloo_listens_where_it_is_told_to():
    backend = torch_private.gloo_at("127.0.0.1", dist.HashStore(), 0, 1, timedelta(seconds=7))
    assert backend.options._timeout == timedelta(seconds=7)
    tensor = torch.ones(1)
    backend.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert tensor == 1
    with pytest.raises(RuntimeError):
        torch_private.gloo_at("no-such-host.invalid", dist.HashStore(), 0, 1, timedelta(seconds=7))


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


@pytest.mark.skipif(FSDP2, reason="this torch takes custom communication")
def test_fsdp2_of_old_is_refused():
    with pytest.raises(MissingPackage, match=r"since torch 2\.9"):
        torch_private.check_fsdp()
    with pytest.raises(MissingPackage, match=r"since torch 2\.9"):
        commpress.compress_fsdp(torch.nn.Linear(2, 2))


@pytest.mark.skipif(not FSDP2, reason="FSDP2 takes custom communication since torch 2.9")
def test_fsdp2_hands_buffers_over_as_ours_take_them():
    gather, scatter = torch_private.fsdp_communication()
    for kind, needed in (
        (gather, ["output_tensor", "input_tensor", "group"]),
        (scatter, ["output_tensor", "op"]),
    ):
        taken = inspect.signature(kind.__call__).parameters
        assert set(needed) | {"async_op"} <= set(taken)
        assert {"size", "dtype", "device"} <= set(inspect.signature(kind.allocate).parameters)


def test_the_groups_of_a_unit(pool):
    assert pool.run(_units, size=2) == [([["0.weight", "0.bias"]], [[(4, 4), (4,)]], [True])] * 2


def _units():
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = torch_private.fsdp_groups(model)
    found = [[names[id(p.sharded_param)] for p in group.fsdp_params] for group in groups]
    # of whole parameters
    shapes = [[tuple(shape) for shape in torch_private.fsdp_shapes(group)] for group in groups]
    return found, shapes, [torch_private.fsdp_mesh(group) == mesh for group in groups]


# ---------------------------------------------------------------- the backend's entry point


def test_the_entry_point_registers_both_backends():
    """An answer as torch 2.14 gives it to a name that it does not know."""
    points = sources.project()["project"]["entry-points"]["torch.distributed.backends"]
    assert set(points) == {"commpress", "commpress_mpi"}
    for name, value in points.items():
        EntryPoint(name, value, "torch.distributed.backends").load()()
        assert dist.is_backend_available(name)
        assert name.upper() in dist.Backend._plugins


def test_asking_mpi_for_reconfiguration_is_refused():
    class Asked:
        enable_reconfigure = True

    make = dist.Backend._plugins["COMMPRESS_MPI"].creator_fn
    with pytest.raises(InvalidArgument, match="enable_reconfigure is True"):
        make(Asked(), None)


def test_expert_exchanges_are_token_switches():
    """With every parameter that torch's calls have, in their order; ours may have defaults where
    torch's have none."""
    switch = torch_private.TokenSwitch
    assert issubclass(commpress.ExpertExchange, switch)
    assert (switch.__module__ == "torch.distributed._token_switch") == (
        torch_private.RELEASE >= (2, 15)
    )
    fields = [field.name for field in dataclasses.fields(torch_private.Routing)]
    assert fields == ["handle", "topk_idx", "layout"]
    for name in (
        ("create_routing", "dispatch", "combine") if switch.__module__.startswith("torch") else ()
    ):
        theirs, ours = (
            inspect.signature(getattr(of, name)).parameters
            for of in (switch, commpress.ExpertExchange)
        )
        assert [(p.name, p.kind) for p in theirs.values()] == [
            (p.name, p.kind) for p in ours.values()
        ]
    assert not getattr(commpress.ExpertExchange, "__abstractmethods__", ())


@pytest.mark.skipif(not FSDP2, reason="DTensor of this torch remembers other things")
def _moved_shard():
    parameter = nn.Parameter(
        DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    )
    flat = torch.zeros(4)
    with torch.no_grad():
        before = parameter.to_local()
        torch_private.set_shard(parameter, flat[1:3])
        flat += 5
        # not those of the memory's other users
        versions = parameter._version, parameter.to_local()._version
        parameter += 1
    (parameter * 3).sum().full_tensor().backward()
    return before.tolist(), flat.tolist(), parameter.grad.to_local().tolist(), versions


def test_a_shard_lies_where_it_was_put(pool):
    assert pool.run(_moved_shard, size=1) == [
        ([1.0, 1.0], [5.0, 6.0, 6.0, 5.0], [3.0, 3.0], (0, 0))
    ]


def test_shards_after_ranks_have_changed_are_those_of_the_new_coordinate():
    def viewed(rank):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            whole = DTensor.from_local(
                torch.zeros(2 - rank), mesh, [Shard(0)], shape=torch.Size([3]), stride=(1,)
            )
            return len(whole.view(3).to_local())
        finally:
            dist.destroy_process_group()

    assert viewed(0) == 2
    # torch's fault; where it is mended, so may be ours
    with pytest.raises(RuntimeError, match="invalid for input"):
        viewed(1)
    torch_private.forget_meshes()
    assert viewed(1) == 1
