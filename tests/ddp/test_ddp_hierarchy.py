"""DistributedDataParallel in two levels: equal to its simulated twin bit for bit, and resumed as if
nothing had happened."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import ByName, SignCodec
from commpress.codecs.family import NAMES
from commpress.codecs.planned import Planned
from commpress.codecs.policy import Same
from commpress.errors import InvalidArgument, Mismatch, StateMismatch
from ddp_twin import Plan, Session, assert_equal, steps_of, train, twin
from test_resume import go_on, resume
from variants import few

SMALL_BUCKETS = {"bucket_cap_mb": 0.004}
MIXED = ByName(
    {"left": SignCodec(block=0), "right": NAMES["ternary"], "norm": NAMES["int8"]},
    Same(NAMES["sign"]),
)


def leveled(topology, codec="sign", **changed):
    state = {"topology": topology} | changed.pop("state", {})
    return Plan(codec, ddp=SMALL_BUCKETS, state=state, **changed)


@pytest.mark.parametrize(
    ("topology", "codec"), few(["2x2", "3,1", "0 3|1 2"], ["sign", MIXED]), ids=str
)
def test_training_equals_its_twin(pool, topology, codec):
    plan = leveled(topology, codec)
    results = pool.run(train, plan, size=4)
    assert_equal(results, twin(plan, 4))
    for result in results:
        counters = result.counters
        assert 0 < counters["between_bytes"] <= counters["wire_bytes"]
        assert counters["compressed_elements"] > 0
        assert counters["steps"] == plan.steps
    assert results[0].counters["between_bytes"] < results[0].counters["wire_bytes"], (
        "rank 0 shares its node"
    )


def test_a_step_that_is_not_finite_changes_no_residual(pool):
    plan = leveled("2x2", bad=(2,))
    results = pool.run(train, plan, size=4)
    assert_equal(results, twin(plan, 4), losses=False)
    assert all(result.counters["skipped_steps"] == 1 for result in results)


def test_the_state_of_another_topology_is_refused(pool, tmp_path):
    resume(pool, tmp_path, leveled("2x2"), at=3, size=4)
    for other in ({"topology": "3,1"}, {}):
        plan = Plan("sign", first=3, steps=3, state=other)
        with pytest.raises(StateMismatch, match=r"saved with nodes '0 1\|2 3'.*elastic_state_dict"):
            pool.run(go_on, plan, str(tmp_path), size=4)


# ---------------------------------------------------------------- elastic


def owed(plan):
    """R of every piece after training, as elastic shards of all ranks."""
    session = Session(plan)
    for step in steps_of(plan):
        session.step(step)
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, session.state.elastic_state_dict())
    return parts


def passed_on(plan, parts):
    """R after loading, again as shards; then one more step works."""
    session = Session(plan)
    session.state.load_state_dict(*parts)
    result = [None] * dist.get_world_size()
    dist.all_gather_object(result, session.state.elastic_state_dict())
    session.step(plan.first)
    return result


def total(parts):
    whole = {}
    for part in parts:
        for key, shard in part["shards"].items():
            vector = whole.setdefault(key, np.zeros(shard["numel"], np.float32))
            vector[shard["start"] : shard["start"] + len(shard["values"])] = shard["values"].numpy()
    return whole


def saved_by_a_trainer(plan):
    """R after training, as elastic shards and as the parts of a Trainer's checkpoint."""
    session = Session(plan)
    for step in steps_of(plan):
        session.step(step)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyone, (session.state.elastic_state_dict(), session.state.rank_state())
    )
    return [list(parts) for parts in zip(*everyone, strict=True)]


@pytest.mark.parametrize(("after", "size"), [(None, 3), ("3,1", 4)])
def test_a_trainers_checkpoint_of_nodes_fits_other_ranks(pool, after, size):
    elastic, parts = pool.run(
        saved_by_a_trainer, Plan("sign", steps=3, state={"topology": "2x2"}), size=4
    )[0]
    plan = Plan("sign", first=3, steps=1, state={"topology": after})
    first, second = total(elastic), total(pool.run(passed_on, plan, parts, size=size)[0])
    assert first
    for key in first:
        np.testing.assert_allclose(second[key], first[key], rtol=1e-6, atol=1e-9)


# ---------------------------------------------------------------- topologies


def started_by_torchrun():
    """Nodes of ``compress`` where the launcher put two ranks on each of two nodes; by codec and
    options."""
    rank = dist.get_rank()
    told = {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    calls = {
        "nothing": {},
        "auto": {"codec": "auto"},
        "topk": {"codec": "topk-8"},
        "flat": {"topology": None},
        "exact": {"codec": "none"},
        "low rank": {"codec": "auto+powersgd-1"},
        "plan": {"plan": Planned("int8")},
    }
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, value)
        for call, options in calls.items():
            state = commpress.compress(DistributedDataParallel(torch.nn.Linear(64, 64)), **options)
            found[call] = str(state.channel.levels)
            if call == "nothing":
                assert state.policy.choose("", 1 << 20) == NAMES["fp8"]
    return found


def test_compress_alone_takes_fp8_and_the_nodes_of_the_launcher(pool):
    nodes, flat = "0 1|2 3", "None"
    for found in pool.run(started_by_torchrun, size=4):
        assert found == {
            "nothing": nodes,
            "auto": nodes,
            "topk": nodes,
            "flat": flat,
            "exact": flat,
            "low rank": flat,
            "plan": flat,
        }


def build(topology):
    session = Session(Plan("sign", state={"topology": topology}))
    session.step(0)
    return str(session.state.channel.levels), session.log.lines


def test_one_level_is_reduced_flat_and_says_so(pool):
    for topology in ("4", "1,1,1,1", "auto"):  # the ranks of the tests share a host
        for nodes, lines in pool.run(build, topology, size=4):
            assert nodes == "None"
            assert any("one level only" in line for line in lines) == (topology != "auto")


def build_apart():
    return build("2x2" if dist.get_rank() < 3 else "1,3")


def test_what_does_not_fit_is_an_error_on_every_rank(pool):
    outcomes = pool.outcomes(build, "2x3", size=4)
    assert all(
        isinstance(o, InvalidArgument) and "has 6 ranks, the group has 4" in str(o)
        for o in outcomes
    )
    outcomes = pool.outcomes(build_apart, size=4)
    assert all(isinstance(o, Mismatch) and o.ranks == (3,) for o in outcomes)
