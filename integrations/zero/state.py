"""The state of a partitioned optimizer put together as the plain optimizer has it, and cut again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from commpress.collectives.reduce_scatter import gather_rows
from commpress.collectives.scalars import gathered
from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.zero.bucket import Bucket, Run
from commpress.work import Steps

MASTER = "master"  # float32 weights of parameters that are not, or that travel compressed


def probe(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], device: torch.device | None = None
) -> tuple[list[str], dict[str, Any]]:
    """Names of the state that has the parameter's shape, and an example of each other one, from a step of a small one."""
    parameter = torch.zeros(7, device=device)
    parameter.grad = torch.zeros_like(parameter)
    small = optimizer([parameter], **options)
    small.step()
    state = {key: value for key, value in small.state[parameter].items() if value is not None}
    moments = sorted(key for key, v in state.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape)
    scalars = {key: state[key] for key in sorted(state) if key not in moments}
    if odd := [key for key, v in scalars.items() if isinstance(v, torch.Tensor) and v.numel() != 1]:
        raise InvalidArgument(f"{optimizer.__name__} keeps {odd[0]!r}, which is neither a number nor as large as the parameter")
    return moments, scalars


def like(example: Any, value: float) -> Any:
    """A number of the kind of ``example``."""
    if isinstance(example, torch.Tensor):
        return torch.full_like(example, value)
    return type(example)(value)


def whole(owner: Any) -> Steps[dict[int, dict[str, Any]]]:
    """{number of the parameter: its state}, the same on every rank."""
    result: dict[int, dict[str, Any]] = {}
    for bucket in owner.buckets:
        scalars = yield from _scalars(owner, bucket)
        for m, numbers in zip(bucket.members, scalars, strict=True):
            stepped = bool(np.isfinite(numbers).all()) and bool(numbers[0])
            if stepped or bucket.mastered:
                result[m.index] = {}
            if stepped:
                result[m.index] |= {k: like(v, n) for (k, v), n in zip(owner.scalars.items(), numbers[1:], strict=True)}
        for key in [*owner.moments, MASTER] if bucket.mastered else owner.moments:
            flat = yield from _gathered(owner, bucket, key)
            for m, numbers in zip(bucket.members, scalars, strict=True):
                if key == MASTER or numbers[0]:
                    result[m.index][key] = m.view(flat).clone()
    return dict(sorted(result.items()))


def _scalars(owner: Any, bucket: Bucket) -> Steps[np.ndarray]:
    """float64[members, 1 + scalars]: whether there is a state, and its numbers, from whoever owns some of the parameter."""
    mine = np.full((len(bucket.members), 1 + len(owner.scalars)), np.nan)
    row = {m.index: i for i, m in enumerate(bucket.members)}
    for own in bucket.runs:
        state = owner.inner.state.get(own.weight, {})
        mine[row[own.member.index]] = [float(bool(state)), *(float(state.get(key, 0.0)) for key in owner.scalars)]
    every = yield from gathered(
        mine.reshape(-1).tolist(), transport=owner.transport, sequence=owner.take(1), device=bucket.device
    )
    return np.nanmax(every, axis=0).reshape(mine.shape)


def _gathered(owner: Any, bucket: Bucket, key: str) -> Steps[torch.Tensor]:
    row = torch.zeros(bucket.width, dtype=torch.float32, device=bucket.device)
    for own in bucket.runs:
        value = own.weight if key == MASTER else owner.inner.state.get(own.weight, {}).get(key)
        if value is not None:
            row[own.place] = value
    flat = torch.zeros(bucket.flat.numel(), dtype=torch.float32, device=bucket.device)
    yield from gather_rows(
        row, flat, plan=bucket.exact_plan, transport=owner.transport, workspace=owner.scratch,
        sequence=owner.take(len(bucket.exact_plan)),
    )  # fmt: skip
    return flat


def load(owner: Any, state_dict: dict[str, Any]) -> None:
    groups, states = state_dict["param_groups"], state_dict["state"]
    check_groups(owner.param_groups, groups)
    numbers = [number for group in groups for number in group["params"]]
    runs = [(bucket, own) for bucket in owner.buckets for own in bucket.runs]
    loaded = [_cut(own, states.get(numbers[own.member.index], {})) for _, own in runs]  # before anything is changed
    for bucket in owner.buckets:
        bucket.adopt()
    for (bucket, own), values in zip(runs, loaded, strict=True):
        master = values.pop(MASTER, None)
        if bucket.mastered and master is not None:
            own.weight.copy_(master)
        if values:
            owner.inner.state[own.weight] = values
        else:
            owner.inner.state.pop(own.weight, None)
    take_options(owner.param_groups, groups)


def agreed(steps: Sequence[float]) -> None:
    """All ranks' stores are of the same step."""
    if len(set(steps)) > 1:
        raise StateMismatch(
            f"the ranks' stores were committed at steps {[int(step) for step in steps]}: a run was killed while it committed. "
            "Restore the same snapshot on every rank, or start anew"
        )


def check_groups(mine: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in mine]:
        raise StateMismatch(
            f"the state has groups of {[len(g['params']) for g in saved]} parameters, the optimizer of "
            f"{[len(g['params']) for g in mine]}: load the state of the same model and groups"
        )


def take_options(mine: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    for group, other in zip(mine, saved, strict=True):
        group.update({key: value for key, value in other.items() if key not in ("params", "param_names")})


def _cut(own: Run, state: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    shape = own.member.parameter.shape
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            result[key] = value
        elif value.shape == shape:
            result[key] = own.of(value).to(own.weight.device, _kept(value.dtype), copy=True)
        elif value.numel() == 1:
            result[key] = value.clone()
        else:
            raise StateMismatch(
                f"{key!r} of {own.member.name!r} has shape {tuple(value.shape)}, expected {tuple(shape)}: load the state "
                "of the same model"
            )
    return result


def _kept(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype
