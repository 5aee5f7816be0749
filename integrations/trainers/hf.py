"""Hugging Face: a Trainer callback and an Accelerate handler.

Trainer(..., callbacks=[Compress(codec="int8")])                     gradients, any optimizer
Trainer(..., callbacks=[Compress(codec="int8", weights="int8")]) both, of FSDP2
Trainer(..., optimizer_cls_and_kwargs=(ZeroOneAdam, {"lr": 1e-4}),
        callbacks=[Compress()])                                      momentum
Trainer(..., callbacks=[LocalTraining()])                            changes of the weights
Trainer(..., callbacks=[DividedExperts()])                           experts of each rank
class MyTrainer(Accumulating, Trainer)                               a streamed model
DistributedCompression(codec="int8").attach(accelerator)             gradients, Accelerate
DistributedCompression(codec="int8",
                       weights="int8").attach(accelerator)           both, of its FSDP2
DistributedCompression().attach(accelerator)                         momentum or changes, with an
                                                                     optimizer of commpress
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from commpress.errors import InvalidArgument, refuse_unknown
from commpress.integrations.ddp.hook import CompressedState
from commpress.integrations.ddp.local import keep_local
from commpress.integrations.ddp.overlap import averages
from commpress.integrations.experts.moe import clip_grad_norm_, experts_of
from commpress.integrations.fsdp.fsdp2 import ShardedState
from commpress.integrations.observe.metrics import NORMS_EVERY, Metrics, Sink, StepMetrics
from commpress.integrations.trainers.compression import (
    REPLICATED,
    SHARDED,
    CodecOption,
    Compression,
    CompressionOptions,
    refuse_shards,
    wrapper_of,
)
from commpress.integrations.trainers.hf_accumulating import Accumulating as Accumulating
from commpress.integrations.trainers.rank_files import (
    Compressor,
    load_experts,
    load_rank,
    place,
    save_experts,
    save_rank,
)
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.optimizer import CompressedOptimizer
from commpress.optim.zero_one_adam import WindowedOptimizer

log = logging.getLogger("commpress")

SUMS = ("steps", "wire_bytes", "encode_seconds", "wire_seconds", "decode_seconds")


class _Beside(TrainerCallback):
    """Base of callbacks that attach in the first forward and add their figures to the Trainer's
    logs."""

    handle: Any = None  # of the hook for the first forward

    @torch.compiler.disable  # sockets, threads and files cannot be traced
    def first_forward(self, model: torch.nn.Module, inputs: Any) -> None:
        """Attach to the wrapper, which is known only during a forward."""
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None:
            self.handle.remove()
            self.attach(ddp)

    def attach(self, ddp: DistributedDataParallel) -> None:
        raise NotImplementedError

    def numbers(self) -> dict[str, float]:
        """Return the figures since the last log; none before it is attached."""
        raise NotImplementedError

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **things: Any
    ) -> None:
        if logs is not None and "loss" in logs:
            numbers = self.numbers()
            logs.update(numbers)
            if state.log_history:
                state.log_history[-1].update(numbers)


class Compress(_Beside):
    """Compress the communication of a Trainer's ranks.

    An optimizer that averages gradients itself (``OneBitAdam`` and similar ones, whole or sharded)
    replaces DDP's averaging; then this callback takes no options, and ``args.max_grad_norm``
    becomes the optimizer's (pass 0 there to overlap rounds with backward). With any other optimizer
    gradients are compressed by ``codec`` ("fp8" by default) and ``options``, those of
    ``commpress.compress``.

    If the Trainer shards the model by FSDP2 (``fsdp=True`` of its arguments), ``options`` are those
    of ``commpress.compress_fsdp``. With a ``codec``, which is for gradients, ``weights`` must be
    given, too; ``Compress()`` sends gradients in fp8, weights in int8.

    Checkpoints get one file per rank, ``commpress-<rank>.pt``. ``resume_from_checkpoint`` finds it,
    also on another number of ranks if the files of all are present. Logs get the bytes sent per
    step, their ratio to float32, milliseconds of encoding, waiting and decoding, and the relative
    size of residuals. ``metrics`` are sinks of ``commpress.Metrics``, which get every step's
    figures.
    """

    def __init__(
        self,
        codec: CodecOption = None,
        *,
        metrics: Sequence[Sink] = (),
        **options: Unpack[CompressionOptions],
    ) -> None:
        self.compression, self.sinks = Compression("Compress", codec, options), metrics
        self.state: CompressedState | CompressedOptimizer | ShardedState | None = None
        self._optimizer: CompressedOptimizer | None = None
        self._resume: Path | None = None
        self._attached: weakref.ref[torch.nn.Module] | None = None  # the model
        self._clip: float | None = None
        self._scaler: torch.amp.GradScaler | None = None
        self._metrics: Metrics | None = None
        self._since: Counter[str] = Counter()  # sums since the last log
        self._experts = DividedExperts()

    # ------------------------------------------------------------ attaching

    def on_train_begin(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        optimizer, several = bare(things), place()[1] > 1
        self._scaler = getattr(things["optimizer"], "scaler", None)
        self._resume = _resumed(args, state) if state.global_step else None
        self._optimizer = optimizer if averages(optimizer) else None
        if isinstance(optimizer, CompressedOptimizer):
            optimizer.grad_scaler = self._scaler
            if self._resume is not None:
                self._load(optimizer)
        wrapper = wrapper_of(things["model"])
        if wrapper == SHARDED:
            self._shard(things["model"], optimizer)
        elif several:
            self._check(optimizer, wrapper)
        if self._optimizer is not None and args.max_grad_norm and several:
            self._clip, self._optimizer.max_grad_norm = args.max_grad_norm, args.max_grad_norm
            # gradients are local: the Trainer would clip each rank by another factor
            args.max_grad_norm = 0
        self._experts.on_train_begin(args, state, control, **things)
        if not several:
            log.warning("there is only one rank: nothing is compressed")
        elif wrapper != SHARDED:
            self.handle = things["model"].register_forward_pre_hook(self.first_forward)

    def _check(self, optimizer: Any, wrapper: str) -> None:
        """Check the optimizer and the Trainer's wrapper before the first step."""
        if isinstance(optimizer, LocalUpdates):
            raise InvalidArgument(
                "the optimizer is LocalUpdates: pass its inner optimizer to the Trainer, and "
                "LocalTraining(...) with its options in place of Compress"
            )
        if wrapper or self.compression.for_shards:
            self.compression.check(wrapper or REPLICATED)
        self.compression.check_optimizer(optimizer)

    def _shard(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Attach to FSDP2, after the model's weights were loaded from a checkpoint."""
        # another train(): a Trainer keeps its model
        again = self._attached is not None and self._attached() is model
        if not again or not isinstance(self.state, ShardedState):
            self.state, self._attached = (
                self.compression.shard(model, self._scaler, optimizer),
                weakref.ref(model),
            )
        self.state.forget_weights()
        self._go_on(self.state)

    def _go_on(self, state: Compressor) -> None:
        """Load the state from a checkpoint if there is one, and begin to record metrics."""
        if self._resume is not None and not isinstance(state, CompressedOptimizer):
            self._load(state)
        self._metrics = Metrics(
            state, to=[self._add, *self.sinks], norms_every=NORMS_EVERY if self.sinks else 0
        )

    def _load(self, into: Compressor) -> None:
        assert self._resume is not None
        load_rank(into, self._resume)

    def attach(self, ddp: DistributedDataParallel) -> None:
        # another train(): a Trainer keeps its DDP model
        again = self._attached is not None and self._attached() is ddp
        self._attached = weakref.ref(ddp)
        if self._optimizer is not None or not again or not isinstance(self.state, CompressedState):
            joined = self.compression.join(ddp, self._optimizer, self._scaler)
            assert not isinstance(joined, LocalUpdates)  # refused when training began
            self.state = joined
        self._go_on(self.state)

    def _add(self, sample: StepMetrics) -> None:
        self._since.update({name: getattr(sample, name) for name in SUMS})

    # ------------------------------------------------------------ while training

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        self._experts.on_pre_optimizer_step(args, state, control, **things)

    def on_step_end(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        """Close a window before saving or evaluating."""
        if self.handle is not None and self.state is None:
            self.compression.check("")
        if self._metrics is not None:
            self._metrics.step()
        if isinstance(self._optimizer, WindowedOptimizer) and (
            control.should_save or control.should_evaluate
        ):
            self._optimizer.synchronize()

    def on_save(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        self._experts.on_save(args, state, control, **things)
        if isinstance(self._optimizer, CompressedOptimizer):
            save_rank(self._optimizer, _folder(args, state))
        elif isinstance(self.state, CompressedState | ShardedState):
            save_rank(self.state, _folder(args, state))

    def numbers(self) -> dict[str, float]:
        if self.state is None:
            return {}
        counters = self.state.counters
        steps = max(self._since["steps"], 1)
        numbers = {
            "commpress/bytes_per_step": self._since["wire_bytes"] / steps,
            "commpress/ratio": round(counters.ratio, 3),
        }
        for part in ("encode", "wire", "decode"):
            numbers[f"commpress/{part}_ms"] = 1e3 * self._since[f"{part}_seconds"] / steps
        self._since.clear()
        if isinstance(self.state, CompressedOptimizer):
            numbers["commpress/residual"] = self.state.relative_residual()
        elif self.state.counters.errors:
            errors = self.state.counters.errors.values()
            numbers["commpress/error"] = sum(errors) / len(errors)
        return numbers

    def on_train_end(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        if isinstance(self._optimizer, WindowedOptimizer):
            self._optimizer.synchronize()
        self._experts.on_train_end(args, state, control, **things)
        if self._clip is not None:
            args.max_grad_norm = self._clip
        if isinstance(self.state, ShardedState) and args.load_best_model_at_end:
            self.state.forget_weights()  # the last sent ones are others than the best
        if self.state is not None and state.is_world_process_zero:
            log.info(self.state.counters.summary())


class DividedExperts(TrainerCallback):
    """Save and load the experts of each rank of a Trainer, and clip all ranks by one factor.

    It serves models divided by ``commpress.moe.parallelise``, with an optimizer of torch;
    ``Compress`` does the same. A Trainer saves only the model and the optimizer of rank 0, and
    clips each rank by its own norm. This callback adds ``experts-<rank>.pt``, which
    ``resume_from_checkpoint`` finds on the same number of ranks.
    """

    def __init__(self) -> None:
        self._clip: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        if not experts_of(things["model"]):
            return
        if args.max_grad_norm:
            self._clip, args.max_grad_norm = args.max_grad_norm, 0
        if state.global_step:
            load_experts(things["model"], bare(things), _resumed(args, state))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        if self._clip is not None:
            scaler = getattr(things["optimizer"], "scaler", None)
            if scaler is not None:
                scaler.unscale_(bare(things))
            clip_grad_norm_(things["model"].parameters(), self._clip)

    def on_save(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        save_experts(things["model"], bare(things), _folder(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        if self._clip is not None:
            args.max_grad_norm, self._clip = self._clip, None


class LocalTraining(_Beside):
    """Train each rank of a Trainer independently, with an exchange of changes once a round:
    ``options`` are those of ``LocalUpdates``.

    Before an evaluation or a checkpoint all ranks exchange pending changes, so that the shared
    weights are evaluated and saved. Checkpoints get one file per rank, ``commpress-<rank>.pt``,
    with its inner optimizer and residuals; with the files of all ranks a run can resume on another
    number of ranks.

    ``tokens`` counts the tokens of a batch, with the model's arguments, for ``weight="tokens"``; by
    default labels that are not −100, or attended tokens for a model without labels. ``metrics``: as
    in ``Compress``.
    """

    def __init__(
        self,
        *,
        every: Any = "auto",
        tokens: Callable[[Mapping[str, Any]], int] | None = None,
        metrics: Sequence[Callable[[dict[str, float]], None]] = (),
        **options: Any,
    ) -> None:
        refuse_unknown("LocalTraining", options, LocalUpdates)
        self.options, self.sinks, self.tokens = (
            {"every": every, **options},
            metrics,
            tokens or tokens_of,
        )
        self.local: LocalUpdates | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._counts: Any = None  # handle of the hook that counts tokens
        self._resume: Path | None = None
        self._sent, self._counted = 0, 0  # bytes up to the last log; tokens since the last step

    def on_train_begin(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        self._optimizer = bare(things)
        if averages(self._optimizer):
            raise InvalidArgument(
                f"the optimizer is {type(self._optimizer).__name__}, which averages over the ranks "
                "in its steps: take another for local updates, such as AdamW"
            )
        refuse_shards("LocalTraining", things["model"])
        self._resume = _resumed(args, state) if state.global_step else None
        if self._resume is not None:
            load_experts(things["model"], self._optimizer, self._resume)
        if place()[1] == 1:  # with a wrapper, under a launcher, or without
            self._begin()
        if dist.is_initialized():
            self.handle = things["model"].register_forward_pre_hook(self.first_forward)
        if self.options.get("weight") == "tokens":
            self._counts = things["model"].register_forward_pre_hook(self._count, with_kwargs=True)

    @torch.compiler.disable
    def _count(self, model: torch.nn.Module, inputs: Any, batch: Mapping[str, Any]) -> None:
        if model.training:
            self._counted += self.tokens(batch)

    def attach(self, ddp: DistributedDataParallel) -> None:
        keep_local(ddp)
        if place()[1] > 1:
            self._begin()

    def _begin(self) -> None:
        assert self._optimizer is not None
        if self.local is not None:  # of another train(), before which weights may have changed
            self.local.close()
            self._sent = 0
        self.local = LocalUpdates(self._optimizer, **self.options)
        if self._resume is not None:
            load_rank(self.local, self._resume)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        if self.local is not None:
            self.local.synchronize()

    def on_step_end(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        if self.local is None:
            raise InvalidArgument(
                "the model was not run by DistributedDataParallel: leave FSDP and DeepSpeed off"
            )
        tokens, self._counted = self._counted, 0
        self.local.after_step(tokens=tokens)
        self._settle(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        self._settle(control)

    def _settle(self, control: Any) -> None:
        if self.local is not None and (control.should_save or control.should_evaluate):
            self.local.drain()

    def on_save(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        if self.local is not None and dist.is_initialized():
            save_rank(self.local, _folder(args, state))
            save_experts(things["model"], bare(things), _folder(args, state))

    def numbers(self) -> dict[str, float]:
        if self.local is None:
            return {}
        counters = self.local.counters
        numbers = {
            "commpress/rounds": counters.rounds,
            "commpress/sent_mb": (counters.sent_bytes - self._sent) / 1e6,
            "commpress/waited": counters.waited,
        }
        if counters.spread is not None:
            numbers["commpress/spread"] = counters.spread
        self._sent = counters.sent_bytes
        for sink in self.sinks:
            sink(numbers)
        return numbers

    def on_train_end(self, args: Any, state: Any, control: Any, **things: Any) -> None:
        if self._counts is not None:
            self._counts.remove()
        if self.local is not None:
            self.local.drain()
            if state.is_world_process_zero:
                log.info(self.local.report())


def tokens_of(batch: Mapping[str, Any]) -> int:
    """Count the tokens of a batch: those with a label, or without labels the attended ones."""
    labels, attended, words = (
        batch.get(name) for name in ("labels", "attention_mask", "input_ids")
    )
    if torch.is_tensor(labels) and not labels.is_floating_point():
        return int((labels != -100).sum())
    if torch.is_tensor(attended) and attended.dim() == 2:
        return int((attended != 0).sum())
    if torch.is_tensor(words):
        return words.numel()
    raise InvalidArgument(
        f"weight is 'tokens', but the model is called with {sorted(batch)}, without labels or "
        "input_ids: pass LocalTraining(tokens=...), a function that counts the tokens of a batch, "
        "or weight='steps'"
    )


def report_first(trainer: Any) -> None:
    """Move commpress's callbacks before reporters such as TensorBoard, so that these log its
    figures."""
    trainer.callback_handler.callbacks.sort(
        key=lambda callback: not isinstance(callback, Compress | LocalTraining)
    )


def _folder(args: Any, state: Any) -> Path:
    """Return the checkpoint of this step, as the Trainer names it."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _resumed(args: Any, state: Any) -> Path:
    """Return the checkpoint that a run resumes from: the one named in the arguments, if it is of
    this step."""
    given, own = args.resume_from_checkpoint, _folder(args, state)
    file = Path(given) / TRAINER_STATE_NAME if isinstance(given, str) else own
    if file.is_file() and TrainerState.load_from_json(str(file)).global_step == state.global_step:
        return file.parent
    return own


def bare(things: dict[str, Any]) -> Any:
    """Return the optimizer of a Trainer's callback, without accelerate's wrapper."""
    return getattr(things["optimizer"], "optimizer", things["optimizer"])


class RankFiles:
    """Add each rank's state of a compressed optimizer to Accelerate's ``save_state`` and
    ``load_state``.

    Call ``RankFiles(optimizer).attach(accelerator)`` once, before either, also for
    ``LocalUpdates``. Accelerate saves only the optimizer of rank 0; this adds
    ``commpress-<rank>.pt`` beside it, and ``load_state`` works on another number of ranks, too.
    Saving closes windows of 0/1 Adam and rounds of local updates.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer: CompressedOptimizer | LocalUpdates = getattr(
            optimizer, "optimizer", optimizer
        )
        self._folder = Path()

    def attach(self, accelerator: Any) -> "RankFiles":
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._look)
        # registered objects are loaded after the optimizers
        accelerator.register_for_checkpointing(self)
        return self

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        if isinstance(self.optimizer, LocalUpdates):
            self.optimizer.drain()  # one file has the weights of all ranks
        elif isinstance(self.optimizer, WindowedOptimizer):
            self.optimizer.synchronize()  # one file has the momentum of all ranks
        save_rank(self.optimizer, Path(folder))

    def _look(self, models: Any, folder: str) -> None:
        self._folder = Path(folder)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, nothing: dict[str, Any]) -> None:
        load_rank(self.optimizer, self._folder)


class DistributedCompression(DistributedDataParallelKwargs):
    """Compress the communication of Accelerate: call
    ``DistributedCompression(codec="int8").attach(accelerator)`` before ``prepare``.

    The optimizer that is prepared with the model decides. With an optimizer of torch, gradients are
    compressed by ``codec`` ("fp8" by default) and options of ``compress``, or, if Accelerate
    shards by FSDP2, gradients and weights by ``codec``, ``weights`` and options of
    ``compress_fsdp``. ``OneBitAdam`` and similar ones, whole or sharded, and ``LocalUpdates``
    compress their own messages, and DDP averages nothing; then there are no options here. ``ddp``:
    arguments of DDP. ``state``: the object that compresses, after ``prepare``.
    """

    def __init__(
        self,
        codec: CodecOption = None,
        *,
        ddp: dict[str, Any] | None = None,
        **options: Unpack[CompressionOptions],
    ) -> None:
        self.compression = Compression("DistributedCompression", codec, options)
        if ddp is not None and self.compression.for_shards:
            raise InvalidArgument(
                f"DistributedCompression got {self.compression.for_shards}=, an option for shards "
                f"of FSDP2, and ddp={ddp!r}, for DistributedDataParallel: leave one of them out"
            )
        super().__init__(**(ddp or {}))
        self.state: Compressor | None = None
        self._accelerator: Any = None
        self._model: torch.nn.Module | None = None  # wrapped or sharded by Accelerate
        self._handle: Any = None

    def attach(self, accelerator: Any) -> "DistributedCompression":
        """Attach to an accelerator, which would not take this object among ``kwargs_handlers``.

        ``accelerator.save_state`` writes a file per rank, ``commpress-<rank>.pt``, and
        ``load_state`` after ``prepare`` reads it, also on another number of ranks.
        """
        if accelerator._models or accelerator._optimizers:
            raise InvalidArgument(
                "accelerator.prepare was called already: call attach(accelerator) before it"
            )
        accelerator.ddp_handler, self._accelerator = self, accelerator
        accelerator.prepare = self._preparing(accelerator.prepare)
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)
        return self

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Remember the wrapped model; Accelerate calls this. The optimizer is known only after
        ``prepare``, if there is one."""
        self._serve(model)
        self._handle = model.register_forward_pre_hook(self._without_optimizer)

    @torch.compiler.disable
    def _without_optimizer(self, model: torch.nn.Module, inputs: Any) -> None:
        self._join(None)

    def _preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``prepare`` to find a model sharded by FSDP2, for which Accelerate calls no hook."""

        @wraps(prepare)
        def prepared(*things: Any, **options: Any) -> Any:
            made = prepare(*things, **options)
            every = made if isinstance(made, tuple | list) else (made,)
            for model in (each for each in every if isinstance(each, torch.nn.Module)):
                wrapper = wrapper_of(getattr(model, "_orig_mod", model))
                if wrapper == SHARDED:
                    self._serve(model)
                # a model without gradients has no wrapper
                elif wrapper and self._accelerator.num_processes > 1:
                    self.compression.check(wrapper)
            optimizers = [each for each in every if isinstance(each, torch.optim.Optimizer)]
            if optimizers:
                inner = [getattr(each, "optimizer", each) for each in optimizers]
                self._join(self.compression.one_of(inner))
            return made

        return prepared

    def _serve(self, model: torch.nn.Module) -> None:
        if self._model is not None and self._model is not model:
            raise InvalidArgument(
                f"a second model was prepared, a {type(model).__name__}, but one "
                "DistributedCompression serves one model: call commpress.compress or compress_fsdp "
                "for each of them, or make an Accelerator with a DistributedCompression for each"
            )
        self._model = model

    def _join(self, optimizer: Any) -> None:
        """Attach once the model and its optimizer are known."""
        if self._model is None or self.state is not None:
            return
        scaler = getattr(self._accelerator, "scaler", None)
        if isinstance(self._model, DistributedDataParallel):
            self._handle.remove()
            self.state = self.compression.join(self._model, optimizer, scaler)
        else:
            self.state = self.compression.shard(self._model, scaler, optimizer)
        if isinstance(self.state, CompressedOptimizer | LocalUpdates):
            RankFiles(self.state).attach(self._accelerator)

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        if isinstance(self.state, CompressedState | ShardedState):
            save_rank(self.state, Path(folder))

    def _load(self, models: Any, folder: str) -> None:
        self._join(None)
        if isinstance(self.state, CompressedState | ShardedState):
            load_rank(self.state, Path(folder))

    def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments of DDP, without our own objects, which cannot be copied."""
        named = {
            each.name: getattr(self, each.name) for each in fields(DistributedDataParallelKwargs)
        }
        return DistributedDataParallelKwargs(**named).to_dict(*args, **kwargs)
