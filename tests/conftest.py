"""Fixtures that several test files share."""

import pytest
import torch

from commpress.codecs.family import NAMES
from commpress.collectives.allreduce import compressed_allreduce
from commpress.collectives.loopback import Loopback
from commpress.work import run
from ranks import Ranks


@pytest.fixture(scope="session")
def compiled():
    """Kernels are compiled once, here, and lie on disk when several ranks want them at the same time."""
    for codec in NAMES:
        run(compressed_allreduce(torch.ones(64), codec=codec, transport=Loopback(1).transport(0)))


@pytest.fixture(scope="session")
def pool(compiled):
    """Four rank processes for the whole session."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture
def mortal(compiled):
    """Three rank processes for one test, which may kill them."""
    ranks = Ranks(3)
    yield ranks
    ranks.close()
