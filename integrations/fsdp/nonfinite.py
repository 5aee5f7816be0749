"""Reaction of all ranks to gradients that are not finite on some rank."""

import torch
from torch.autograd import Variable

from commpress.collectives.channel import Counters
from commpress.collectives.exchange import check_on_nonfinite
from commpress.errors import NonFiniteGradient
from commpress.logs import warn_on_first


class BadGradients:
    """Replace such gradients by zeros ("skip"), NaN ("propagate"), or zeros with an error after
    backward ("raise")."""

    def __init__(self, policy: str, rank: int) -> None:
        check_on_nonfinite(policy)
        self.policy, self.rank = policy, rank
        self.value = float("nan") if policy == "propagate" else 0.0
        self.error: NonFiniteGradient | None = None  # of the running backward

    def refuse(
        self,
        gradients: torch.Tensor,
        counters: Counters,
        name: str,
        step: int,
        *,
        raises: bool = True,
    ) -> None:
        """Replace ``gradients``, called ``name``, and warn, or if ``raises`` and the policy is
        "raise", raise at the end of backward."""
        gradients.fill_(self.value)
        counters.skipped_buckets += 1
        count = counters.skipped_buckets
        if self.policy != "raise":
            if count <= 3 or count % 100 == 0:
                warn_on_first(
                    self.rank,
                    "step %d: %s held NaN or infinity on some rank and became %s on all (%d so "
                    "far)",
                    step,
                    name,
                    "zeros" if self.value == 0.0 else "NaN",
                    count,
                )
            return
        if self.error is not None or not raises:
            return
        self.error = NonFiniteGradient(
            f"the {name} hold NaN or infinity on some rank at step {step}. No residual of theirs "
            "was changed. Look for the cause in the loss, or pass on_nonfinite='skip'."
        )
        if torch._C._current_graph_task_id() < 0:
            self._raise()
        Variable._execution_engine.queue_callback(self._raise)

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
