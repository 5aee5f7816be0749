"""Test whether an optimizer is element-wise, by a trial: tensors updated as a whole, and in pieces
by optimizers that know only the piece and its state, must be equal bit for bit.

``Partitioned`` and ``Offloaded`` update pieces in this way. The trial finds norms, ranks or factors
of a tensor, a norm over all tensors, state in the optimizer or its groups or in another dtype or
shape, and noise. Some optimizers combine elements only in large tensors, so each number of
dimensions is tried with small tensors and a large one. With whole tensors as pieces the trial shows
whether an optimizer updates each tensor by itself, as Muon does.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from commpress.errors import InvalidArgument
from commpress.integrations.zero.bucket import ALIGN
from commpress.optim.checkpoint import options_of

STEPS = 12  # some optimizers do something special every few steps
BEFORE = 2  # steps with small tensors alone: some take minutes and gigabytes for a large one
SIDES = (3, 5, 7, 2)  # sizes of a small tensor's dimensions, except the last
NUMEL = 4 * ALIGN + 29  # fewest elements of a small tensor
SIDE, LARGE = 128, 128 * 160  # of a large tensor: some factor moments from 128 rows and columns on
# elements of a large vector: 8-bit states begin at 4,096 elements, in whole blocks; some optimizers
# make a square matrix of them
VECTOR = 17 * 256
CUTS = (0, ALIGN, 3 * ALIGN)


def check_elementwise(
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, Any],
    groups: Sequence[dict[str, Any]],
    *,
    device: torch.device,
    in_place: bool,
    whole: bool = False,
) -> None:
    """Raise ``InvalidArgument`` if the update of pieces would differ from that of ``optimizer`` for
    some group of parameters. With ``in_place`` the state must be changed, not replaced; with
    ``whole`` each tensor is one piece."""
    tried = []
    for group in groups:
        own = options_of(group)
        # a schedule may begin at 0
        own |= {"lr": 1e-2} if isinstance(own.get("lr"), float) and not own["lr"] else {}
        dims = sorted({p.dim() for p in group["params"]})
        if dims and (kind := (_alike(own), dims)) not in tried:
            tried.append(kind)
            tries = partial(
                _difference, optimizer, options, own, dims, device, in_place=in_place, whole=whole
            )
            _try(optimizer, partial(tries, large=False), device)
            _try(optimizer, tries, device)


def takes_tensors(
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, Any],
    groups: Sequence[dict[str, Any]],
) -> bool:
    """Return False if a store may hold pieces of tensors for ``optimizer``, True if it must hold
    whole ones; raise ``InvalidArgument`` if neither will do."""
    check = partial(
        check_elementwise, optimizer, options, groups, device=torch.device("cpu"), in_place=True
    )
    try:
        check()
    except InvalidArgument as error:
        try:
            check(whole=True)
        except InvalidArgument:
            raise error from None
        return True
    return False


def _alike(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with numbers replaced by whether they are zero, since others behave
    alike."""
    number = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)  # noqa: E731
    return {key: bool(value) if number(value) else repr(value) for key, value in options.items()}


def _try(
    optimizer: type[torch.optim.Optimizer], difference_of: Callable[[], str], device: torch.device
) -> None:
    name = f"{optimizer.__module__}.{optimizer.__name__}"
    try:
        with _randomness_unchanged(device), torch.no_grad():
            difference = difference_of()
    except Exception as error:
        raise InvalidArgument(
            f"optimizer is {name}, which cannot update a tensor and pieces of it with these "
            f"options: {type(error).__name__}: {error}. Use an element-wise one, such as AdamW, "
            "SGD or Adagrad"
        ) from error
    if difference:
        raise InvalidArgument(
            f"optimizer is {name}, which is not element-wise: {difference}. Its state cannot be "
            "divided. Use an element-wise one, such as AdamW, SGD or Adagrad"
        )


