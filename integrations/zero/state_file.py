"""States as safetensors files: residuals, moments and counts. Any reader of such files sees them,
and nothing is unpickled.

Tensors have the names of their places, "residuals/layer.weight@0/sent"; all else is JSON in the
file's metadata.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.zero.weights_file import Reader, Writer

OUTLINE = "commpress"  # key of the metadata
Plain = str | int | float | bool | None


def save_safetensors(state: Mapping[Any, Any], path: str | os.PathLike[str]) -> None:
    """Write a ``state_dict`` of commpress, or any of dictionaries, lists, tensors, numbers and
    strings, as a safetensors file.

    Every rank writes its own. The file has its name when it is whole.
    """
    tensors: dict[str, torch.Tensor] = {}
    outline = json.dumps(_outline(state, "", tensors), separators=(",", ":"))
    with Writer(path, tensors, {OUTLINE: outline}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def load_safetensors(path: str | os.PathLike[str]) -> dict[Any, Any]:
    """Read a state that ``save_safetensors`` wrote: for ``load_state_dict``. Tensors are on the
    processor."""
    with open(path, "rb") as file:
        reader = Reader(file)
        outline = reader.metadata.get(OUTLINE)
        if not isinstance(outline, str):
            raise StateMismatch(
                f"{path} was not written by commpress.save_safetensors: read it with the package "
                "safetensors"
            )
        names = reader.names()
        if (claimed := sum(reader.nbytes(name) for name in names)) > (
            nbytes := os.fstat(file.fileno()).st_size
        ):
            raise StateMismatch(
                f"{path} claims {claimed} bytes of tensors and has {nbytes}: its tensors overlap"
            )
        tensors = {name: reader.read(name) for name in names}
    try:
        state = _state(json.loads(outline), tensors)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise StateMismatch(
            f"{path} does not say how its tensors make a state: {error!r}"
        ) from error
    if not isinstance(state, dict):
        raise StateMismatch(f"{path} holds a {type(state).__name__}, expected a dictionary")
    return state


def _outline(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON; its tensors go to ``tensors``."""
    if isinstance(value, torch.Tensor):
        if (
            type(value) not in (torch.Tensor, torch.nn.Parameter)
            or value.is_sparse
            or value.is_meta
        ):
            raise InvalidArgument(
                f"{place} is a {type(value).__name__} on {value.device}, expected a dense one in "
                "memory"
            )
        name = place or "tensor"
        while name in tensors:
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        if odd := [key for key in value if type(key) not in (str, int)]:
            raise InvalidArgument(
                f"{place or 'the state'} has the key {odd[0]!r}, expected strings and integers"
            )
        under = f"{place}/" if place else ""
        return {
            "dict": [[key, _outline(each, f"{under}{key}", tensors)] for key, each in value.items()]
        }
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_outline(each, f"{place}/{i}", tensors) for i, each in enumerate(value)]}
    if isinstance(value, Plain):
        return value
    raise InvalidArgument(
        f"{place} is a {type(value).__name__}, expected tensors, numbers, strings, lists and "
        "dictionaries"
    )


def _state(outline: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match outline:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"dict": list(pairs)}:
            return {key: _state(each, tensors) for key, each in pairs}
        case {"list": list(parts)}:
            return [_state(each, tensors) for each in parts]
        case {"tuple": list(parts)}:
            return tuple(_state(each, tensors) for each in parts)
        case str() | int() | float() | None:
            return outline
    raise ValueError(f"{outline!r} is neither a tensor, a collection nor a value")
