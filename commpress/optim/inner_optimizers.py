"""Inner optimizers of local updates: checks that their weights may be averaged, and over which
ranks."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commpress.collectives.channel import Channel
from commpress.collectives.transports.factory import initialized
from commpress.errors import InvalidArgument
from commpress.optim.layout import LocalWeights, WeightHolder
from commpress.optim.optimizer import CompressedOptimizer
from commpress.optim.sharded import ShardedOptimizer
from commpress.optim.zero_one_adam import WindowedOptimizer
from commpress.schedules import Hidden, Seconds, Sync

# DDP modules whose ranks each keep their own gradients
ALONE: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()
BETWEEN = (
    "process_group= is for the ranks between which LocalUpdates averages, as "
    'mesh["replicate"].get_group(); '
)


class LongerSteps:
    """Steps of an optimizer with learning rates multiplied by ``factor()``, whoever calls them, and
    decay of weights divided by it where it is apart from gradients.

    Between steps its groups hold the values that they were given.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._changed: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._end()  # of a step that raised
        factor = self._factor()
        for group in optimizer.param_groups if factor != 1 else ():
            self._set(group, "lr", group["lr"] * factor)
            if group.get("decoupled_weight_decay"):
                self._set(group, "weight_decay", group["weight_decay"] / factor)

    def _set(self, group: dict[str, Any], name: str, value: Any) -> None:
        self._changed.append((group, name, group[name], value))
        group[name] = value

    def _end(self, *_: Any) -> None:
        for group, name, before, value in self._changed:
            if group[name] is value:  # else somebody has set it since
                group[name] = before
        self._changed.clear()


# those of optimizers in use, of which another LocalUpdates takes over
LONGER: "weakref.WeakKeyDictionary[torch.optim.Optimizer, LongerSteps]"
LONGER = weakref.WeakKeyDictionary()


