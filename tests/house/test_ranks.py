"""The rank processes of the tests: who hangs is named, errors come back as they were."""

import os
import time

import pytest
import torch.distributed as dist

from commpress.codecs.family import NAMES
from commpress.errors import Mismatch
from ranks import Ranks, SilentRank


def hang():
    if dist.get_rank() == 1:
        time.sleep(600)


def fail():
    raise Mismatch("on purpose", ranks=(7,))


def unpicklable():
    return lambda: None


def die():
    if dist.get_rank() == 1:
        os._exit(3)


def test_the_pool_names_who_hangs_and_where():
    ranks = Ranks(2)
    ranks.run(str, "the processes run")
    with pytest.raises(SilentRank, match=r"rank 1: silent for 3 s(.|\n)*in hang"):
        ranks.run(hang, seconds=3)
    with pytest.raises(SilentRank, match="rank 1: ended with exit code 3"):
        ranks.run(die)
    ranks.close()


def test_the_pool_brings_errors_back_as_they_were(pool):
    for error in pool.outcomes(fail):
        assert type(error) is Mismatch
        assert error.ranks == (7,)
        assert "in fail" in error.__notes__[0]
    with pytest.raises(Mismatch, match="on purpose"):
        pool.run(fail)
    with pytest.raises(Exception, match="pickle"):
        pool.run(unpicklable)
    assert set(NAMES) == set(pool.run(sorted, NAMES)[0])
