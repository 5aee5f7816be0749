"""Lightning: callbacks for ``Trainer(strategy="ddp", ...)``, for ``ModelParallelStrategy``, and for
Fabric.

callbacks=[Compress(codec="int8")]                              gradients or momentum, at every step
callbacks=[Compress(codec="int8", weights="int8")]          both, of FSDP2
                                                                (ModelParallelStrategy)
callbacks=[LocalTraining()]                                     changes of the weights, while the
                                                                next round is computed
"""

import logging
from collections.abc import Callable
from typing import Any, Unpack

import torch.distributed as dist
from lightning.pytorch import Callback
from torch.nn.parallel import DistributedDataParallel

from commpress.errors import InvalidArgument, refuse_unknown
from commpress.integrations.ddp.hook import CompressedState
from commpress.integrations.ddp.local import keep_local
from commpress.integrations.ddp.overlap import averages
from commpress.integrations.fsdp.fsdp2 import ShardedState
from commpress.integrations.trainers.compression import (
    SHARDED,
    CodecOption,
    Compression,
    CompressionOptions,
    refuse_shards,
    wrapper_of,
)
from commpress.integrations.trainers.rank_files import gathered_on_first, part_of, take_parts
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.optimizer import CompressedOptimizer
from commpress.optim.zero_one_adam import WindowedOptimizer

log = logging.getLogger("commpress")


def _logs(trainer: Any, batch_idx: int) -> bool:
    every: int = trainer.log_every_n_steps  # 0: never
    return every > 0 and (batch_idx + 1) % every == 0


class _Agreeing(Callback):
    """Base of callbacks that synchronize ranks before a validation or a checkpoint."""

    def agree(self) -> None:
        raise NotImplementedError

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.agree()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.agree()


