"""Lightning: a callback for ``Trainer(strategy="ddp", callbacks=[Compress()])``."""

import logging
from typing import Any

from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel

from commpress.errors import InvalidArgument
from commpress.integrations.ddp.hook import CompressedState, compress
from commpress.integrations.ddp.overlap import averages, overlap
from commpress.optim.optimizer import CompressedOptimizer

log = logging.getLogger("commpress")


class Compress(Callback):
    """Momentum if the module's optimizer is one of ours, otherwise gradients by ``codec`` and ``options``.

    Open windows of ``ZeroOneAdam`` are closed before validation and before a checkpoint. A checkpoint holds the optimizer's
    state of rank 0: what compression left behind on other ranks starts from zero when it is loaded.
    """

    def __init__(self, codec: Any = "sign", **options: Any) -> None:
        self.codec, self.options = codec, options
        self.state: CompressedState | CompressedOptimizer | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        ddp, optimizer = trainer.strategy.model, trainer.optimizers[0]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if not isinstance(ddp, DistributedDataParallel):
            raise InvalidArgument(f"the strategy runs a {type(ddp).__name__}, expected Trainer(strategy='ddp')")
        if not averages(optimizer):
            self.state = compress(ddp, self.codec, **dict[str, Any](grad_scaler=scaler) | self.options)
            return
        if trainer.gradient_clip_val:
            raise InvalidArgument(
                f"gradient_clip_val is {trainer.gradient_clip_val}, but gradients are local: pass max_grad_norm to the "
                "optimizer instead"
            )
        self.state = overlap(ddp, optimizer, grad_scaler=scaler)

    def _synchronize(self) -> None:
        if isinstance(self.state, CompressedOptimizer) and hasattr(self.state, "synchronize"):
            self.state.synchronize()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._synchronize()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self._synchronize()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.state is not None and (batch_idx + 1) % trainer.log_every_n_steps == 0:
            counters = self.state.counters
            pl_module.log("commpress/bytes_per_step", counters.wire_bytes / max(counters.steps, 1))
            pl_module.log("commpress/ratio", counters.ratio)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._synchronize()
        if self.state is not None:
            log.info(self.state.counters.summary())
