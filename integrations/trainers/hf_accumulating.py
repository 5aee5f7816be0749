"""A mixin for the Trainer of a streamed model, which takes one micro-batch after the other by
itself."""

from typing import Any

import torch

from commpress.errors import InvalidArgument
from commpress.integrations.zero.streamed_group import streamer_of


class Accumulating:
    """Mixin for the Trainer of a streamed model: ``class MyTrainer(Accumulating, Trainer)``. The
    micro-batches of a step (``gradient_accumulation_steps``) pass through each block together
    (``streamed.accumulate``)."""

    _samples: list[Any]  # of this step
    _losses: list[torch.Tensor]  # of those that the Trainer has yet to ask for

    def get_batch_samples(self, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        samples, count = super().get_batch_samples(*args, **options)  # type: ignore[misc]
        self._samples, self._losses = list(samples), []
        return samples, count

    def training_step(
        self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the loss of a micro-batch; the first call computes those of all."""
        if not self._losses:
            model.train()
            streamed = next(filter(None, map(streamer_of, model.parameters())), None)
            if streamed is None:
                raise InvalidArgument(
                    f"Accumulating got a {type(model).__name__} whose parameters are in memory: "
                    "call commpress.stream(model, store=...) before the Trainer is made"
                )
            self._losses = streamed.accumulate(
                lambda each: self._loss_of(model, each, num_items_in_batch), self._samples
            )
        return self._losses.pop(0)

    def _loss_of(self, model: torch.nn.Module, inputs: Any, count: Any) -> torch.Tensor:
        """Return the loss as the Trainer's own step has it before the backward."""
        trainer: Any = self
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(
                model, trainer._prepare_inputs(inputs), num_items_in_batch=count
            )
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = trainer.compute_loss_func is not None or (
                trainer.model_accepts_loss_kwargs and count is not None
            )
        return loss if scaled else loss / len(self._samples)
