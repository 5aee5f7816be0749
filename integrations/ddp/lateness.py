"""Lateness: how much of the gradients compression still keeps back, and what a codec that nobody
asked for may keep.

    ‖Σᵢ eᵢ / P + s‖ / ‖mean gradient‖        1: as much as one whole gradient is yet to be sent

Residuals of all ranks are added up first: a low-rank codec leaves on each rank what this rank's
gradient has apart from the others, which is noise and adds up to little. ``int8`` keeps 0.01,
``int4`` 0.2, ``powersgd-4`` 0.1 to 1.6, ``sign`` 5 to 100 (a GPT of 0.9 million parameters, 240
steps): those that keep at most ``LATE`` train as without compression.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from commpress.collectives.buckets import Span

LATE = 2.0
SAMPLED = 1 << 16  # elements that are looked at: they lie evenly over all parameters
EVERY = 100  # steps between two looks at a codec that stays
PATIENCE = 2  # looks in a row at which it is late, before another takes its place


class Lateness:
    """Looks at samples of one step: ``see`` each bucket before it is sent, then ask ``agreed``."""

    def __init__(self, numel: int) -> None:
        self._stride = max(numel // SAMPLED, 1)
        # a parameter's sample, and its number of elements
        self._own: dict[str, tuple[torch.Tensor, int]] = {}

    def see(self, spans: Sequence[Span], gradient: torch.Tensor, gain: float) -> None:
        """This rank's gradients of a bucket, before residuals are added."""
        for span in spans:
            part = gradient[span.source : span.source + span.numel]
            self._own[span.name] = (part[:: self._stride] * gain, span.numel)

    def agreed(
        self,
        owed: Callable[[str, torch.Tensor], None],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> float:
        """The same number on all ranks; collective over ``group``. ``owed`` adds this rank's
        residual of a parameter."""
        own, late = [], []
        for name in sorted(self._own):
            sample, numel = self._own[name]
            left = torch.zeros(numel, device=sample.device)
            owed(name, left)
            own.append(sample)
            late.append(left[:: self._stride])
        self._own.clear()
        table = (
            torch.stack([torch.cat(own), torch.cat(late)]).to(device)
            if own
            else torch.zeros(2, 1, device=device)
        )
        dist.all_reduce(table, group=group)
        gradient, left_behind = table.double().norm(dim=1).tolist()
        return left_behind / gradient if gradient > 0 else 0.0


class Probation:
    """A codec that stays after a trial nobody asked it into, and the one that takes its place where
    it falls behind."""

    def __init__(self, way: str, instead: str, late: int = 0) -> None:
        self.way, self.instead, self.late = way, instead, late

    def state(self) -> tuple[str, str, int]:
        """Arguments that make the same again."""
        return self.way, self.instead, self.late

    def due(self, step: int) -> bool:
        return step % EVERY == EVERY - 1

    def judge(self, lateness: float) -> bool:
        """True if the other is to take its place."""
        self.late = self.late + 1 if lateness > LATE else 0
        return self.late >= PATIENCE
