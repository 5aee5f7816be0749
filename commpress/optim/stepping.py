"""A torch optimizer whose step is an algorithm that may wait: ``step`` drives it, a simulation steps many in lockstep."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from commpress.collectives.allreduce import Workspace
from commpress.collectives.consensus import AgreeOver, Consensus, consensus_over
from commpress.collectives.transports.factory import own_transport
from commpress.collectives.transports.loopback import Loopback, Recorded
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.optim.counters import OptimizerCounters
from commpress.optim.flat import Flat
from commpress.work import Steps, run


class SteppingOptimizer(torch.optim.Optimizer, ABC):
    """Its transport, what it sent, the numbers of its messages, and the loss scale.

    Note: one verdict for all GradScalers. A scaler looks at the gradients of its own rank. So it must call ``step`` in any
    case, which it does for who supports scaling, and is told afterwards what all ranks agreed on, in the tensors that its
    ``update`` reads: all halve their scale, or none does. In a step without communication nobody is asked, and none does.
    """

    averages_gradients = True  # of all ranks, in ``step``: nobody else may
    _step_supports_amp_scaling = True  # gradients keep their scale until they are read
    transport: Recorded
    flat: Flat | None
    consensus: Consensus | None  # where more ranks must stay equal than communicate

    def connect(
        self,
        transport: Transport | None,
        process_group: Any,
        timeout: timedelta | None,
        agree_over: AgreeOver | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        """Through ``transport``, a new group of the ranks of ``process_group``, or alone if there is none."""
        self.consensus = consensus_over(agree_over, process_group, timeout=timeout)
        self.grad_scaler = grad_scaler
        if transport is None:
            transport = own_transport(process_group, timeout=timeout) or Loopback(1).transport(0)
        self.transport, self.counters, self.workspace = Recorded(transport), OptimizerCounters(), Workspace()
        self._sequence = self._counted = 0

    def named_parameters(self) -> tuple[list[torch.Tensor], list[str]]:
        """All of them, group by group, and what they are called: their numbers if nobody gave names."""
        parameters: list[torch.Tensor] = []
        names: list[str] = []
        for group in self.param_groups:
            first = len(parameters)
            parameters += group["params"]
            names += group.get("param_names") or [f"#{i:05d}" for i in range(first, len(parameters))]
        return parameters, names

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.grad_scaler is None and hasattr(self, "found_inf"):
            raise InvalidArgument(
                "step was called by a GradScaler that this optimizer does not know, and cannot tell what all ranks agreed on: "
                "pass it as grad_scaler= to the constructor, or to commpress.overlap"
            )
        try:
            taken = run(self.steps())
        except NonFiniteGradient:
            self._tell_scaler(taken=False)
            raise
        self._tell_scaler(taken=taken)
        return loss

    def gain(self) -> float:
        """1 / loss scale if a GradScaler left its scale on the gradients."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else 1.0 / float(scale)

    @property
    def overflowed(self) -> bool:
        """Whether a GradScaler found infinity in the gradients of this rank."""
        return bool(float(getattr(self, "found_inf", 0.0)))

    def _tell_scaler(self, *, taken: bool) -> None:
        if self.grad_scaler is not None and self.grad_scaler._scale is not None and hasattr(self, "found_inf"):
            verdict = torch.tensor(float(not taken), device=self.grad_scaler._scale.device)
            self.grad_scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {verdict.device: verdict}

    @abstractmethod
    def steps(self) -> Steps[bool]:
        """One step as an algorithm that may wait; returns whether it was taken, the same on every rank."""

    @abstractmethod
    def owed(self) -> float:
        """‖what this rank's compression owes‖ / ‖momentum‖."""

    @abstractmethod
    def rank_state(self) -> dict[str, Any]:
        """What this rank has apart from the others, for ``load_rank_state`` after the state of another rank was loaded."""

    @abstractmethod
    def load_rank_state(self, part: dict[str, Any]) -> None:
        """From this rank's ``rank_state``, the ``commpress`` entry of its ``state_dict``."""

    @abstractmethod
    def elastic_steps(self) -> Steps[dict[str, Any]]:
        """``elastic_state_dict`` as an algorithm that may wait."""

    def elastic_state_dict(self) -> dict[str, Any]:
        """This rank's part of a state that fits any world size; collective, between steps. Rank 0's is the large one."""
        return run(self.elastic_steps())

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def sent_bytes(self) -> int:
        """What left this rank since it was last asked: rounds may begin long before ``step``."""
        before, self._counted = self._counted, self.transport.sent_bytes
        return self._counted - before
