"""Optimizers that compress what they send: momentum, accumulated steps or differences instead of
gradients."""

from commpress.optim.onebit_adam import OneBitAdam
from commpress.optim.onebit_lamb import OneBitLamb
from commpress.optim.sharded_adam import ShardedOneBitAdam
from commpress.optim.sharded_zero_one import ShardedZeroOneAdam
from commpress.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "OneBitAdam",
    "OneBitLamb",
    "ShardedOneBitAdam",
    "ShardedZeroOneAdam",
    "ZeroOneAdam",
]
