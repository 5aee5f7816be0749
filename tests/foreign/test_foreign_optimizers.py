"""Optimizers of other projects: Adafactor of transformers looks across elements however it is
set."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Adafactor

import commpress
from commpress.errors import InvalidArgument
from small_store import open_store


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 1e-3, "relative_step": False},
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "beta1": 0.9},
    ],
)
@pytest.mark.parametrize("shape", [(40, 30), (1200,)])
def test_adafactor_of_transformers_is_refused(tmp_path, options, shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    with (
        open_store(tmp_path, host="2MiB") as store,
        pytest.raises(InvalidArgument, match=r"Adafactor, which does not treat every element"),
    ):
        commpress.Offloaded([parameter], Adafactor, store=store, **options)
    with pytest.raises(InvalidArgument, match=r"Adafactor, which does not treat every element"):
        commpress.Partitioned([parameter], Adafactor, **options)
