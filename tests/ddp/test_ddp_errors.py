"""Words of the hook: every mistake has one clear message with its cure, and what all ranks know one
says."""

import copy
import importlib
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs.planned import Planned
from commpress.errors import InvalidArgument
from ddp_twin import Log, Net, Plan, loss_of, made, train
from ranks import caught

# ---------------------------------------------------------------- before there are ranks


def test_without_a_process_group():
    with pytest.raises(
        InvalidArgument,
        match=r"torch\.distributed is not initialised: call init_process_group before",
    ):
        commpress.CompressedState()


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None, "model"], ids=str)
def test_a_model_that_is_not_wrapped(model):
    name = type(model).__name__
    with pytest.raises(
        InvalidArgument,
        match=f"ddp is a {name}, expected a DistributedDataParallel: wrap the model first",
    ):
        commpress.compress(model)


def replicated(kind):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    module = importlib.import_module(f"torch.distributed._composable.{kind}")
    module.replicate(model)
    optimizer = commpress.OneBitAdam(torch.nn.Linear(4, 4).parameters())
    calls = (commpress.compress, commpress.keep_local, lambda m: commpress.overlap(m, optimizer))
    return [str(caught(call, model)) for call in calls]


@pytest.mark.parametrize("kind", ["replicate", "replicate_with_fsdp"])
def test_what_replicate_has_made_is_refused_with_what_to_use(pool, kind):
    """``replicate`` makes a DistributedDataParallel of its own in the first forward: one around it
    would average twice."""
    pytest.importorskip(f"torch.distributed._composable.{kind}")
    for said in pool.run(replicated, kind):
        for text in said:
            assert re.search(
                (
                    r"ddp is a \w+Sequential, .*replicate\(\) hides "
                    r".*DistributedDataParallel\(model\)"
                ),
                text,
            )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "signn"}, r"codec is 'signn', expected one of .* did you mean 'sign'\?"),
        (
            {"on_nonfinite": "ignore"},
            "on_nonfinite is 'ignore', expected 'skip', 'propagate' or 'raise'",
        ),
        (
            {"exclude": "bias"},
            r"exclude is 'bias', expected a tuple of regular expressions: \('bias',\)",
        ),
        ({"min_numel": -1}, "min_numel is -1, expected a whole number of at least 0"),
        ({"exact_steps": 2.5}, r"exact_steps is 2\.5, expected a whole number of at least 0"),
        (
            {"exclude": ("bias",)},
            "exclude matches parameter names, but named_parameters is missing: pass model.named_",
        ),
    ],
)
def test_wrong_options(pool, options, says):
    for (error,) in [*pool.run(wrong_options, options, size=1), *pool.run(wrong_options, options)]:
        assert type(error) is InvalidArgument
        assert re.search(says, str(error))


def wrong_options(options):
    return [caught(commpress.CompressedState, **options)]


def hooked_twice(first, second):
    model = torch.nn.Linear(4, 4)
    ddp, optimizer = (
        DistributedDataParallel(model),
        commpress.OneBitAdam(model.parameters(), exact_steps=1),
    )
    divided = commpress.ShardedOneBitAdam(model.parameters(), exact_steps=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    ways = {
        "compress": lambda: commpress.compress(ddp, "int4"),
        "uncompressed": lambda: commpress.compress(ddp, plan=Planned("none")),
        "on a mesh": lambda: commpress.compress(ddp, mesh=mesh, dims={"dp": "int8"}),
        "overlap": lambda: commpress.overlap(ddp, optimizer),
        "overlap of a divided one": lambda: commpress.overlap(ddp, divided),
        "keep_local": lambda: commpress.keep_local(ddp),
        "torch's": lambda: ddp.register_comm_hook(None, allreduce_hook),
    }
    ways[first]()
    error = caught(ways[second])
    ddp(torch.ones(2, 4)).sum().backward()
    return [error]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("first", "second", "hook"),
    [
        ("compress", "compress", "compressed_allreduce_hook"),
        ("compress", "uncompressed", "compressed_allreduce_hook"),
        ("compress", "on a mesh", "compressed_allreduce_hook"),
        ("compress", "overlap", "compressed_allreduce_hook"),
        ("compress", "overlap of a divided one", "compressed_allreduce_hook"),
        ("overlap", "compress", "momentum_hook"),
        ("keep_local", "compress", "own_gradients"),
        ("torch's", "keep_local", "allreduce_hook"),
    ],
)
def test_a_second_hook_is_refused_with_the_first_by_name(pool, first, second, hook, size):
    for (error,) in pool.run(hooked_twice, first, second, size=size):
        assert type(error) is InvalidArgument
        assert re.search(
            f"has the communication hook '{hook}' already.*wrap the model again", str(error)
        )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: commpress.OneBitAdam([], exact_step=3),
            r"OneBitAdam got exact_step=3.*did you mean exact_steps=\?",
        ),
        (
            lambda: commpress.ZeroOneAdam([], max_gradnorm=1.0),
            r"got max_gradnorm=1\.0.*did you mean max_grad_norm=\?",
        ),
        (
            lambda: commpress.ShardedOneBitAdam([], exact_stepz=1),
            r"^ShardedOneBitAdam got exact_stepz=1.*mean exact_steps=\?",
        ),
        (
            lambda: commpress.ZeroOneAdam([], xyz=1),
            r"^ZeroOneAdam got xyz=1, which it does not take: it takes agree_over, ",
        ),
        (
            lambda: commpress.hf.Compress(exact_step=3),
            r"^Compress got exact_step=3.*did you mean exact_steps=\?",
        ),
        (
            lambda: commpress.hf.LocalTraining(outers=3),
            r"^LocalTraining got outers=3.*did you mean outer=\?",
        ),
        (
            lambda: commpress.hf.DistributedCompression(topologie=None),
            r"got topologie=None.*mean topology=\?",
        ),
        (
            lambda: commpress.lightning.Compress(min_numels=3),
            r"^Compress got min_numels=3.*did you mean min_numel=\?",
        ),
        (
            lambda: commpress.lightning.LocalTraining(code="int8"),
            r"^LocalTraining got code='int8'.*did you mean codec=\?",
        ),
        (
            lambda: commpress.moe.Experts([], chunk=3),
            r"^Experts got chunk=3.*did you mean chunks=\?",
        ),
    ],
)
def test_a_misspelt_option_is_named_with_the_one_that_is_meant(make, says):
    with pytest.raises(InvalidArgument, match=says):
        make()


