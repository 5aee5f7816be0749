"""Parameters that an optimizer refuses, each with one error that says what to do instead."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from commpress.errors import InvalidArgument

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def named_parameters(groups: Iterable[dict[str, Any]]) -> tuple[list[torch.Tensor], list[str]]:
    """All of them, group by group, and what they are called: their numbers if nobody gave names."""
    parameters: list[torch.Tensor] = []
    names: list[str] = []
    for group in groups:
        first = len(parameters)
        parameters += group["params"]
        names += group.get("param_names") or [f"#{i:05d}" for i in range(first, len(parameters))]
    return parameters, names


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raise ``InvalidArgument`` for what has no plain numbers in memory; DTensors are welcome."""
    if is_lazy(parameter):
        raise InvalidArgument(
            f"parameter {name!r} has no shape yet: run the model once on a sample before you "
            "construct the optimizer"
        )
    if hasattr(parameter, "to_local"):
        return
    wrapped: bool = is_traceable_wrapper_subclass(parameter)
    if wrapped:
        raise InvalidArgument(
            f"parameter {name!r} is a {type(parameter).__name__}, expected a plain tensor: train "
            "it with another optimizer, or convert it before"
        )
    if parameter.layout != torch.strided:
        raise InvalidArgument(
            f"parameter {name!r} is sparse ({parameter.layout}), expected a dense one: convert it "
            "with .to_dense(). Sparse gradients of dense parameters are welcome"
        )
    if parameter.is_meta:
        raise InvalidArgument(
            f"parameter {name!r} is on the meta device, without values: construct the optimizer "
            "after the model is on its device, as with model.to_empty(device=...) and its weights "
            "loaded"
        )
    if parameter.dtype not in DTYPES:
        cure = (
            "train real and imaginary part as one float32 parameter (torch.view_as_real)"
            if parameter.is_complex()
            else ("convert it with .float(), or give it to another optimizer")
        )
        raise InvalidArgument(
            f"parameter {name!r} is {parameter.dtype}, expected float32, bfloat16 or float16: "
            f"{cure}"
        )
