"""State that all ranks share, by name: what a newcomer needs in order to be like the others, and
what a snapshot holds.

A state is taken apart into its tensors and a document (msgpack) of all else: numbers, text, and
where each tensor belongs. Nothing in a document is ever evaluated.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import torch

from commpress.checksum import checksum_of
from commpress.collectives.transports.rows import memory_of
from commpress.errors import InvalidArgument, StateMismatch
from commpress.optim.layout import refuse_held

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
LONGEST = 1 << 28  # bytes of a document
_LARGE = 1 << 63  # whole numbers from here on, such as seeds, are written as text


class SharedState:
    """Objects that hold it: modules, optimizers, schedulers, scalers, samplers, or whatever has
    ``state_dict`` and ``load_state_dict``. Where compression leaves something behind on each rank,
    that is no part of it: ``shared_state`` and ``load_shared_state`` take precedence.

    - ``objects``: by name, the same names on every rank. Modules are loaded first, the others in
      the order given.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        for name, each in objects.items():
            if not _methods(each):
                raise InvalidArgument(
                    f"state[{name!r}] is a {type(each).__name__}, expected what has state_dict and "
                    "load_state_dict: newcomers would not be like the others in it"
                )
            if isinstance(each, torch.nn.Module):
                cure = (
                    "train them in a loop of your own, from checkpoints of each rank "
                    "(docs/experts.md)"
                )
                refuse_held(
                    "commpress.elastic", each.named_parameters(), "heals all ranks alike", cure=cure
                )
        self.objects = dict(
            sorted(objects.items(), key=lambda item: not isinstance(item[1], torch.nn.Module))
        )

    def taken_apart(self) -> tuple[bytes, list[torch.Tensor]]:
        """A document, and the tensors themselves: read them before anybody changes them, and never
        write."""
        tensors: list[torch.Tensor] = []
        with torch.no_grad():
            content = {name: _methods(each)[0]() for name, each in self.objects.items()}
        return packed(content, tensors), tensors

    def load(self, document: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Become like who took these apart."""
        content = unpacked(document, tensors)
        if content.keys() != self.objects.keys():
            raise StateMismatch(
                f"the state has {', '.join(map(repr, content))}, expected "
                f"{', '.join(map(repr, self.objects))}: give the same names on every rank"
            )
        for name, each in self.objects.items():
            self._take(each, content[name])

    def _take(self, each: Any, content: Any) -> None:
        _methods(each)[1](content)


def _methods(each: Any) -> tuple[Any, ...]:
    """Those that give and take the shared state of an object; none if it has no such thing."""
    for give, take in (("shared_state", "load_shared_state"), ("state_dict", "load_state_dict")):
        if callable(getattr(each, give, None)) and callable(getattr(each, take, None)):
            return getattr(each, give), getattr(each, take)
    return ()


# ---------------------------------------------------------------- documents


def packed(content: Any, tensors: list[torch.Tensor]) -> bytes:
    """A document of ``content``, whose tensors are appended to ``tensors``."""
    outline = _outlined(content, tensors, "state")
    heads = [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    return bytes(msgpack.packb({"outline": outline, "tensors": heads}, use_bin_type=True))


def unpacked(document: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """The content again."""
    return _filled(_read(document)["outline"], tensors)


def empty_tensors(document: bytes) -> list[torch.Tensor]:
    """Tensors on the host for what a document describes, their content whatever was there
    before."""
    found = []
    for kind, shape in _read(document)["tensors"]:
        if kind not in DTYPES:
            raise StateMismatch(
                f"a state holds a tensor of {kind!r}, expected one of {', '.join(DTYPES)}"
            )
        found.append(torch.empty(shape, dtype=DTYPES[kind]))
    return found


def _read(document: bytes) -> dict[str, Any]:
    return dict(msgpack.unpackb(document, strict_map_key=False))


def _outlined(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    match value:
        case torch.Tensor():
            if hasattr(value, "placements"):
                raise InvalidArgument(
                    f"{where} is a tensor of which only a part is here (DTensor), expected whole "
                    "ones: of a sharded model pass build= and snapshots="
                )
            if value.layout != torch.strided or value.dtype not in DTYPES.values():
                raise InvalidArgument(
                    f"{where} is a tensor of {value.layout} and {value.dtype}, expected dense "
                    "numbers"
                )
            tensors.append(value.detach())
            return {"tensor": len(tensors) - 1}
        case None | bool() | float() | str() | bytes():
            return value
        case int():
            return value if -_LARGE <= value < _LARGE else {"int": str(value)}
        case Mapping():
            kind = "counts" if isinstance(value, Counter) else "items"
            return {
                kind: [
                    [_key(k, where), _outlined(each, tensors, f"{where}[{k!r}]")]
                    for k, each in value.items()
                ]
            }
        case tuple():
            return {
                "tuple": [_outlined(each, tensors, f"{where}[{i}]") for i, each in enumerate(value)]
            }
        case list():
            return [_outlined(each, tensors, f"{where}[{i}]") for i, each in enumerate(value)]
        case set() | frozenset():
            return {"set": [_outlined(each, tensors, where) for each in sorted(value)]}
    raise InvalidArgument(
        f"{where} is a {type(value).__name__}, expected tensors, numbers, text, and dictionaries "
        "or lists of these: nothing that comes is evaluated, so nothing else travels"
    )


def _key(key: Any, where: str) -> Any:
    if isinstance(key, str | int | float) and not isinstance(key, bool):
        return key
    raise InvalidArgument(f"{where} has the key {key!r}, expected text or numbers")


def _filled(outline: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(outline, list):
        return [_filled(each, tensors) for each in outline]
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "int":
        return int(content)
    if kind == "tuple":
        return tuple(_filled(each, tensors) for each in content)
    if kind == "set":
        return {_filled(each, tensors) for each in content}
    items = {key: _filled(each, tensors) for key, each in content}
    return Counter(items) if kind == "counts" else OrderedDict(items)


# ---------------------------------------------------------------- bytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[n] of its elements, on the host: a view where they lie there side by side."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def hash_of(tensor: torch.Tensor) -> int:
    """xxh3 of its bytes."""
    part = bytes_of(tensor)
    return checksum_of(memory_of(part)) if part.numel() else 0


def hash_of_all(document: bytes, hashes: Sequence[int]) -> int:
    """One number for a whole state."""
    return checksum_of(document + b"".join(each.to_bytes(8, "little") for each in hashes))