class InnerOptimizers(list[torch.optim.Optimizer]):
    """Optimizers that train on one rank locally, and their weights."""

    def __init__(self, inner: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        given = [inner] if isinstance(inner, torch.optim.Optimizer) else inner
        super().__init__(given if isinstance(given, Iterable) else ())
        if not self or not all(isinstance(each, torch.optim.Optimizer) for each in self):
            raise InvalidArgument(
                f"inner is {inner!r}, expected a torch optimizer or a list of them"
            )
        self._given = len(self.parameters)
        self._frozen = [p for p in self.parameters if not p.requires_grad]
        self._holders = [each for each in self if isinstance(each, WeightHolder)]
        for holder in self._holders:
            holder.averaged = True
        self._unaveraged = False  # the check has passed
        self.let_go()

    @property
    def of_adam(self) -> bool:
        """True if their steps are as long as Adam's, whatever the size of gradients."""
        kinds = torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax
        return all(isinstance(each, kinds) for each in self)

    def lengthen(self, factor: Callable[[], float]) -> None:
        """Multiply learning rates by ``factor()`` within steps, until ``let_go``."""
        for each in self:
            LONGER[each] = LongerSteps(each, factor)

    def let_go(self) -> None:
        """Take steps as long as they were given."""
        for each in self:
            if steps := LONGER.pop(each, None):
                steps.remove()

    @property
    def together(self) -> bool:
        """True if some of them train with other ranks in every step: these have shards, or average
        gradients."""
        return self.communicate or any(_mesh(p) is not None for p in self.parameters)

    @property
    def communicate(self) -> bool:
        """True if some of them exchange gradients or weights with other ranks by themselves."""
        held = any(
            isinstance(each, WeightHolder) and each.inner_channel is not None for each in self
        )
        return held or any(isinstance(each, CompressedOptimizer) for each in self)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self for group in optimizer.param_groups]

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, frozen ones too."""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def rate(self) -> float:
        """The largest learning rate."""
        return max(float(group["lr"]) for group in self.param_groups)

    def weights(self) -> list[LocalWeights]:
        """List this rank's trained weights; unnamed parameters get numbers as names."""
        found: list[LocalWeights] = []
        first = 0
        for number, optimizer in enumerate(self):
            mine: list[LocalWeights] = []
            if isinstance(optimizer, WeightHolder):
                mine = optimizer.local_weights()
            else:
                for group in optimizer.param_groups:
                    names = group.get("param_names") or [
                        f"#{i:05d}" for i in range(first, first + len(group["params"]))
                    ]
                    first += len(group["params"])
                    mine += [
                        LocalWeights(name, p)
                        for name, p in zip(names, group["params"], strict=True)
                        if p.requires_grad
                    ]
            # names in earlier optimizers, such as those of modules with equal names
            taken = {each.name for each in found}
            for each in mine:
                each.name = f"{number}: {each.name}" if each.name in taken else each.name
            found += mine
        if not found:
            raise InvalidArgument(
                "inner has no parameter that requires a gradient, expected at least one"
            )
        seen: dict[int, str] = {}
        for each in found:
            if id(each.source) in seen:
                other = seen[id(each.source)]
                raise InvalidArgument(
                    f"parameter {each.name!r} is in inner twice, also as {other!r}: leave one out"
                )
            seen[id(each.source)] = each.name
        return found

    def settle_weights(self) -> None:
        """Finish running work before weights are read."""
        for holder in self._holders:
            holder.settle_weights()

    @contextmanager
    def weights_rewritten(self) -> Iterator[None]:
        """Write weights inside the context; holders of copies update them at its end."""
        self.settle_weights()
        yield
        for holder in self._holders:
            holder.weights_written()

    def restart(self) -> int:
        """Reset the state of parameters whose state is not finite; return their number."""
        count = 0
        for optimizer in self:
            wild = [
                p
                for p, state in optimizer.state.items()
                if torch.is_tensor(p) and not _finite(state)
            ]
            begin = _first_state(optimizer) if wild else {}
            for p in wild:
                if not begin:
                    del optimizer.state[p]
                for name, value in begin.items():
                    optimizer.state[p][name] = torch.full_like(optimizer.state[p][name], value)
            count += len(wild)
        return count

    def check_unchanged(self) -> None:
        """Raise ``InvalidArgument`` if parameters were added: they have no Θ."""
        parameters = self.parameters
        if len(parameters) != self._given or any(p.requires_grad for p in self._frozen):
            more = len(parameters) != self._given
            what = (
                "more parameters than" if more else "parameters that require a gradient and did not"
            )
            raise InvalidArgument(
                f"inner has {what} when LocalUpdates was made (add_param_group, or layers that "
                "were unfrozen): call drain(), and make a new LocalUpdates"
            )

    def check_unaveraged(self) -> None:
        """Raise ``InvalidArgument`` if DistributedDataParallel averages their gradients. Checks
        once, at the first step, since models are wrapped late."""
        if not self._unaveraged and initialized():
            _refuse_ddp(self.parameters)
        self._unaveraged = True


def check_inner(optimizers: InnerOptimizers, every: "Sync | Seconds", exact_steps: int) -> None:
    """Raise ``InvalidArgument`` for what cannot train locally, before anything communicates."""
    for optimizer in optimizers:
        what = type(optimizer).__name__
        if isinstance(optimizer, WindowedOptimizer):
            raise InvalidArgument(
                f"inner is {what}, which goes apart from its ranks and comes back by itself: use "
                "OneBitAdam within a node, or an optimizer of torch"
            )
        if exact_steps and isinstance(optimizer, WeightHolder):
            raise InvalidArgument(
                f"exact_steps is {exact_steps}, and inner is {what}, whose gradients are not in "
                "parameter.grad when it steps: leave exact_steps= out"
            )
        masters = (
            isinstance(optimizer, CompressedOptimizer)
            and optimizer.flat is not None
            and optimizer.flat.shadowed
        )
        if isinstance(optimizer, ShardedOptimizer) or masters:
            raise InvalidArgument(
                f"inner is {what} with float32 master weights beside the parameters, which would "
                "not follow Θ: use commpress.Partitioned, or float32 parameters and no sharding"
            )
    if isinstance(every, Seconds) and optimizers.together:
        raise InvalidArgument(
            f"every is {every!r}, but the ranks inside a group train together (shards, or "
            "gradients that are averaged) and must count steps alike: give a number of steps or "
            "commpress.QSR"
        )


