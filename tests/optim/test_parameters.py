"""Parameters that our optimizers cannot take are refused when they are constructed, by name and
with the cure."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import commpress
from commpress.errors import InvalidArgument, StateMismatch
from commpress.optim import ShardedOneBitAdam, ShardedZeroOneAdam
from small_store import open_store

MAKERS = {
    "OneBitAdam": commpress.OneBitAdam,
    "ZeroOneAdam": commpress.ZeroOneAdam,
    "OneBitLamb": commpress.OneBitLamb,
    "ShardedOneBitAdam": lambda p: ShardedOneBitAdam(p, exact_steps=1),
    "ShardedZeroOneAdam": ShardedZeroOneAdam,
    "Partitioned": lambda p: commpress.Partitioned(p, torch.optim.AdamW),
}
REFUSED = {
    "complex": (lambda: torch.ones(4, dtype=torch.complex64), "complex64, expected.*view_as_real"),
    "double": (
        lambda: torch.ones(4, dtype=torch.float64),
        "float64, expected.*convert it with .float()",
    ),
    "sparse": (lambda: torch.eye(4).to_sparse(), "sparse.*to_dense"),
    "meta": (lambda: torch.ones(4, device="meta"), "meta device.*to_empty"),
    "subclass": (
        lambda: TwoTensor(torch.ones(4), torch.ones(4)),
        "TwoTensor, expected a plain tensor",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("maker", MAKERS)
def test_what_cannot_be_trained_is_refused_when_constructed(maker, kind):
    make, match = REFUSED[kind]
    fine, bad = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(make())
    with pytest.raises(InvalidArgument, match=f"'bad' is .*{match}"):
        MAKERS[maker]([("fine", fine), ("bad", bad)])


@pytest.mark.filterwarnings("ignore:.*duplicate parameters:UserWarning")
@pytest.mark.parametrize("maker", MAKERS)
def test_what_has_no_shape_yet_and_what_comes_twice_is_refused(maker):
    with pytest.raises(InvalidArgument, match="run the model once"):
        MAKERS[maker](torch.nn.LazyLinear(3).parameters())
    tied = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(InvalidArgument, match="twice"):
        MAKERS[maker]([{"params": [torch.nn.Parameter(torch.ones(2)), tied, tied]}])


@pytest.mark.parametrize("maker", MAKERS)
def test_an_empty_group_is_welcome(maker):
    """As the Trainer makes one for decayed parameters where LoRA trains none of them."""
    MAKERS[maker]([{"params": []}, {"params": [torch.nn.Parameter(torch.ones(300))]}])


def constructed_over(placements, values, folder):
    """The errors, and what an element-wise optimizer over a store makes of its own part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = torch.nn.Parameter(distribute_tensor(values.clone(), mesh, placements))
    said = []
    for make in MAKERS.values():
        try:
            make([cut])
            said.append("accepted")
        except InvalidArgument as error:
            said.append(str(error))
    with open_store(folder / str(dist.get_rank())) as store:
        offloaded = commpress.Offloaded([cut], torch.optim.SGD, store=store, lr=1.0, chunk_mb=0.1)
        cut.grad = torch.ones_like(cut)
        offloaded.step()
    return said, cut.full_tensor().detach()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_dtensors_are_refused_with_the_cure_and_offloaded_takes_them(
    pool, tmp_path, size, placement
):
    """Equal shards, whose replicas look equal too: with them a step wrote where the tensor is
    not."""
    values = torch.zeros(12, 32)
    for said, weights in pool.run(constructed_over, [placement], values, tmp_path, size=size):
        for text in said:
            assert "is a DTensor" in text
            assert "compress_fsdp" in text
        assert torch.equal(weights, values - 1)


NAN = float("nan")
SWITCHES = [{"max_grad_norm": NAN}, {"variance_floor": NAN}, {"codec": None}]
SWITCHES += [{"exact_steps": NAN}, {"exact_steps": 150.0}]


@pytest.mark.parametrize("options", SWITCHES, ids=str)
@pytest.mark.parametrize("maker", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_what_would_switch_a_feature_off_is_refused_when_constructed(maker, options):
    (name, value) = next(iter(options.items()))
    with pytest.raises(InvalidArgument, match=f"{name} is {value}, expected"):
        getattr(commpress, maker)([torch.nn.Parameter(torch.ones(300))], **options)


@pytest.mark.parametrize("norm", [NAN, -1.0, 0.0])
def test_partitioned_takes_no_norm_that_would_turn_gradients_around(norm):
    parameters = [torch.nn.Parameter(torch.ones(300))]
    with pytest.raises(InvalidArgument, match=f"max_grad_norm is {norm}"):
        commpress.Partitioned(parameters, torch.optim.AdamW, max_grad_norm=norm)


@pytest.mark.parametrize("maker", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
@pytest.mark.parametrize("name", ["maximize", "amsgrad", "codec", "max_grad_norm"])
def test_groups_say_nothing_that_would_be_ignored(maker, name):
    make, p = getattr(commpress, maker), torch.nn.Parameter(torch.ones(300))
    with pytest.raises(InvalidArgument, match=f"{name} is True in a parameter group"):
        make([{"params": [p], name: True}])
    optimizer = make([p])
    with pytest.raises(InvalidArgument, match=f"{name} is True in a parameter group"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(9))], name: True})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", ["maximize", "amsgrad"])
def test_states_of_another_adam_are_refused(name):
    p = torch.nn.Parameter(torch.ones(300))
    p.grad = torch.ones(300)
    adam = torch.optim.AdamW([p], **{name: True})
    adam.step()
    with pytest.raises(StateMismatch, match=f"groups with {name}=True"):
        commpress.OneBitAdam([p]).load_state_dict(adam.state_dict())
