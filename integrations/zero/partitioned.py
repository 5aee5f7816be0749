"""ZeRO stages 1 and 2: every rank has the optimizer's state, and in stage 2 the gradients, of 1/P
of the parameters.

    backward  bucket full → send its rows to their owners, which average them  (reduce-scatter)
    step      agree on clip factor and finiteness; update this rank's shards
              send updated shards to all ranks                                 (all-gather)

Both collectives may be compressed.
"""

import math
import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np
import torch

from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.allreduce import Call, Workspace
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.handover import Divided
from commpress.collectives.reduce_scatter import gather_rows
from commpress.collectives.residual_state import exact_state, residuals_of
from commpress.collectives.transports.factory import (
    AgreeOver,
    DeviceMesh,
    consensus_over,
    on_reform,
)
from commpress.errors import InvalidArgument, Mismatch, NonFiniteGradient
from commpress.integrations.zero.bucket import (
    OwnedRange,
    ShardedBucket,
    buckets,
    bytes_of,
    reduction_bytes,
)
from commpress.integrations.zero.elementwise import check_elementwise
from commpress.integrations.zero.gradients import Gradients
from commpress.integrations.zero.offloaded import OF_STORE, Offloaded
from commpress.integrations.zero.stored_state import PartitionedState, like_saved, numbers_of
from commpress.integrations.zero.wrapper import (
    Wrapper,
    agreed,
    clip_factor,
    of_every_rank,
    probe,
    trainable,
)
from commpress.optim.checkpoint import check_groups, options_of, take_groups
from commpress.optim.layout import LocalWeights, columns_over, groups_on, is_cut, refuse_held
from commpress.tiered_mem import TieredStore
from commpress.torch_private import untraced
from commpress.work import Steps, run

UNORDERED_LIMIT = 2  # buckets reduced at once where messages are matched by tag


