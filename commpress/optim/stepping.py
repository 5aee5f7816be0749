"""A torch optimizer whose step is an algorithm that may wait: ``step`` drives it, a simulation steps many in lockstep."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from commpress.collectives.allreduce import Workspace
from commpress.collectives.consensus import AgreeOver, Consensus, consensus_over
from commpress.collectives.loopback import Loopback, Recorded
from commpress.collectives.transport import Transport, own_transport
from commpress.optim.counters import OptimizerCounters
from commpress.work import Steps, run


class SteppingOptimizer(torch.optim.Optimizer, ABC):
    """Its transport, what it sent, and the numbers of its messages."""

    transport: Recorded
    consensus: Consensus | None  # where more ranks must stay equal than communicate

    def connect(
        self,
        transport: Transport | None,
        process_group: Any,
        timeout: timedelta | None,
        agree_over: AgreeOver | None = None,
    ) -> None:
        """Through ``transport``, a new group of the ranks of ``process_group``, or alone if there is none."""
        self.consensus = consensus_over(agree_over, process_group, timeout=timeout)
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
        run(self.steps())
        return loss

    @abstractmethod
    def steps(self) -> Steps[bool]:
        """One step as an algorithm that may wait; returns whether it was taken, the same on every rank."""

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