def check_hidden(optimizers: InnerOptimizers, every: "Sync | Seconds") -> None:
    """Raise ``InvalidArgument`` if ranks that train together would choose different rounds, because
    they share no headers."""
    if isinstance(every, Hidden) and optimizers.communicate:
        raise InvalidArgument(
            "every is 'auto', but inner communicates in every step with ranks that have exchanges "
            "of their own, and they must count steps alike: give a number of steps or commpress.QSR"
        )


def check_ranks(optimizers: InnerOptimizers, channel: Channel) -> None:
    """Raise ``InvalidArgument`` if ranks that average here already do so in every step, or have
    different shards."""
    for optimizer in optimizers:
        inner = (
            optimizer.inner_channel
            if isinstance(optimizer, WeightHolder)
            else getattr(optimizer, "channel", None)
        )
        if isinstance(inner, Channel) and inner.shares_ranks(channel):
            raise InvalidArgument(
                f"inner is {type(optimizer).__name__} over the ranks between which LocalUpdates "
                "averages: it averages their gradients in every step, so nothing would be saved. "
                f"{BETWEEN}give the optimizer (or stream) the ranks inside a node as process_group="
            )
    for p in optimizers.parameters:
        mesh = _mesh(p)
        if mesh is None:
            continue
        shared = len(set(mesh.mesh.flatten().tolist()) & set(channel.members)) > 1
        if shared or channel.group is None:
            raise InvalidArgument(
                f"parameters are DTensors on {mesh}, and LocalUpdates averages between ranks of "
                "that mesh: these have other "
                f"shards, or average gradients in every step. {BETWEEN}and the model's mesh has "
                "the others: "
                'fully_shard(..., mesh=mesh["shard"])'
            )


def _refuse_ddp(parameters: Sequence[torch.Tensor]) -> None:
    """Raise ``InvalidArgument`` if DistributedDataParallel averages gradients of these
    parameters."""
    mine, kinds = {id(p) for p in parameters}, [DistributedDataParallel]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for each in gc.get_referrers(kind):  # these include its instances
            if (
                isinstance(each, kind)
                and each not in ALONE
                and any(id(p) in mine for p in each.parameters())
            ):
                raise InvalidArgument(
                    "the model is wrapped in DistributedDataParallel, which averages gradients at "
                    "every step: nothing would be saved. Leave the wrapper out, or call "
                    "commpress.keep_local(ddp) before the first backward"
                )


def _finite(state: Any) -> bool:
    """True if all floating-point tensors in it are finite."""
    if isinstance(state, dict):
        return all(_finite(each) for each in state.values())
    if isinstance(state, list | tuple):
        return all(_finite(each) for each in state)
    return not (torch.is_tensor(state) and state.is_floating_point()) or bool(
        torch.isfinite(state).all()
    )


def _first_state(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the values that fill a parameter's state at construction, as in Adagrad; empty if the
    first step makes it."""
    one = torch.nn.Parameter(torch.zeros(1))
    try:
        state = type(optimizer)([one], **optimizer.defaults).state
    except (TypeError, ValueError):  # its constructor takes other arguments
        return {}
    return {name: float(each) for name, each in state.get(one, {}).items() if torch.is_tensor(each)}


def _mesh(parameter: Any) -> Any:
    """Return the mesh of a DTensor."""
    return getattr(parameter, "device_mesh", None)
