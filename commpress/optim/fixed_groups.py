"""Optimizers that exchange by themselves, of parameters that are all known from the beginning."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch

from commpress.collectives.channel import Channel
from commpress.collectives.round import check_on_nonfinite
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, StateMismatch
from commpress.optim.checkpoint import check_groups, other_dtype, take_groups
from commpress.optim.flat import Flat
from commpress.optim.held import refuse_held
from commpress.optim.optimizer_counters import OptimizerCounters
from commpress.optim.parameters import check_parameter, named_parameters


class FixedGroups(torch.optim.Optimizer):
    """Parameters side by side, a channel and counters; state by parameter, which ``take_state``
    loads.

    ``why`` says what the optimizer does with parameters that it cannot do with those that a rank
    holds for others.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        why: str,
        *,
        on_nonfinite: Literal["skip", "raise"],
        process_group: Any,
        transport: Transport | None,
        timeout: timedelta | None,
    ) -> None:
        check_on_nonfinite(on_nonfinite, propagates=False)
        self.on_nonfinite, self.steps_done, self.counters = on_nonfinite, 0, OptimizerCounters()
        super().__init__(params, defaults)
        parameters, names = named_parameters(self.param_groups)
        for name, parameter in zip(names, parameters, strict=True):
            check_parameter(name, parameter)
        self._flat = Flat(parameters, names)
        refuse_held(
            type(self).__name__, zip(self._flat.names, self._flat.parameters, strict=True), why
        )
        self.channel = (
            Channel.among(process_group, timeout=timeout)
            if transport is None
            else Channel(transport)
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_flat"):
            raise InvalidArgument(
                "add_param_group after construction: pass all groups to the constructor"
            )
        super().add_param_group(param_group)

    def _hold(self, **buffers: torch.Tensor) -> None:
        """Each parameter's state: its views of these buffers, and its float32 weights if it is
        something else."""
        for i, p in enumerate(self._flat.parameters):
            self.state[p] = {key: self._flat.view(buffer, i) for key, buffer in buffers.items()}
            if i in self._flat.shadowed:
                self.state[p]["master"] = self._flat.weights[i]

    def _each(self) -> list[tuple[dict[str, Any], int]]:
        """Every parameter's group and number."""
        return [
            (group, self._flat.index[id(p)]) for group in self.param_groups for p in group["params"]
        ]

    def _take_state(self, state: dict[str, Any]) -> None:
        """Load groups and parameters of torch's ``state_dict``, once all of it is seen to fit."""
        check_groups(self, state["param_groups"])
        numbers: Sequence[int] = [
            number for group in state["param_groups"] for number in group["params"]
        ]
        found = [state["state"].get(number, {}) for number in numbers]
        for p, name, one in zip(self._flat.parameters, self._flat.names, found, strict=True):
            missing = [key for key in self.state[p] if key not in one or one[key].shape != p.shape]
            if missing == ["master"]:
                raise other_dtype(name, p, was="float32")
            if missing:
                raise StateMismatch(
                    f"the state of parameter {name!r} has no {', '.join(missing)} of "
                    f"{tuple(p.shape)}"
                )
        take_groups(self, state["param_groups"])
        for p, one in zip(self._flat.parameters, found, strict=True):
            for key, value in self.state[p].items():
                value.copy_(one[key])
