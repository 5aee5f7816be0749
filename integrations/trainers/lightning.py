"""Lightning: a callback for ``Trainer(strategy="ddp", callbacks=[Compress()])``."""

import logging
from typing import Any

from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel

from commpress.errors import InvalidArgument
from commpress.integrations.ddp.hook import CompressedState, compress
from commpress.integrations.ddp.overlap import averages, overlap
from commpress.integrations.trainers.rank_files import gathered_on_first
from commpress.optim.optimizer import CompressedOptimizer
from commpress.optim.windows import WindowedOptimizer

log = logging.getLogger("commpress")


class Compress(Callback):
    """Momentum if the module's optimizer is one of ours, otherwise gradients by ``codec`` and ``options``.

    Open windows of 0/1 Adam are closed before validation, at the end of an epoch and before a checkpoint; one of weights only
    in the middle of an epoch is that of rank 0.

    A checkpoint, which Lightning saves as one file, holds what compression left behind on every rank: a run goes on bit for
    bit, and on another number of ranks with the mean. That is 4 bytes and more per parameter and rank. With ``elastic`` it
    holds the mean alone, 4 bytes per parameter, from which as many ranks do not go on bit for bit.
    """

    def __init__(self, codec: Any = "sign", *, elastic: bool = False, **options: Any) -> None:
        self.codec, self.elastic, self.options = codec, elastic, options
        self.state: CompressedState | CompressedOptimizer | None = None
        self._saved: list[dict[str, Any]] = []  # of every rank that saved

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach; weights and optimizer are those of the checkpoint by now, if there is one."""
        ddp, optimizer = trainer.strategy.model, trainer.optimizers[0]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        saved, self._saved = self._saved, []
        if not isinstance(ddp, DistributedDataParallel):
            raise InvalidArgument(f"the strategy runs a {type(ddp).__name__}, expected Trainer(strategy='ddp')")
        if not averages(optimizer):
            self.state = compress(ddp, self.codec, **dict[str, Any](grad_scaler=scaler) | self.options)
            if saved:
                self.state.load_state_dict(*saved)
            return
        if trainer.gradient_clip_val:
            raise InvalidArgument(
                f"gradient_clip_val is {trainer.gradient_clip_val}, but gradients are local: pass max_grad_norm to the "
                "optimizer instead"
            )
        self.state = overlap(ddp, optimizer, grad_scaler=scaler)
        if saved:
            self.state.load_rank_state(*saved)

    def _synchronize(self) -> None:
        if isinstance(self.state, WindowedOptimizer):
            self.state.synchronize()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._synchronize()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._synchronize()

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that ranks have apart from each other, on rank 0; collective. Lightning asks the optimizer after this."""
        self._synchronize()
        if self.state is None:
            return {}
        own = self.state.elastic_state_dict() if self.elastic else self.state.state_dict()
        part = own["commpress"] if isinstance(self.state, CompressedOptimizer) else own
        return {"ranks": gathered_on_first(part)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("ranks", [])

    # ------------------------------------------------------------ logs

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.state is not None and (batch_idx + 1) % trainer.log_every_n_steps == 0:
            counters = self.state.counters
            pl_module.log("commpress/bytes_per_step", counters.wire_bytes / max(counters.steps, 1))
            pl_module.log("commpress/ratio", counters.ratio)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._synchronize()
        if self.state is not None:
            log.info(self.state.counters.summary())