class Partitioned(Divided, Wrapper):
    """Divide the state of an optimizer over the ranks: ``Partitioned(model.parameters(),
    torch.optim.AdamW, lr=1e-3)``.

    Construct it on every rank, after moving the model to its device and dtype and with equal
    weights on all ranks. Do not wrap the model in DistributedDataParallel, because this optimizer
    averages gradients itself. Options not listed below are passed to ``optimizer``.

    - ``optimizer``: any element-wise optimizer; its state is kept in float32.
    - ``stage``: 1 keeps a rank's full gradients in ``parameter.grad``; 2 frees them as buckets are
      reduced, so that ``parameter.grad`` is None after backward and ``step`` consumes the
      gradients.
    - ``codec``, ``weights``: codecs (or policies) of gradients and of weights. Compressed gradients
      have error feedback; weights are sent as differences from the values that all ranks have, so
      that a difference includes the error of the previous one. PowerSGD serves gradients only.
    - ``min_numel``: tensors of fewer elements are sent exactly.
    - ``bucket_mb``: megabytes of parameters that are sent together.
    - ``store``: a TieredStore of this rank for its masters and moments. ``prefix``, ``chunk_mb``,
      ``commit_every``, ``resident`` and ``moments`` are then options of ``Offloaded``. Training
      continues from a committed state in the store.
    - ``grad_scaler``: AMP's GradScaler, if one is used; gradients are unscaled during the
      reduction.
    - ``on_nonfinite``: "skip" (default) leaves out the step on all ranks if some rank has NaN or
      infinity, "raise" raises.
    - ``max_grad_norm``: clip to this global norm in ``step``. Or call ``clip_grad_norm_`` before.
    - ``process_group``: ranks that average gradients and divide the state.
    - ``mesh``: the whole mesh, if parameters are DTensors of tensor parallelism. Ranks with equal
      shards average gradients and divide the state; all ranks skip steps together and clip to the
      norm of all gradients. Or pass both groups: ``process_group``, and as ``agree_over`` a process
      group or DeviceMesh of all ranks that must skip steps together.
    """

    averages_gradients = True  # during backward, so nothing else may
    _step_supports_amp_scaling = True  # a GradScaler leaves unscaling to this class
    where = " on some rank"

    def __init__(
        self,
        params: Any,
        optimizer: type[torch.optim.Optimizer],
        *,
        stage: Literal[1, 2] = 2,
        codec: str | Codec | Policy = "none",
        weights: str | Codec | Policy = "none",
        min_numel: int = 256,
        bucket_mb: float = 25.0,
        max_grad_norm: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        store: TieredStore | None = None,
        mesh: DeviceMesh | None = None,
        process_group: Any = None,
        agree_over: AgreeOver | None = None,
        **options: Any,
    ) -> None:
        if stage not in (1, 2):
            raise InvalidArgument(
                f"stage is {stage!r}, expected 1 or 2; for stage 3 use torch's fully_shard"
            )
        if not isinstance(bucket_mb, int | float) or not 0 < bucket_mb < math.inf:
            raise InvalidArgument(f"bucket_mb is {bucket_mb!r}, expected a positive number")
        tiers = {key: options.pop(key) for key in OF_STORE if store is not None and key in options}
        super().__init__(
            params, optimizer, options, max_grad_norm=max_grad_norm, on_nonfinite=on_nonfinite
        )
        places, self._frozen = trainable(self.param_groups)
        named = [(name, parameter) for group in places for parameter, name, _ in group]
        refuse_held("Partitioned", named, "divides what all ranks hold alike")
        device = next(parameter.device for group in places for parameter, _, _ in group)
        check_elementwise(
            optimizer, options, self.param_groups, device=device, in_place=store is not None
        )
        self.stage = stage
        self.grad_scaler = (
            grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        )
        _check_mixture(named, stage, self.grad_scaler)
        parameters = [parameter for _, parameter in named]
        process_group, agree_over = groups_on(mesh, parameters, process_group, agree_over)
        self.columns = columns_over(
            parameters,
            [name for name, _ in named],
            process_group=process_group,
            agree_over=agree_over,
        )
        self.consensus = consensus_over(agree_over, process_group)
        if max_grad_norm is not None:
            self._check_norm("max_grad_norm", max_grad_norm)
        self.channel = Channel.among(
            process_group,
            workspace=Workspace(pooled=True),
            at_once=UNORDERED_LIMIT,
            device=device,
        )
        self.transport = self.channel.transport
        reducing = policy_of(codec, min_numel=min_numel)
        self.exchanges = Exchanges(reducing, self.channel.size, self.channel.workspace)
        self.residuals = self.exchanges.residuals
        self.buckets = buckets(
            places,
            reducing,
            policy_of(weights, min_numel=min_numel),
            rank=self.channel.rank,
            ranks=self.channel.size,
            numel=max(int(bucket_mb * 1e6 / 4), 1),
        )
        for bucket in self.buckets:
            bucket.attach(self.exchanges)
        self.inner: torch.optim.Optimizer
        if store is None:
            self.inner = optimizer(self._shard_groups(), **options)
        else:
            for own in (own for bucket in self.buckets for own in bucket.ranges):
                own.weight.requires_grad_()
            self.inner = Offloaded(self._shard_groups(), optimizer, store=store, **tiers, **options)
            self.inner.averaged = True
        moments, scalars = probe(optimizer, options, self.buckets[0].device)
        self._shards = PartitionedState(
            self.buckets, self.channel, self.inner.state, moments, scalars, self.columns
        )
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            mine.update(options_of(theirs))
        self.gradients = Gradients(
            self.buckets,
            self.channel,
            stage=stage,
            scaler=self.grad_scaler,
            consensus=self.consensus,
        )
        self._built = True
        on_reform(None, self)
        if isinstance(self.inner, Offloaded):
            self._go_on(self.inner)
        self.channel.run(self._compare_replicas())

    @torch.no_grad()
    def _go_on(self, inner: Offloaded) -> None:
        """Continue from the stores, which must have the same step on all ranks."""
        agreed(self._every(float(inner.steps_done)))
        self.steps_done = self.gradients.step = inner.steps_done
        if inner.steps_done:
            self._spread()
            for bucket in self.buckets:
                bucket.trust()

    def commit(self) -> int:
        """Commit the state to the store: a process that is killed afterwards resumes from this
        step. Every rank must call it."""
        if not isinstance(self.inner, Offloaded):
            raise InvalidArgument(
                "commit needs a Partitioned with store=: pass one, or save by state_dict"
            )
        return self.inner.commit()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside add up gradients in ``parameter.grad`` on this rank; the next
        one outside reduces the sum."""
        return self.gradients.no_sync()

    @untraced
    @torch.no_grad()
    def synchronize(self) -> None:
        """Reduce gradients that backwards under ``no_sync`` have added up, as in a pipeline;
        collective. ``step`` does it, too.

        Under a GradScaler call it before ``scaler.step``, which searches for infinity.
        """
        self.gradients.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.gradients.forget(taken=False)

    # ------------------------------------------------------------ one step

    def _step(self) -> None:
        if self.grad_scaler is None and getattr(self, "grad_scale", None) is not None:
            raise InvalidArgument(
                "step was called by a GradScaler: pass it to the constructor as grad_scaler="
            )
        self._check()
        self.gradients.synchronize()
        finite = self.gradients.agreed()
        if finite and self.max_grad_norm is not None:
            finite = bool(torch.isfinite(self.clip_grad_norm_(self.max_grad_norm)))
        if finite:
            self._update()
        self.gradients.forget(taken=finite)
        if not finite:
            self._skip(self.channel.rank)

    @untraced
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip like ``torch.nn.utils.clip_grad_norm_``, over the mean gradients of all ranks, and
        return the norm, summed in double; collective.

        Under a GradScaler the gradients are already unscaled: a call of ``scaler.unscale_`` changes
        nothing.
        """
        if norm_type != 2.0:
            raise InvalidArgument(
                f"norm_type is {norm_type!r}, expected 2.0: only the Euclidean norm is supported"
            )
        self._check_norm("max_norm", max_norm)
        self.gradients.synchronize()
        # without padding
        parts = [
            (own, b.reduced[own.place])
            for b in self.buckets
            if b.reduced is not None
            for own in b.ranges
        ]
        squares = [
            self._share(o) * torch.linalg.vector_norm(part, dtype=torch.float64).square().cpu()
            for o, part in parts
        ]
        mine = float(torch.stack(squares).sum()) if squares else 0.0
        norm = torch.tensor(
            sum(self._every(mine)) ** 0.5, dtype=torch.float32, device=self.buckets[0].device
        )
        factor = clip_factor(max_norm, norm)
        if torch.isfinite(norm):
            for bucket in self.buckets:
                assert bucket.reduced is not None
                bucket.reduced.mul_(factor.to(bucket.device))
        return norm

    def _share(self, own: OwnedRange) -> float:
        """Return this rank's factor in a sum over all ranks, such that replicated elements count
        once."""
        return 1.0 if self.columns is None else self.columns.share(own.member.parameter)

    def _check_norm(self, name: str, limit: float) -> None:
        if not limit > 0:
            raise InvalidArgument(f"{name} is {limit!r}, expected a positive number")
        if self.consensus is not None and self.columns is None:
            raise InvalidArgument(
                f"{name} is {limit!r} and agree_over is given, but no parameter is a DTensor, from "
                "which a norm over these ranks could be computed: leave it out"
            )

    def _every(self, value: float) -> list[float]:
        """Return the values of all ranks."""
        if self.consensus is not None:
            return [float(one) for one in run(self.consensus.gathered([value]))[:, 0]]
        return of_every_rank(self.channel, [value])

    def _update(self) -> None:
        for mine, theirs in zip(self.param_groups, self.inner.param_groups, strict=True):
            theirs.update(options_of(mine))
        for bucket in self.buckets:
            assert bucket.reduced is not None
            for own in bucket.ranges:
                own.weight.grad = bucket.reduced[own.place]
        self.inner.step()
        for bucket in self.buckets:
            for own in bucket.ranges:
                own.weight.grad = None
        self._spread()
        self.steps_done += 1
        self.gradients.step = self.steps_done

    def _spread(self) -> None:
        """Send every rank's shards to all ranks."""
        futures = []
        for bucket in self.buckets:
            count = len(bucket.gather_plan)
            steps = self._gather(bucket, self.channel.call(count))
            futures.append(self.channel.submit(steps, bucket.flat, waits=count))
        for future in futures:
            future.wait()

    def _gather(self, bucket: ShardedBucket, call: Call) -> Steps[None]:
        direct = bucket.dtype == torch.float32 and not bucket.lossy_weights
        flat = (
            bucket.flat
            if direct
            else self.channel.workspace.lend(bucket.flat.numel(), torch.float32, bucket.device)
        )
        base = bucket.own.float() if bucket.lossy_weights else None
        finite = yield from gather_rows(
            bucket.shard,
            flat,
            bucket.gather_plan,
            call,
            base=base,
        )
        if direct:
            return
        if base is None:
            bucket.flat[: bucket.used].copy_(flat[: bucket.used])
        elif all(finite):
            bucket.flat[: bucket.used].add_(flat[: bucket.used])
        self.channel.workspace.take_back(flat)
        if base is not None and not all(finite):
            raise NonFiniteGradient(
                f"after step {self.steps_done} some weights of {bucket.members[0].name!r} to "
                f"{bucket.members[-1].name!r} are NaN or infinite and cannot be encoded: the "
                "learning rate may be too high"
            )

    def _check(self) -> None:
        for bucket in self.buckets:
            bucket.check()
            if bucket.changed():
                bucket.adopt()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InvalidArgument(
                    f"parameter {name!r} was frozen when this optimizer was made but requires a "
                    "gradient now: make a new optimizer"
                )

    def _compare_replicas(self) -> Steps[None]:
        """Check that every rank has the same parameters, bit for bit and in the same buckets."""
        sums = [int(b.flat.view(torch.int16).sum(dtype=torch.int64)) for b in self.buckets]
        layout = ";".join(
            f"{m.name}@{b.number}+{m.first}:{tuple(m.shape)}"
            for b in self.buckets
            for m in b.members
        )
        mine = [zlib.crc32(layout.encode()), zlib.crc32(np.array(sums, np.int64).tobytes())]
        every = yield from self.channel.gathered(mine)
        for column, what in (
            (0, "names, shapes or order of the parameters"),
            (1, "values of the parameters"),
        ):
            different = tuple(
                r for r in range(self.transport.size) if every[r, column] != every[0, column]
            )
            if different:
                raise Mismatch(
                    f"the {what} on ranks {list(different)} differ from those on rank 0: build the "
                    "same model from the same seed on every rank, or broadcast its state_dict "
                    "before constructing Partitioned",
                    ranks=different,
                )

    # ------------------------------------------------------------ weights for local updates

    @property
    def inner_channel(self) -> Channel:
        return self.channel

    def local_weights(self) -> list[LocalWeights]:
        """Return this rank's ranges, or their float32 masters, in the order of parameters; an empty
        one for parameters of other ranks."""
        found: dict[int, LocalWeights] = {}
        for bucket in self.buckets:
            owned = {own.member.index: own.weight for own in bucket.ranges}
            for member in bucket.members:
                source = owned.get(member.index, bucket.shard[:0])
                found[member.index] = LocalWeights(member.name, member.parameter, source)
        return [found[index] for index in sorted(found)]

    def settle_weights(self) -> None:
        self._check()
        if isinstance(self.inner, Offloaded):
            self.inner.finish()

    @torch.no_grad()
    def weights_written(self) -> None:
        self._spread()

    # ------------------------------------------------------------ groups

    def _shard_groups(self) -> list[dict[str, Any]]:
        return [
            options_of(group)
            | {
                "params": [
                    own.weight for b in self.buckets if b.group == number for own in b.ranges
                ]
            }
            for number, group in enumerate(self.param_groups)
        ]

    # ------------------------------------------------------------ counting

    def bytes_per_pass(self) -> dict[str, int]:
        """Return the bytes that this rank sends to its peers, with headers: ``gradients`` in one
        reduction, ``weights`` in one step."""
        return {
            "gradients": sum(map(reduction_bytes, self.buckets)),
            "weights": sum(bytes_of(bucket.gather_plan) for bucket in self.buckets),
        }

    def memory(self) -> dict[str, int]:
        """Return the bytes in this rank's memory by purpose."""
        stored = isinstance(self.inner, Offloaded)
        states = (
            [] if stored else [value for one in self.inner.state.values() for value in one.values()]
        )
        feedbacks = {id(f): f for b in self.buckets for f in b.feedbacks if f is not None}.values()
        return {
            "parameters": _bytes(b.flat for b in self.buckets),
            "gradients": _bytes(b.buffer for b in self.buckets),
            "gradient shards": _bytes(b.reduced for b in self.buckets),
            "masters": _bytes(b.shard for b in self.buckets if b.mastered),
            "states": _bytes(states),
            "residuals": _bytes(f.sent for f in feedbacks),
            "scratch": self.channel.workspace.lent_bytes,
            "messages": getattr(self.channel.inner, "spare_bytes", 0),
        }

    # ------------------------------------------------------------ checkpoints

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the whole state on every rank, in the format of ``optimizer``; collective: every
        rank must call it."""
        whole = self.channel.run(self._shards.whole())
        return {"state": whole, "param_groups": super().state_dict()["param_groups"]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of a Partitioned at any world size, or of ``optimizer`` itself;
        every rank must load the same.

        Load the model's weights first: a float32 master that is not in the state starts from them.
        """
        groups = state_dict["param_groups"]
        check_groups(self, groups)
        self._shards.load(
            state_dict["state"], [number for group in groups for number in group["params"]]
        )
        take_groups(self, groups)

    @torch.no_grad()
    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part for ``torch.distributed.checkpoint``, to be saved or loaded into,
        at any world size."""
        groups = {str(i): numbers_of(group) for i, group in enumerate(self.param_groups)}
        return {"state": self._shards.sharded(), "param_groups": groups}

    @torch.no_grad()
    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``sharded_state_dict`` filled by ``torch.distributed.checkpoint.load``; load the
        model's weights first."""
        self._shards.load_sharded(state_dict["state"])
        for number, group in enumerate(self.param_groups):
            for key, tensor in state_dict["param_groups"][str(number)].items():
                group[key] = like_saved(group[key], tensor)

    def feedback_state_dict(self) -> dict[str, Any]:
        """Return the residuals and choices of this rank's codec, for a bitwise resume at the same
        world size."""
        return (
            exact_state(self.residuals, self.transport, self.steps_done) | self.exchanges.choices()
        )

    def load_feedback_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps_done, residuals = residuals_of([state_dict], self.transport)
        self.gradients.step = self.steps_done
        self.exchanges.load_choices(state_dict)
        self.residuals.load(residuals)

    def close(self) -> None:
        """Remove the hooks from the parameters and end the worker."""
        self.gradients.close()
        self.channel.close()


def _check_mixture(named: Iterable[tuple[str, torch.Tensor]], stage: int, scaler: Any) -> None:
    kinds: dict[bool, str] = {}
    for name, parameter in named:
        kinds.setdefault(is_cut(parameter), name)
    if scaler is not None and stage == 1 and len(kinds) == 2:
        raise InvalidArgument(
            f"grad_scaler is given, but parameter {kinds[True]!r} is a DTensor and "
            f"{kinds[False]!r} is not: torch's GradScaler does not take gradients of both kinds "
            "together. Use stage=2, which leaves it one gradient"
        )


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
