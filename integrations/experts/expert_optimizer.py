"""An optimizer for a model with experts in tiers: dense parameters are updated in memory, experts
in the store, one after the other."""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch

from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument
from commpress.integrations.experts.expert_tiers import GRADIENT, WHOLE, ExpertTiers
from commpress.integrations.zero.averaging import averaging_check
from commpress.integrations.zero.moments import Moments
from commpress.integrations.zero.stored_state import StoredOptimizer, StoredState
from commpress.integrations.zero.streamed_group import StreamedWeights, return_holes, streamer_of
from commpress.integrations.zero.update_chunk import WEIGHT, chunks
from commpress.integrations.zero.wrapper import MASTER, agreed, of_every_rank
from commpress.optim.checkpoint import options_of
from commpress.optim.layout import LocalWeights, local
from commpress.tiered_mem import TieredStore


class ExpertOptimizer(StoredOptimizer):
    """Update a model with experts in a store: ``ExpertOptimizer(model.parameters(),
    torch.optim.AdamW, lr=1e-4)``.

    An expert is updated if it has a gradient, that is, if it received a token since the last step.
    Others keep their moments and their number of steps, as torch's optimizers skip parameters with
    ``grad`` None. Options not listed below are passed to ``optimizer``, which must be element-wise.

    - ``max_grad_norm``: clip to this norm of all parameters, over all ranks, in every step.
    - ``on_nonfinite``: with ``max_grad_norm``, "skip" (default) leaves out a step with a norm that
      is not finite; "raise" raises.
    - ``commit_every``: steps between commits; 0: only when ``commit`` is called.

    If the store has a committed state, training continues from it: all parameters, dense ones and
    experts, take its values.
    """

    def __init__(
        self,
        params: Any,
        optimizer: type[torch.optim.Optimizer],
        *,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["skip", "raise"] = "skip",
        commit_every: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(
            params,
            optimizer,
            options,
            commit_every=commit_every,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
        )
        places = self._places
        if self.by_tensor:
            raise InvalidArgument(
                f"optimizer is {optimizer.__name__}, which is not element-wise: it takes whole "
                "tensors, and experts pass through memory side by side. Use AdamW, SGD or Adagrad"
            )
        self.tiers = _tiers([p for group in places for p, _, _ in group])
        self.store: TieredStore = self.tiers.store
        self.prefix = f"{self.tiers.prefix}/optimizer"
        stored = self.tiers.group_of
        self._dense = [[one for one in group if id(one[0]) not in stored] for group in places]
        self.chunks = chunks(
            [[one for one in group if id(one[0]) in stored] for group in places],
            WHOLE,
            self.prefix,
            stored,
        )
        self._chunk_of = {
            stored[id(chunk.ranges[0].parameter)].number: chunk for chunk in self.chunks
        }
        self._check_all({id(own.parameter) for chunk in self.chunks for own in chunk.ranges})
        pairs = zip(self.param_groups, self._dense, strict=True)
        self._inner = optimizer(
            [{**options_of(group), "params": [p for p, _, _ in own]} for group, own in pairs],
            **options,
        )
        self._coded = Moments(self.store, quantised=False)
        self._stored = StoredState(
            self.store, self.chunks, self._moments, self._scalars, self._coded
        )
        self.state: Any = ChainMap(self._stored, self._inner.state)
        self._kept = {
            number: {key: chunk.name(key) for key in self._moments}
            | ({WEIGHT: chunk.master} if chunk.copied else {})
            for number, chunk in self._chunk_of.items()
        }
        keys = [*([WEIGHT] if any(chunk.copied for chunk in self.chunks) else []), *self._moments]
        with torch.no_grad():
            known = self._meta in self.store
            if not known:
                self._begin()
            self.tiers.attach(self._kept, keys, clips=max_grad_norm is not None)
            if known:
                self._resume()
        self._channel = self.tiers.layers[0].channel
        agreed(self._every(self.steps_done))
        self._replicas = averaging_check(
            "ExpertOptimizer", [name for group in self._dense for _, name, _ in group]
        )
        self.store.settle_with(self._record)
        self._built = True

    def _check_all(self, given: set[int]) -> None:
        for group in self.tiers.groups:
            for member in group.members:
                if member.parameter.requires_grad and id(member.parameter) not in given:
                    raise InvalidArgument(
                        f"params do not include {member.name}, which is in tiers: pass all of "
                        "model.parameters()"
                    )

    def _begin(self) -> None:
        for chunk in self.chunks:
            if chunk.copied:
                with self.store.borrow(chunk.values, write=False) as values:
                    self.store.put(chunk.master, values.float())
                self.store.evict(chunk.names()).wait()

    # ------------------------------------------------------------ weights for local updates

    @property
    def inner_channel(self) -> Channel | None:
        return None

    def local_weights(self) -> list[LocalWeights]:
        """Return dense parameters, and experts in the store."""
        dense = [
            LocalWeights(name, parameter) for group in self._dense for parameter, name, _ in group
        ]
        found = [self.tiers.groups[number] for number in self._chunk_of]
        return dense + [
            StreamedWeights(group.stored[0], group, self.store, self._renewed) for group in found
        ]

    def settle_weights(self) -> None:
        """Do nothing: no work is pending between steps."""

    def weights_written(self) -> None:
        self.tiers.forget_places()

    # ------------------------------------------------------------ one step

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.tiers.graded:
            self.tiers.drop_gradients()

    def _step(self) -> None:
        factor, finite = self._clipping(self._norm)
        if not finite:
            self.tiers.drop_gradients()
            self._skip()
            return
        self._groups = [options_of(group) for group in self.param_groups]
        self._step_dense(factor)
        for expert in self.tiers.begin_update():
            with self.tiers.turn("update", expert):
                self._update(expert, factor)
                self.tiers.forget_gradient(expert)
        self.tiers.plan.over()
        self._ended()

    def _step_dense(self, factor: torch.Tensor | None) -> None:
        for inner, options in zip(self._inner.param_groups, self._groups, strict=True):
            inner.update(options)
        if factor is not None:
            for gradient in self._dense_gradients():
                gradient.mul_(factor.to(gradient.device))
        if self._replicas is not None and (self.averaged or self._replicas.over):
            self._replicas = None
        if self._replicas is not None:
            for parameter, _, _ in (one for group in self._dense for one in group):
                self._replicas.note(
                    local(parameter), None if parameter.grad is None else local(parameter.grad)
                )
            self._replicas.compare()
        self._inner.step()

    def _update(self, expert: int, factor: torch.Tensor | None) -> None:
        chunk = self._chunk_of[expert]
        with (
            self._coded.opened(chunk) as held,
            self.store.borrow(self.tiers.name((expert, GRADIENT))) as gradient,
        ):
            if factor is not None:
                gradient.mul_(factor)
            states = chunk.step(
                self._make, [own.inside(gradient) for own in chunk.ranges], held, self._groups
            )
            if chunk.copied:
                with self.store.borrow(chunk.values) as values:
                    values.copy_(held[WEIGHT])
        if self._stepped(chunk, states):
            return_holes()  # left by temporaries of new moments between lasting objects

    def _norm(self) -> torch.Tensor:
        """Return the norm of all gradients, summed in double and rounded once: dense ones, equal on
        all ranks, once, and the experts of every rank."""
        own = sum(
            float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2
            for g in self._dense_gradients()
        )
        experts = sum(self._every(sum((self.tiers.squares or {}).values())))
        return torch.tensor((own + experts) ** 0.5, dtype=torch.float32)

    def _dense_gradients(self) -> list[torch.Tensor]:
        return [
            gradient
            for group in self._dense
            for p, _, _ in group
            if (gradient := p.grad) is not None
        ]

    def _every(self, value: float) -> list[float]:
        """Return the values of all ranks."""
        return [value] if self._channel is None else of_every_rank(self._channel, [value])

    # ------------------------------------------------------------ checkpoints

    def _record(self) -> None:
        numbers: list[float] = []
        for chunk in self.chunks:
            numbers += self._floats_of(chunk)
        for parameter, name in self._dense_names():
            state = self._inner.state.get(parameter, {})
            numbers += self._floats(state or None)
            self.store.put(f"{name}/{WEIGHT}", parameter.detach())
            for key in self._moments if state else ():
                self.store.put(f"{name}/{key}", state[key])
        self._put_numbers(numbers)

    def _dense_names(self) -> Iterator[tuple[torch.Tensor, str]]:
        for group in self._dense:
            for parameter, _, index in group:
                yield parameter, f"{self.prefix}/dense/{index:06d}"

    def _places_of_parts(self) -> list[str]:
        ranges = [
            f"{c.number}.{r.group}:{tuple(r.parameter.shape)}"
            for c in self.chunks
            for r in c.ranges
        ]
        return ranges + [f"{name}:{tuple(p.shape)}" for p, name in self._dense_names()]

    def _resume(self) -> None:
        rest = self._committed()
        for chunk in self.chunks:
            self._restore(chunk, rest)
        for parameter, name in self._dense_names():
            found = self._scalars_of(rest)
            parameter.copy_(self._read(f"{name}/{WEIGHT}"))
            if found is not None:
                self._inner.state[parameter] = found | {
                    key: self._read(f"{name}/{key}").to(parameter.device) for key in self._moments
                }

    def _read(self, name: str) -> torch.Tensor:
        with self.store.borrow(name, write=False) as held:
            return held.clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in memory, in the format of ``optimizer``."""
        state = super().state_dict()
        self.tiers.forget_places()
        return state

    def _loaded(self, found: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        dense = (p for group in self._inner.param_groups for p in group["params"])
        states = {i: found[p] for i, p in enumerate(dense) if found[p]}
        self._inner.load_state_dict(self._inner.state_dict() | {"state": states})
        self.state.maps[1] = self._inner.state
        for chunk in self.chunks:
            if chunk.copied and not any(MASTER in state for state in found.values()):
                self._renewed(chunk.values)
        self.tiers.forget_places()

    def close(self) -> None:
        """End the thread of the tiers. The store, which belongs to the caller, stays open."""
        self.tiers.close()


def _tiers(parameters: list[torch.Tensor]) -> ExpertTiers:
    found = {streamer for p in parameters if (streamer := streamer_of(p)) is not None}
    if len(found) != 1 or not isinstance(tiers := found.pop(), ExpertTiers):
        raise InvalidArgument(
            "params have no experts in tiers, or experts in several: put experts into one store by "
            "commpress.moe.parallelise(model, store=..., resident=...), or use the plain optimizer"
        )
    return tiers
