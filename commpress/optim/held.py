"""Parameters that not all ranks hold, such as experts that are divided among them: who may average
them, and who steps them.

A layer of experts says it of the parameters that it keeps; everybody who reduces, moves or clips
parameters asks here.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from math import inf, isfinite
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from commpress.errors import InvalidArgument, StateMismatch
from commpress.optim.flat import Flat
from commpress.torch_private import ENDLESS, adam

HELD: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → who holds it
OTHER_OPTIMIZERS = (
    "train them with OneBitAdam or ZeroOneAdam, or with an optimizer of torch, to which "
    "commpress.moe.held_parameters(model) gives them"
)
NORMS = (torch._foreach_norm, torch.linalg.vector_norm)
# who asks for the norm of all
CLIPPERS = ("torch.nn.utils.clip_grad", "torch.distributed.fsdp.fully_sharded_data_parallel")


class Held(NamedTuple):
    """Ranks of the whole world that matter to a parameter that not all of them hold."""

    divided: tuple[int, ...]  # among these it lies on one, or some
    # these have it, this rank among them; its gradient is averaged over them before anybody sees it
    holders: tuple[int, ...]
    rank: int  # this one


def mark_held(
    parameter: torch.Tensor, divided: Sequence[int], holders: Sequence[int], rank: int
) -> None:
    """Say of a parameter who holds it, for as long as it lives: also when it moves or is
    converted."""
    HELD[parameter] = Held(tuple(divided), tuple(holders), rank)


def held_of(parameter: torch.Tensor) -> Held | None:
    """The ranks that hold a parameter; None: all do."""
    found: Held | None = HELD.get(parameter)
    return found


def is_held(name: str, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
    """True if some of ``ranks`` have other values in this one's place, so that nobody may average
    it over them."""
    held = held_of(parameter)
    if held is None:
        return False
    others = set(ranks) - {held.rank}
    if others.isdisjoint(held.divided):
        return False  # they have the same experts
    strangers = sorted(others - set(held.divided) - set(held.holders))
    # else these are other sets of such ranks
    if strangers and len(others) + 1 != len(held.divided) * len(held.holders):
        raise InvalidArgument(
            f"parameter {name!r} is of experts divided among ranks {list(held.divided)}, and ranks "
            f"{strangers} train with them: nobody would average what these have of the same "
            "experts. Pass replicas= to parallelise or Experts, the group of the ranks that hold "
            "the same experts as this one"
        )
    return True


def refuse_averaging(named: Iterable[tuple[str, torch.Tensor]], ranks: Sequence[int]) -> None:
    """Raise ``InvalidArgument`` if DistributedDataParallel over ``ranks`` averages what is not the
    same on all of them."""
    found = [name for name, parameter in named if is_held(name, parameter, ranks)]
    if found:
        raise InvalidArgument(
            f"DistributedDataParallel has {found[0]!r}, of experts that are divided among its "
            f"ranks ({len(found)} such): it gives all ranks those of rank 0 and averages different "
            "ones. Call commpress.moe.parallelise(model) on the very module that is wrapped, "
            "before it is"
        )


def refuse_held(
    what: str, named: Iterable[tuple[str, torch.Tensor]], why: str, *, cure: str = OTHER_OPTIMIZERS
) -> None:
    """Raise ``InvalidArgument`` if a parameter is of divided experts, on however many ranks."""
    found = [name for name, parameter in named if held_of(parameter) is not None]
    if found:
        raise InvalidArgument(
            f"parameter {found[0]!r} is of experts that are divided among ranks ({len(found)} "
            f"such), and {what} {why}: {cure}"
        )


class HeldGradient(torch.Tensor):
    """A gradient of a parameter that not all ranks hold, which torch's ``clip_grad_norm_`` cannot
    take for one that they do.

    In all else it is a plain tensor, and what is computed from it is one.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in NORMS and _clips(sys._getframe(1)):
            raise InvalidArgument(
                "torch's clip_grad_norm_ was given gradients of experts that are divided among "
                "ranks: it knows those of this rank only, and would multiply what all ranks hold "
                "alike by another factor on each. Call "
                "commpress.moe.clip_grad_norm_(model.parameters(), max_norm) in its place; with "
                "Lightning and Accelerate leave their clipping off (gradient_clip_val=None) and "
                "call it before optimizer.step()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _clips(frame: FrameType | None) -> bool:
    """True if a norm is asked for in order to clip by it, and not to look at it: Trainers clip to
    infinity."""
    if frame is None or frame.f_globals.get("__name__") not in CLIPPERS:
        return False
    while frame is not None and frame.f_code.co_name != "clip_grad_norm_":
        frame = frame.f_back
    return frame is not None and float(frame.f_locals.get("max_norm", inf)) < inf


def name_gradient(parameter: torch.Tensor) -> None:
    """Make a parameter's gradient a ``HeldGradient``: a hook for when it has been accumulated."""
    if parameter.grad is not None and type(parameter.grad) is torch.Tensor:
        parameter.grad = parameter.grad.as_subclass(HeldGradient)


class HeldAdam:
    """Adam's steps of the parameters that not all ranks hold, in float32: nothing of them is sent.

    A parameter without a gradient stays as it is, as under torch's Adam. ``squares`` and finite
    gradients are agreed on with the others by whoever calls it.
    """

    def __init__(
        self,
        entries: Sequence[tuple[dict[str, Any], str, torch.Tensor]],
        state: MutableMapping[torch.Tensor, Any],
        before: "HeldAdam | None" = None,
    ) -> None:
        self.groups = [group for group, _, _ in entries]
        self.flat = Flat([p for _, _, p in entries], [name for _, name, _ in entries])
        if before is not None:
            self.flat.follow(before.flat)
        self.total = 0.0  # Σ squares over all ranks, of this step
        self.states: list[dict[str, torch.Tensor]] = []
        for i, p in enumerate(self.flat.parameters):
            fresh = {
                name: torch.zeros_like(self.flat.weights[i]) for name in ("exp_avg", "exp_avg_sq")
            }
            own = state[p]
            own.update({"step": torch.zeros(()), **fresh} | dict(own))
            if i in self.flat.shadowed:
                own["master"] = self.flat.weights[i]
            self.states.append(own)

    def __len__(self) -> int:
        return len(self.states)

    def squares(self, gain: float = 1.0) -> float:
        """‖gain·g‖² of this rank."""
        found = (self.flat.gradient(i) for i in range(len(self)))
        total = sum(float(g.square().sum(dtype=torch.float64)) for g in found if g is not None)
        return total * gain * gain

    def step(self, factor: float) -> None:
        """One step with the gradients times ``factor``."""
        self.flat.check()
        for group in {id(group): group for group in self.groups}.values():
            at = [
                i
                for i, mine in enumerate(self.groups)
                if mine is group and self.flat.parameters[i].numel()
            ]
            gradients = {i: g for i in at if (g := self.flat.gradient(i)) is not None}
            if not gradients:
                continue
            if factor != 1.0:
                gradients = {i: g * factor for i, g in gradients.items()}
            own = [self.states[i] for i in gradients]
            counts = [s["step"] if group["bias_correction"] else torch.tensor(ENDLESS) for s in own]
            adam(
                [self.flat.weights[i] for i in gradients],
                list(gradients.values()),
                [s["exp_avg"] for s in own],
                [s["exp_avg_sq"] for s in own],
                [],
                counts,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                decoupled_weight_decay=True,
            )
            if not group["bias_correction"]:
                for s in own:
                    s["step"] += 1
        self.flat.publish()

    # ------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """By name, the tensors in use."""
        return {name: dict(own) for name, own in zip(self.flat.names, self.states, strict=True)}

    def of_adam(self, saved: Sequence[dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
        """A ``state`` that begins as torch's Adam has it of these parameters; one that was never
        stepped begins with zeros."""
        found = {}
        for name, own, each in zip(self.flat.names, self.states, saved, strict=True):
            beginning = {
                key: value if key == "master" else torch.zeros_like(value)
                for key, value in own.items()
            }
            found[name] = beginning | {
                key: torch.as_tensor(value) for key, value in each.items() if key in own
            }
        self.check(found)
        return found

    def check(self, saved: dict[str, dict[str, torch.Tensor]]) -> None:
        """Raise ``StateMismatch`` unless it is a ``state`` of these parameters."""
        for name, own in zip(self.flat.names, self.states, strict=True):
            found = saved.get(name)
            shapes = (
                None
                if found is None
                else {key: tuple(found[key].shape) for key in own if key in found}
            )
            if shapes != {key: tuple(value.shape) for key, value in own.items()}:
                raise StateMismatch(
                    f"the state has {shapes or 'nothing'} of {name!r}, which lies on this rank "
                    f"alone, expected { {key: tuple(value.shape) for key, value in own.items()} }: "
                    "load this rank's own state, on as many ranks as saved it, with the same "
                    "experts on each"
                )

    def load(self, saved: dict[str, dict[str, torch.Tensor]]) -> None:
        """Take over what fitted."""
        for name, own in zip(self.flat.names, self.states, strict=True):
            for key, value in own.items():
                value.copy_(saved[name][key])
        self.flat.publish()


def norm_of(shared: float, held: float) -> float:
    """√(‖shared‖² + ‖held‖²) of the norm of what all ranks hold alike and the squares of the
    rest."""
    return (shared * shared + held) ** 0.5 if isfinite(shared) else shared
