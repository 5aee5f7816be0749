"""The hook under DistributedDataParallel equals its twin in one process bit for bit, whatever DDP is asked to do."""

from dataclasses import replace

import pytest
import torch

from commpress.codecs import SignCodec
from commpress.codecs.family import NAMES
from ddp_twin import Plan, assert_equal, none_at_times, one_each, train, twin

LAZY = SignCodec(block=0)
SMALL_BUCKETS = {"bucket_cap_mb": 0.004}  # one parameter or two in each


def check(pool, plan, size=2, **twin_plan):
    results = pool.run(train, plan, size=size)
    assert_equal(results, twin(replace(plan, **twin_plan), size))
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("codec", ["sign", LAZY], ids=["sign", "lazy"])
def test_training_equals_its_twin(pool, codec, size):
    check(pool, Plan(codec), size)


@pytest.mark.parametrize("codec", [name for name in NAMES if name != "sign"])
def test_every_codec(pool, codec):
    check(pool, Plan(codec))


OPTIONS = {
    "small buckets": SMALL_BUCKETS,
    "one bucket": {"bucket_cap_mb": 100},
    "bucket view": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "static graph, small buckets, bucket view": {"static_graph": True, "gradient_as_bucket_view": True} | SMALL_BUCKETS,
    "find unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("codec", ["ternary", LAZY], ids=["ternary", "lazy"])
def test_no_option_of_ddp_changes_a_bit(pool, options, codec):
    """Nor the size of its buckets: the twin has none. Ternary draws its noise per parameter, lazy has a scale per row."""
    check(pool, Plan(codec, ddp=OPTIONS[options]))


@pytest.mark.parametrize(
    "options", [{}, SMALL_BUCKETS, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
def test_gradient_accumulation(pool, options):
    check(pool, Plan(accumulate=3, ddp=options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True} | SMALL_BUCKETS], ids=str)
def test_gradients_of_sixteen_bits(pool, dtype, options):
    check(pool, Plan(dtype=dtype, ddp=options))


@pytest.mark.parametrize("wrapped", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS], ids=str)
def test_torchs_own_wrappers(pool, wrapped, options):
    check(pool, Plan(wrapped=wrapped, ddp=options))


@pytest.mark.parametrize("branches", [one_each, none_at_times])
@pytest.mark.parametrize("size", [2, 3])
def test_unused_parameters(pool, branches, size):
    check(pool, Plan(branches=branches, ddp={"find_unused_parameters": True} | SMALL_BUCKETS, steps=9), size)
