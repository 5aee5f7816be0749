"""Wrong first uses of the front doors: the error names the argument, its value and the cure."""

import pytest
import torch

import commpress
from commpress.cli import main
from commpress.errors import InvalidArgument


def model():
    return torch.nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: commpress.OneBitAdam(model()), "params is a Linear, .* model.parameters()"),
        (lambda: commpress.Partitioned(model(), torch.optim.AdamW), "params is a Linear"),
        (lambda: commpress.init_process_group("commpres"), "'commpres'.* did you mean 'commpress'"),
        (lambda: commpress.init_process_group("cpu:glo"), "'cpu:glo'.* did you mean 'gloo'"),
        (lambda: commpress.init_process_group("x"), "expected one of undefined, gloo"),
    ],
)
def test_python_says_what_is_wrong(call, said):
    with pytest.raises(InvalidArgument, match=said):
        call()


def test_the_name_that_is_meant_is_told():
    with pytest.raises(AttributeError, match="'LocalUpdate': did you mean 'LocalUpdates'"):
        commpress.LocalUpdate  # noqa: B018
    with pytest.raises(AttributeError, match=r"it offers compress, .*lightning, moe, weights"):
        commpress.xyz  # noqa: B018


@pytest.mark.parametrize("options", [{"codec": "int7"}, {"codec": "int8", "weights": "int7"}])
@pytest.mark.parametrize("front", ["hf", "lightning"])
def test_a_callback_names_a_wrong_codec_when_it_is_made(front, options):
    pytest.importorskip({"hf": "transformers", "lightning": "lightning"}[front])
    with pytest.raises(InvalidArgument, match=r"codec is 'int7'.* did you mean 'int[84]'"):
        getattr(commpress, front).Compress(**options)


def test_a_script_without_python_is_refused_before_anything_starts(capsys):
    assert main(["hosts", "2", "nothere.py"]) == 2
    assert "no command 'nothere.py' on this machine's PATH: python nothere.py" in (
        capsys.readouterr().err
    )
