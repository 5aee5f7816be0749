"""Optimizers that compress what they send: momentum, accumulated steps or differences instead of
gradients."""

from commpress.optim.muon import Muon
from commpress.optim.onebit_adam import OneBitAdam, ShardedOneBitAdam
from commpress.optim.onebit_lamb import OneBitLamb
from commpress.optim.zero_one_adam import ShardedZeroOneAdam, ZeroOneAdam

__all__ = [
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "ShardedOneBitAdam",
    "ShardedZeroOneAdam",
    "ZeroOneAdam",
]
