"""Adam's steps of local experts: parameters that only some ranks hold and that are never sent."""

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from commpress.errors import StateMismatch
from commpress.optim.flat import Flat, adam_step
from commpress.torch_private import ENDLESS

State = dict[str, dict[str, torch.Tensor]]  # tensors of each parameter, by name


class ExpertAdam:
    """Adam in float32. A parameter without a gradient stays as it is, as under torch's Adam.

    The caller agrees with the other ranks on ``squares`` and on finite gradients.
    """

    def __init__(
        self,
        entries: Sequence[tuple[dict[str, Any], str, torch.Tensor]],
        state: MutableMapping[torch.Tensor, Any],
        before: "ExpertAdam | None" = None,
    ) -> None:
        self.groups = [group for group, _, _ in entries]
        self.flat = Flat([p for _, _, p in entries], [name for _, name, _ in entries])
        if before is not None:
            self.flat.follow(before.flat)
        self.total = 0.0  # Σ squares over all ranks in this step
        self.states: list[dict[str, torch.Tensor]] = []
        for i, (p, weights) in enumerate(zip(self.flat.parameters, self.flat.weights, strict=True)):
            fresh = {name: torch.zeros_like(weights) for name in ("exp_avg", "exp_avg_sq")}
            own = state[p]
            own.update({"step": torch.zeros(()), **fresh} | dict(own))
            if i in self.flat.shadowed:
                own["master"] = weights
            self.states.append(own)

    def __len__(self) -> int:
        return len(self.states)

    def squares(self, gain: float = 1.0) -> float:
        """Return ‖gain·g‖² of this rank."""
        found = (self.flat.gradient(i) for i in range(len(self)))
        total = sum(float(g.square().sum(dtype=torch.float64)) for g in found if g is not None)
        return total * gain * gain

    def step(self, factor: float) -> None:
        """Take one step with the gradients times ``factor``."""
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
            own, corrected = [self.states[i] for i in gradients], group["bias_correction"]
            adam_step(
                group,
                [self.flat.weights[i] for i in gradients],
                [g if factor == 1.0 else g * factor for g in gradients.values()],
                [s["exp_avg"] for s in own],
                [s["exp_avg_sq"] for s in own],
                [s["step"] if corrected else torch.tensor(ENDLESS) for s in own],
            )
            for s in own if not corrected else ():
                s["step"] += 1
        self.flat.publish()

    # ------------------------------------------------------------ checkpoints

    def state(self) -> State:
        """Return the tensors in use, by name."""
        return {name: dict(own) for name, own in zip(self.flat.names, self.states, strict=True)}

    def of_adam(self, saved: Sequence[dict[str, Any]]) -> State:
        """Make a ``state`` from torch's Adam for these parameters; zeros for one without steps."""
        found = {}
        for (name, own), each in zip(self.state().items(), saved, strict=True):
            beginning = {
                key: value if key == "master" else torch.zeros_like(value)
                for key, value in own.items()
            }
            found[name] = beginning | {
                key: torch.as_tensor(value) for key, value in each.items() if key in own
            }
        self.check(found)
        return found

    def check(self, saved: State) -> None:
        """Raise ``StateMismatch`` unless ``saved`` is a ``state`` of these parameters."""
        for name, own in self.state().items():
            found, wanted = saved.get(name, {}), {k: tuple(v.shape) for k, v in own.items()}
            shapes = {key: tuple(found[key].shape) for key in own if key in found}
            if shapes != wanted:
                raise StateMismatch(
                    f"the state has {shapes or 'nothing'} of {name!r}, which lies on this rank "
                    f"alone, expected {wanted}: load this rank's own state, on as many ranks as "
                    "saved it, with the same experts on each"
                )

    def load(self, saved: State) -> None:
        """Load a state that ``check`` has accepted."""
        for name, own in self.state().items():
            for key, value in own.items():
                value.copy_(saved[name][key])
        self.flat.publish()
