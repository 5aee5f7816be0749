"""An optimizer around another one: the common part of ``Partitioned`` and ``Offloaded``."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument, NonFiniteGradient, StateMismatch, refuse_model
from commpress.integrations.zero.bucket import Numbered
from commpress.integrations.zero.streamed_group import is_streamed
from commpress.logs import warn_on_first
from commpress.optim.layout import WeightHolder, check_parameter, local
from commpress.optim.optimizer import loss_of
from commpress.torch_private import untraced

# entry of a state: float32 weights of parameters in another dtype, or with compressed weights
MASTER = "master"


class Wrapper(torch.optim.Optimizer, WeightHolder):
    """Base class. ``param_groups`` are the user's, with the options of ``optimizer``, and are read
    in each step."""

    where = ""  # place of the gradients, for messages

    def __init__(
        self,
        params: Any,
        optimizer: type[torch.optim.Optimizer],
        options: dict[str, Any],
        *,
        max_grad_norm: float | None,
        on_nonfinite: Literal["skip", "raise"],
    ) -> None:
        refuse_model(params)
        _check_optimizer(optimizer)
        _check_clipping(max_grad_norm, on_nonfinite)
        self._built = False
        self.max_grad_norm, self.on_nonfinite = max_grad_norm, on_nonfinite
        self.steps_done = self.skipped_steps = 0
        super().__init__(params, optimizer([torch.zeros(1, 1)], **options).defaults)

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of(closure)
        self._step()
        return loss

    def _step(self) -> None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:
            raise InvalidArgument(
                "add_param_group after construction: the layout is fixed already. Pass all groups "
                f"to the constructor, or make a second {type(self).__name__} for the new parameters"
            )
        super().add_param_group(param_group)

    def _clipping(self, norm: Callable[[], torch.Tensor]) -> tuple[torch.Tensor | None, bool]:
        """Return the clipping factor, None without ``max_grad_norm``, and whether the norm is
        finite, True without one."""
        if self.max_grad_norm is None:
            return None, True
        found = norm()
        return clip_factor(self.max_grad_norm, found), bool(torch.isfinite(found))

    def _skip(self, rank: int = 0) -> None:
        """Count a skipped step, and raise or warn. ``rank`` counts among those that skip
        together."""
        self.skipped_steps += 1
        if self.on_nonfinite == "raise":
            raise NonFiniteGradient(
                f"the gradients of step {self.steps_done} hold NaN or infinity{self.where}. "
                "Nothing was changed. Look for the cause in the loss, or pass on_nonfinite='skip'."
            )
        if self.skipped_steps <= 3 or self.skipped_steps % 100 == 0:
            warn_on_first(
                rank,
                "step %d was skipped: gradients held NaN or infinity%s (%d so far)",
                self.steps_done,
                self.where,
                self.skipped_steps,
            )


def clip_factor(limit: float, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor of ``torch.nn.utils.clip_grad_norm_``."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def of_every_rank(channel: Channel, values: list[float]) -> list[float]:
    """Gather these numbers from all ranks: the first of all ranks, then the second, and so on."""
    if channel.size == 1:
        return values
    every: list[float] = channel.run(channel.gathered(values)).T.ravel().tolist()
    return every


# ---------------------------------------------------------------- arguments


def _check_optimizer(optimizer: Any) -> None:
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise InvalidArgument(
            f"optimizer is {optimizer!r}, expected a class such as torch.optim.AdamW, with its "
            "options after it"
        )
    if any(base.__module__.split(".")[0] == "commpress" for base in optimizer.__mro__):
        raise InvalidArgument(
            f"optimizer is {optimizer.__name__}, which communicates by itself: give it parameters "
            "of its own, and name an element-wise one here, such as AdamW, SGD or Adagrad"
        )


def _check_clipping(max_grad_norm: float | None, on_nonfinite: str) -> None:
    number = isinstance(max_grad_norm, int | float) and max_grad_norm > 0
    if max_grad_norm is not None and not number:
        raise InvalidArgument(
            f"max_grad_norm is {max_grad_norm!r}, expected a positive number or None"
        )
    if on_nonfinite not in ("skip", "raise"):
        raise InvalidArgument(f"on_nonfinite is {on_nonfinite!r}, expected 'skip' or 'raise'")


def trainable(
    groups: Sequence[dict[str, Any]], *, streamed: bool = False
) -> tuple[list[list[Numbered]], list[tuple[str, torch.Tensor]]]:
    """Return (parameter, name, number) of all trained parameters by group, and the frozen ones.
    ``streamed`` allows streamed parameters."""
    result: list[list[Numbered]] = []
    frozen: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    for group in groups:
        result.append([])
        names = group.get("param_names") or [
            f"#{len(seen) + i:05d}" for i in range(len(group["params"]))
        ]
        for name, parameter in zip(names, group["params"], strict=True):
            if id(parameter) in seen:
                raise InvalidArgument(
                    f"parameter {name!r} is in params twice: pass a tied parameter once, as "
                    "model.parameters() does"
                )
            if parameter.requires_grad:
                _check(name, parameter, streamed)
                result[-1].append((parameter, name, len(seen)))
            else:
                frozen.append((name, parameter))
            seen.add(id(parameter))
    if not any(result):
        raise InvalidArgument("params has no parameter that requires a gradient")
    return result, frozen


def _check(name: str, parameter: torch.Tensor, streamed: bool) -> None:
    check_parameter(name, parameter)
    if is_streamed(parameter) and not streamed:
        raise InvalidArgument(
            f"parameter {name!r} is streamed from a store: train it by commpress.Offloaded with "
            "that store, on one rank or several"
        )
    if parameter.numel() == 0 or not (is_streamed(parameter) or local(parameter).is_contiguous()):
        raise InvalidArgument(
            f"parameter {name!r} of shape {tuple(parameter.shape)} is empty or not contiguous, "
            "expected contiguous values"
        )


# ---------------------------------------------------------------- state


def probe(
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, Any],
    device: torch.device | None = None,
    *,
    dims: int = 1,
) -> tuple[dict[str, float], dict[str, Any]]:
    """Take a step of a small parameter of ``dims`` dimensions; return the first values of moments,
    which have its shape, and an example of each other entry of the state.

    Parameter and gradient are zero, so that moments after the step equal those before it.
    """
    parameter = torch.zeros((7, 3, *[2] * dims)[:dims], device=device)
    parameter.grad = torch.zeros_like(parameter)
    small = optimizer([parameter], **options)
    small.step()
    state = {key: value for key, value in small.state[parameter].items() if value is not None}
    whole = {
        key: v
        for key, v in state.items()
        if isinstance(v, torch.Tensor) and v.shape == parameter.shape
    }
    moments = {key: float(whole[key].view(-1)[0]) for key in sorted(whole)}
    scalars = {key: state[key] for key in sorted(state) if key not in moments}
    if odd := [key for key, v in scalars.items() if isinstance(v, torch.Tensor) and v.numel() != 1]:
        raise InvalidArgument(
            f"{optimizer.__name__} has {odd[0]!r} in its state, which is neither a number nor of "
            "the parameter's shape: use another, such as AdamW, SGD or Adagrad"
        )
    return moments, scalars


def like(example: Any, value: float) -> Any:
    """Return a number of the type of ``example``."""
    if isinstance(example, torch.Tensor):
        return torch.full_like(example, value)
    return type(example)(value)


def agreed(steps: Sequence[float]) -> None:
    """Raise ``StateMismatch`` unless all ranks' stores are of the same step."""
    if len(set(steps)) > 1:
        raise StateMismatch(
            f"the ranks' stores were committed at steps {[int(step) for step in steps]}: a run was "
            "killed while it committed. Restore the same snapshot on every rank, or start anew"
        )


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