def misspelt():
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return [
        caught(commpress.compress, ddp, exact_step=3),
        caught(commpress.compress, ddp, mesh=mesh, dims={"dp": "int8"}, exact_step=3),
    ]


def test_a_misspelt_option_of_compress_is_named_with_the_one_that_is_meant(pool):
    for errors in pool.run(misspelt, size=2):
        assert [type(error) for error in errors] == [InvalidArgument] * 2
        assert all(
            re.search(r"^compress got exact_step=3.*did you mean exact_steps=\?", str(error))
            for error in errors
        )


# ---------------------------------------------------------------- in backward


def wrong_state(state):
    ddp = DistributedDataParallel(torch.nn.Linear(4, 4))
    ddp.register_comm_hook(state, commpress.compressed_allreduce_hook)
    return [caught(ddp(torch.ones(1, 4)).sum().backward)]


@pytest.mark.parametrize(("state", "name"), [(None, "NoneType"), ("sign", "str")])
def test_a_hook_without_its_state(pool, state, name):
    for (error,) in pool.run(wrong_state, state):
        assert type(error) is InvalidArgument
        assert (
            f"state is a {name}, expected a CompressedState: "
            "ddp.register_comm_hook(commpress.CompressedState("
        ) in str(error)


def copied():
    return [caught(copy.deepcopy, commpress.CompressedState())]


def test_a_state_that_is_copied_or_pickled_says_what_to_save(pool):
    for (error,) in pool.run(copied):
        assert type(error) is InvalidArgument
        assert "save state.state_dict()" in str(error)


# ---------------------------------------------------------------- said once, by one rank


def lines(plan):
    return train(plan).log


@pytest.mark.parametrize(
    "plan",
    [
        Plan("sign", steps=2, state={"min_numel": 10**9}),
        Plan("sign", steps=2, exclude=(".",)),
        Plan("sign", steps=4, state={"exact_steps": 2, "min_numel": 10**9}),
    ],
    ids=["min_numel", "exclude", "after exact steps"],
)
def test_nothing_compressed_is_said_once_by_one_rank(pool, plan):
    first, other = pool.run(lines, plan)
    assert [line for line in first if "nothing was compressed" in line] == [
        "WARNING nothing was compressed: every tensor has fewer than min_numel elements, matches "
        "exclude, or has a dtype that codecs do not take"
    ]
    assert other == []


def test_no_compression_is_no_warning_where_it_was_asked_for(pool):
    for log in pool.run(lines, Plan("none", steps=2)):
        assert not [line for line in log if line.startswith("WARNING")]


@pytest.mark.parametrize(
    "plan",
    [Plan("int8", steps=2), Plan("int8", steps=3, state={"exact_steps": 2})],
    ids=["at once", "later"],
)
def test_what_was_compressed_is_said_once(pool, plan):
    (line,), other = pool.run(lines, plan)
    assert line.startswith("INFO up to the first compressed step: 0.0")
    assert "times fewer" in line
    assert other == []


def test_the_caveat_of_one_bit_is_said_once(pool):
    said = [
        [line for line in log if "a codec of one bit" in line]
        for log in pool.run(lines, Plan("sign", steps=3))
    ]
    assert [len(each) for each in said] == [1, 0]
    assert "compare the loss with an uncompressed run" in said[0][0]


def test_a_pattern_that_excludes_nothing_is_said(pool):
    first, other = pool.run(lines, Plan("int8", steps=1, exclude=("embedd", "head")))
    warnings = [line for line in first if line.startswith("WARNING")]
    assert warnings == [
        "WARNING exclude='embedd' matches no parameter: nothing is left out because of it"
    ]
    assert other == []


def alone(plan):
    log = Log()
    model, _ = made(plan)
    ddp = DistributedDataParallel(model)
    state = commpress.compress(ddp, plan.codec)
    loss_of(ddp, plan, 0, 0, 0).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return log.lines, gradients, state.counters.steps, dist.get_world_size()


def test_a_single_rank_passes_through_and_says_so(pool):
    plan = Plan()
    ((log, gradients, steps, size),) = pool.run(alone, plan, size=1)
    assert size == 1
    assert log == [
        "WARNING world size is 1: there is nothing to reduce, gradients pass through as they are"
    ]
    assert steps == 0
    model, _ = made(plan)
    loss_of(model, plan, 0, 0, 0).backward()
    assert gradients.keys() == dict(Net().named_parameters()).keys()
    assert all(torch.equal(gradients[name], p.grad) for name, p in model.named_parameters())