def _difference(
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, Any],
    group: dict[str, Any],
    dims: Sequence[int],
    device: torch.device,
    *,
    in_place: bool,
    whole: bool,
    large: bool = True,
) -> str:
    """Describe a difference between the update of a tensor and of its pieces; empty if there is
    none."""
    draw = torch.Generator().manual_seed(0)
    shapes = [
        torch.Size(shape)
        for d in dims
        for shape in (_shape(d), _shape(d), _large(d))[: 3 if d and large else 2]
    ]
    wholes = [torch.nn.Parameter(torch.randn(shape, generator=draw).to(device)) for shape in shapes]
    flats = [each.detach().clone().view(-1) for each in wholes]
    cuts = [(0,) if whole else tuple(a for a in CUTS if a < len(flat)) for flat in flats]
    pieces = [
        [flat[a:b] for a, b in zip(starts, (*starts[1:], len(flat)), strict=True)]
        for starts, flat in zip(cuts, flats, strict=True)
    ]
    if whole:
        pieces = [[flat.view(shape)] for flat, shape in zip(flats, shapes, strict=True)]
    states: list[list[dict[str, Any]]] = [[{} for _ in own] for own in pieces]
    twin = _made(optimizer, wholes, options, group)
    settings = _settings(twin)
    for step in range(STEPS if large else BEFORE):
        for number, tensor in enumerate(wholes):
            # keeps its direction, as optimizers that estimate a distance need
            steady = shapes[number].numel() >= VECTOR
            gradient = (
                tensor.detach().cpu().clone()
                if steady
                else torch.randn(tensor.shape, generator=draw)
            )
            gradient *= 10.0 ** (step % 3 - number % 3)
            gradient.view(-1)[:ALIGN] *= step % 4 != 1  # no gradient in one piece now and then
            tensor.grad = gradient.to(device)
            for i, piece in enumerate(pieces[number]):
                flat = tensor.grad.view(-1)[cuts[number][i] :][: piece.numel()]
                piece.grad = flat.view(piece.shape).clone()
                one = _made(optimizer, [piece], options, group)
                if step:
                    one.state[piece] = dict(states[number][i])
                one.step()
                before, after = states[number][i], one.state[piece]
                if in_place and any(
                    after.get(k) is not v for k, v in before.items() if _moment(v, piece)
                ):
                    return (
                        "it replaces its state instead of changing it in place, as a store requires"
                    )
                states[number][i] = _kept(after, piece)
                piece.grad = None
        twin.step()
        if changed := [
            name for name, value in _settings(twin).items() if settings.get(name) != value
        ]:
            return (
                f"its step changes {changed[0]!r} of param_groups, which is computed from all "
                "parameters or counts steps"
            )
        for number, tensor in enumerate(wholes):
            if not torch.equal(tensor.view(-1), flats[number]):
                return (
                    f"in step {step + 1} the update of a tensor of shape {tuple(tensor.shape)} "
                    "differs from that of its pieces"
                )
            if found := _different_state(
                twin.state[tensor], tensor, states[number], pieces[number]
            ):
                return (
                    f"after step {step + 1} its state {found!r} of a tensor differs from that of "
                    "its pieces"
                )
        kinds = [{key for key, value in twin.state[p].items() if value is not None} for p in wholes]
        if odd := sorted(set.union(*kinds) - set.intersection(*kinds)):
            return f"it keeps {odd[0]!r} for some tensors only"
    return ""


def _made(
    optimizer: type[torch.optim.Optimizer],
    tensors: list[Any],
    options: dict[str, Any],
    group: dict[str, Any],
) -> torch.optim.Optimizer:
    return optimizer([{**group, "params": tensors}], **options)


def _shape(dims: int) -> tuple[int, ...]:
    if dims == 0:
        return ()
    sides = tuple(SIDES[i % len(SIDES)] for i in range(dims - 1))
    return *sides, -(-NUMEL // math.prod(sides))


def _large(dims: int) -> tuple[int, ...]:
    """Return a shape with sides long enough for orthogonalization, scaling by rows or factored
    moments."""
    return (VECTOR,) if dims < 2 else (SIDE, (LARGE // SIDE) >> (dims - 2), *[2] * (dims - 2))


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the options of its one group in a comparable form."""
    return {
        name: repr(value) for name, value in optimizer.param_groups[0].items() if name != "params"
    }


def _kept(state: dict[str, Any], piece: torch.Tensor) -> dict[str, Any]:
    """Return a state as it is stored between steps: with moments in float32."""
    found = {key: value for key, value in state.items() if value is not None}
    return {key: value.float() if _moment(value, piece) else value for key, value in found.items()}


def _moment(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dim() > 0


def _different_state(
    whole: dict[str, Any],
    parameter: torch.Tensor,
    states: Sequence[dict[str, Any]],
    pieces: Sequence[torch.Tensor],
) -> str:
    """Return the name of the first entry in which the states of the pieces differ from that of the
    whole."""
    known = {key: value for key, value in whole.items() if value is not None}
    for key in known.keys() | states[0].keys():
        values = [state.get(key) for state in states]
        if key not in known or any(value is None for value in values):
            return key
        if _moment(known[key], parameter):
            if not all(_moment(value, piece) for value, piece in zip(values, pieces, strict=True)):
                return key
            if not torch.equal(
                torch.cat([value.view(-1) for value in values if value is not None]),
                known[key].float().view(-1),
            ):
                return key
        elif any(not _same_number(value, known[key]) for value in values):
            return key
    return ""


def _same_number(one: Any, other: Any) -> bool:
    numel = other.numel() if isinstance(other, torch.Tensor) else 1
    return numel == (one.numel() if isinstance(one, torch.Tensor) else 1) == 1 and bool(
        one == other
    )


@contextmanager
def _randomness_unchanged(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