class Compress(_Agreeing):
    """Compress gradients by ``codec`` ("fp8" by default) and ``options``, those of
    ``commpress.compress``, or momentum if the module's optimizer is one of commpress.

    If ``ModelParallelStrategy`` shards the module by FSDP2, gradients and weights are compressed:
    ``options`` are then those of ``commpress.compress_fsdp``, and with a ``codec``, which is for
    gradients, ``weights`` must be given, too.

    In ``Fabric(callbacks=[...])`` it attaches when ``setup`` has wrapped the model. Save it with
    the model, ``fabric.save(path, {"model": model, "optimizer": optimizer, "compression":
    callback})``, and load it by ``callback.load_state_dict(fabric.load(path, {"model": model,
    "optimizer": optimizer})["compression"])``, because Fabric itself does not load it from a
    checkpoint that is a folder.

    Open windows of 0/1 Adam are closed before validation, at the end of an epoch and before a
    checkpoint; a checkpoint of weights only in the middle of an epoch is that of rank 0.

    A checkpoint, which Lightning saves as one file, has the residuals of every rank: a run resumes
    bit for bit, and on another number of ranks with their mean. They take at least 4 bytes per
    parameter and rank. With ``elastic`` it has only the mean, 4 bytes per parameter, and a run on
    the same number of ranks does not resume bit for bit.
    """

    def __init__(
        self,
        codec: CodecOption = None,
        *,
        elastic: bool = False,
        **options: Unpack[CompressionOptions],
    ) -> None:
        self.compression, self.elastic = Compression("Compress", codec, options), elastic
        self.state: CompressedState | CompressedOptimizer | ShardedState | None = None
        self._saved: list[dict[str, Any]] = []  # of every rank that saved
        self._in_fabric = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, after weights and optimizer were loaded from a checkpoint."""
        ddp, optimizer = trainer.strategy.model, self.compression.one_of(trainer.optimizers)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        saved, self._saved = self._saved, []
        if isinstance(optimizer, LocalUpdates):
            raise InvalidArgument(
                "the module's optimizer is LocalUpdates: return its inner optimizer, and pass "
                "LocalTraining(...) with its options in place of Compress"
            )
        if wrapper_of(ddp) != SHARDED and averages(optimizer):
            self.compression.check_optimizer(optimizer)
            if trainer.gradient_clip_val:
                raise InvalidArgument(
                    f"gradient_clip_val is {trainer.gradient_clip_val}, but gradients are local: "
                    "pass max_grad_norm to the optimizer instead"
                )
        self._attach(ddp, scaler, optimizer)
        self._load(saved)

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Attach in Fabric to the first model that it sets up."""
        if self.state is not None:
            raise InvalidArgument(
                f"Fabric has set up a second model, a {type(module).__name__}, but Compress serves "
                "only one: call commpress.compress or compress_fsdp for each of them, without this "
                "callback"
            )
        self._in_fabric = True
        inner = getattr(module, "_forward_module", module)
        self._attach(
            getattr(inner, "_orig_mod", inner),
            getattr(fabric.strategy.precision, "scaler", None),
            None,
        )

    def _attach(self, model: Any, scaler: Any, optimizer: Any) -> None:
        if wrapper_of(model) == SHARDED:
            self.state = self.compression.shard(model, scaler, optimizer)
        else:
            joined = self.compression.join(model, optimizer, scaler)
            assert not isinstance(joined, LocalUpdates)  # refused before
            self.state = joined

    def _load(self, saved: list[dict[str, Any]]) -> None:
        """Load the parts of all ranks of the saved run."""
        if isinstance(self.state, ShardedState):
            same = len(saved) == dist.get_world_size() and saved[0].get("kind") == "exact"
            saved = saved[dist.get_rank() :][:1] if same else saved
        if self.state is not None:
            take_parts(self.state, saved)

    def agree(self) -> None:
        if isinstance(self.state, WindowedOptimizer):
            self.state.synchronize()

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0; collective. Lightning calls the optimizer's
        state_dict after this one."""
        self.agree()
        if self.state is None:
            return {}
        if not self.elastic:
            return {"ranks": gathered_on_first(part_of(self.state))}
        if isinstance(self.state, ShardedState):
            return {"ranks": self._owed_whole(self.state)}
        part = self.state.elastic_state_dict()
        if isinstance(self.state, CompressedOptimizer):
            part = {"commpress": part["commpress"]}  # Lightning saves the rest
        return {"ranks": gathered_on_first(part)}

    def _owed_whole(self, state: ShardedState) -> list[dict[str, Any]]:
        """Return the mean residual as whole tensors on rank 0; nothing elsewhere."""
        owed = state.elastic_state_dict()
        whole = {name: residual.full_tensor() for name, residual in owed["residuals"].items()}
        return [owed | {"residuals": whole}] if dist.get_rank() == 0 else []

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("ranks", [])
        if self._in_fabric:
            self._load(self._saved)

    # ------------------------------------------------------------ logs

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.state is not None and _logs(trainer, batch_idx):
            counters = self.state.counters
            pl_module.log("commpress/bytes_per_step", counters.wire_bytes / max(counters.steps, 1))
            pl_module.log("commpress/ratio", counters.ratio)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.agree()
        if self.state is not None:
            log.info(self.state.counters.summary())


class LocalTraining(_Agreeing):
    """Train each rank independently, with an exchange of changes once a round: ``options`` are
    those of ``LocalUpdates``.

    The module keeps its optimizers, as for one process; ``strategy="ddp"`` starts the ranks and
    averages nothing. Before a validation or a checkpoint, and at the end of an epoch and of
    training, all ranks exchange pending changes, so that the shared weights are evaluated and
    saved. A checkpoint of weights only in the middle of an epoch is that of rank 0.

    A checkpoint has the state of every rank, so that a run resumes bit for bit: the shared weights,
    the outer step's state, residuals and inner optimizer of each rank, at least 12 bytes per
    parameter and rank. On another number of ranks a run resumes with the mean of the residuals.

    ``tokens`` counts the tokens of a batch, for ``weight="tokens"``.
    """

    def __init__(
        self, *, every: Any = "auto", tokens: Callable[[Any], int] | None = None, **options: Any
    ) -> None:
        refuse_unknown("LocalTraining", options, LocalUpdates)
        if options.get("weight") == "tokens" and tokens is None:
            raise InvalidArgument(
                "weight is 'tokens' and tokens is None, expected a function that counts the tokens "
                "of a batch"
            )
        self.options, self.tokens = {"every": every, **options}, tokens
        self.local: LocalUpdates | None = None
        self._saved: list[dict[str, Any]] = []  # of every rank that saved
        self._steps, self._counted = 0, 0  # steps of the trainer; tokens since the last one

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, after weights and optimizers were loaded from a checkpoint."""
        model = trainer.strategy.model
        refuse_shards("LocalTraining", model)
        if isinstance(model, DistributedDataParallel):
            keep_local(model)
        elif trainer.world_size > 1:
            raise InvalidArgument(
                f"the strategy runs a {type(model).__name__}, expected Trainer(strategy='ddp')"
            )
        if not pl_module.automatic_optimization:
            raise InvalidArgument(
                "the module uses manual optimization: let it step commpress.LocalUpdates, without "
                "this callback"
            )
        for optimizer in trainer.optimizers:
            if averages(optimizer):
                raise InvalidArgument(
                    f"an optimizer is {type(optimizer).__name__}, which averages over the ranks in "
                    "its steps: take another for local updates, such as AdamW"
                )
        if self.local is not None:  # of another fit()
            self.local.close()
        self.local = LocalUpdates(trainer.optimizers, **self.options)
        saved, self._saved = self._saved, []
        if saved:
            self.local.load_state_dict(*saved)
        self._steps = trainer.global_step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Average gradients during the warm-up, before they are clipped."""
        if self.local is not None and self.local.warms_up:
            self.local.synchronize()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.local is not None
        self._counted += self.tokens(batch) if self.tokens is not None else 1
        if trainer.global_step == self._steps:  # gradients are still being accumulated
            return
        self.local.after_step(tokens=self._counted)
        self._steps, self._counted = trainer.global_step, 0
        if _logs(trainer, batch_idx):
            counters = self.local.counters
            pl_module.log("commpress/rounds", float(counters.rounds))
            pl_module.log("commpress/sent_mb", counters.sent_bytes / 1e6)
            if counters.spread is not None:
                pl_module.log("commpress/spread", counters.spread)

    def agree(self) -> None:
        if self.local is not None and self.local.pending:
            self.local.drain()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.agree()
        if self.local is not None and trainer.is_global_zero:
            log.info(self.local.report())

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks on rank 0; collective. Lightning calls the optimizers'
        state_dict after this one."""
        if self.local is None:
            return {}
        self.agree()
        own = self.local.state_dict()
        return {"ranks": gathered_on_first(own) if self.local.channel.size > 1 else [own]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict.get("ranks", [])
