"""Layers of experts divided among ranks, in place of a model's own layers.

    model = transformers.MixtralForCausalLM(config)                  # equal weights on all ranks
    commpress.moe.parallelise(model, codec="int8", topology="auto")  # each rank keeps its experts
    ddp = DistributedDataParallel(model)                             # averages all the others
    commpress.moe.clip_grad_norm_(model.parameters(), 1.0)           # one factor for all ranks

Parameters of experts are marked (``commpress.optim.layout``), so that different experts are not
averaged with each other.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from commpress.collectives.change import Change
from commpress.collectives.transports.factory import on_reform, ranks_of
from commpress.errors import InvalidArgument, check_counts, refuse_unknown
from commpress.integrations.ddp.names import averaged_parameters
from commpress.integrations.experts.expert_copies import (
    CopiedExperts,
    FetchedWeights,
    choices_of,
    hottest,
)
from commpress.integrations.experts.expert_exchange import ExpertExchange
from commpress.integrations.experts.expert_optimizer import ExpertOptimizer
from commpress.integrations.experts.expert_tiers import ExpertTiers, TieredLayer
from commpress.integrations.zero.streamed_group import streamer_of
from commpress.optim.layout import held_of, is_held, mark_held
from commpress.tiered_mem import TieredStore
from commpress.torch_private import leave_to_themselves

__all__ = [
    "ExpertOptimizer",
    "ExpertTiers",
    "Experts",
    "clip_grad_norm_",
    "copy_experts",
    "experts_of",
    "held_parameters",
    "holders_of",
    "parallelise",
]

CALL = ("hidden_states", "top_k_index", "top_k_weights")  # transformers' arguments of experts
# the second are GPT-OSS's names of the same arguments
CALLS = (CALL, ("hidden_states", "router_indices", "routing_weights"))


class Experts(nn.Module):
    """Divide the experts of one layer among ranks: [tokens, width], choices and gates → Σ gate ·
    expert(token).

    - ``experts``: a list of modules, each from rows to rows, or one batched module with the experts
      along the first dimension of all parameters, called as in transformers:
      ``experts(hidden_states, top_k_index, top_k_weights)``. All ranks must pass the same; the
      parameters of a batched module are reduced in place to this rank's experts.
    - ``exchange``: an ``ExpertExchange``, or its options.
    - ``chunks``: number of parts in which tokens are sent, some while experts compute another.
    - ``mean``: divide gradients of experts by the number of ranks, as DDP divides all others.
      Otherwise they are sums over the tokens of all ranks.
    - ``replicas``: ranks with the same experts, if the exchange is among some of all ranks.
      Gradients of experts are averaged over them in backward.
    - ``copies``: an option of ``ExpertExchange``. Weights of copies come from an expert's home in
      every forward, and their gradients are sent there; ``copy_experts`` changes copies.
    - ``separate``: make each expert of a batched module a module with its own parameters, so that
      an expert without tokens has no gradient, and optimizers skip it.
    - ``store``: keep experts in this store (or in ``ExpertTiers`` of it, which layers share),
      ``resident`` of them in memory, and train them by ``ExpertOptimizer``; implies ``separate``.
      With an ``exchange``, ``experts`` may then be an iterator: each expert moves to the store as
      soon as it is made.

    A ``state_dict`` has the experts of this rank with their numbers; those of another rank are
    refused in the next forward.
    """

    def __init__(
        self,
        experts: nn.Module | Sequence[nn.Module] | Iterator[nn.Module],
        exchange: ExpertExchange | None = None,
        *,
        chunks: int = 1,
        mean: bool = True,
        replicas: dist.ProcessGroup | None = None,
        separate: bool = False,
        store: TieredStore | ExpertTiers | None = None,
        resident: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_unknown("Experts", options, Experts, ExpertExchange)
        check_counts(1, chunks=chunks)
        tiers, number = _tiers(store, resident), 0
        listed = list(experts) if isinstance(experts, Sequence | nn.ModuleList) else None
        if listed is not None:
            number = len(listed)
        elif isinstance(experts, Iterator):
            if exchange is None or tiers is None:
                raise InvalidArgument(
                    "experts is an iterator, of unknown length and for a store: pass exchange= and "
                    "store=, too, or a list of experts"
                )
            number = exchange.num_experts
        else:
            number = batch_of(experts)
        if not number:
            raise InvalidArgument(
                f"experts is a {type(experts).__name__}, expected a list of modules, or one module "
                "with num_experts whose parameters all have the experts along their first "
                f"dimension and that is called with {', '.join(CALL)}"
            )
        if exchange is not None and (options or exchange.num_experts != number):
            raise InvalidArgument(
                f"exchange has {exchange.num_experts} experts and options are {sorted(options)}, "
                f"expected {number} experts and no options beside it"
            )
        self.exchange = ExpertExchange(number, **options) if exchange is None else exchange
        self.chunks, self.mean, self.replicas = chunks, mean, replicas
        _refuse_pairs(self.exchange, replicas, tiers)
        batch = isinstance(experts, nn.Module) and listed is None
        self.alone = batch and (separate or tiers is not None)
        self.batched = batch and not self.alone
        own = self.own
        self.copied: CopiedExperts | None = None
        self.tier: TieredLayer | None = None
        self.experts: nn.Module
        if tiers is not None:
            made = _separate(experts, own) if batch else _own(listed or experts, own, number)  # type: ignore[arg-type]
            self.tier = tiers.add(made)
            self.tier.channel, self.tier.ranks = self.exchange.channel, self._divide
            self.experts = self.tier.modules
        else:
            every: Any = listed or (
                list(_separate(experts, [0])) * number if self.alone else [experts]
            )
            self.copied = CopiedExperts(
                self.exchange, every, batched=self.batched, arguments=self._arguments
            )
            if self.exchange.copies.holders:
                self.copied.check()
            if self.batched:
                self.experts = _cut(experts, own)
            else:
                chosen = _separate(experts, own) if self.alone else [every[e] for e in own]
                self.experts = nn.ModuleList(chosen)
            # so that every rank has a parameter marked as not equal on all ranks
            if not own and not self.batched:
                like = next(every[0].parameters(), torch.empty(0)).dtype
                none = nn.Parameter(torch.empty(0, dtype=like), requires_grad=False)
                self.experts.register_parameter("none", none)
        self._loaded = own
        self._claim()

    @property
    def _divide(self) -> int:
        """Divisor of gradients."""
        return _divisor(self.exchange) if self.mean else 1

    def reform(self, change: Change) -> Callable[[], None]:
        """Mark parameters again after a change of ranks: for ``group.reform``."""
        return self._follow

    def _follow(self) -> None:
        self.mark()
        if self.tier is not None:
            self.tier.ranks = self._divide

    def _claim(self) -> None:
        """Mark all parameters as those of divided experts."""
        self._seen: weakref.ref[DistributedDataParallel] | None = None
        self._hooked: set[int] = set()  # ids of parameters with a hook of this layer
        self.mark()
        if self.exchange.on_lost == "mask":
            on_reform(self.exchange.channel.group, self)

    @property
    def own(self) -> list[int]:
        """Numbers of the experts on this rank."""
        found: list[int] = self.exchange.home.on(self.exchange.channel.rank).tolist()
        return found

    def mark(self) -> None:
        """Mark which ranks have the parameters, as ranks of the whole world if there are more than
        those of the exchange."""
        channel = self.exchange.channel
        members = channel.members or tuple(range(channel.size))
        rank = members[channel.rank]
        for parameter in self.experts.parameters():
            if not isinstance(parameter, DTensor):  # fully_shard's parameters are refused later
                mark_held(
                    parameter,
                    members,
                    ranks_of(self.replicas) if self.replicas is not None else (rank,),
                    rank,
                )

    def _hook(self) -> None:
        """Register hooks for gradients of parameters that require one."""
        for parameter in self.experts.parameters() if self.tier is None else ():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                if self._divide > 1 or self.replicas is not None:
                    parameter.register_hook(
                        _mean(self.exchange if self.mean else None, self.replicas)
                    )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Experts":
        """Copy the experts, on the same ranks and with the same exchange, as ``AveragedModel``
        does."""
        made = type(self).__new__(type(self))
        memo |= {id(self): made, id(self.exchange): self.exchange, id(self.replicas): self.replicas}
        made.__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        )
        made._claim()
        return made

    @torch.compiler.disable  # messages cannot be traced: graphs break around a layer
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self._check()
        self._hook()
        routed, apply = None if self.tier is None else self.tier.expect, self._apply_experts
        if self.exchange.copies.holders:
            assert self.copied is not None
            hidden_states, fetched = self.copied.fetch(hidden_states, self.experts, self.own)
            apply = partial(self._apply_all, fetched)
        return self.exchange(
            hidden_states, top_k_index, top_k_weights, apply, chunks=self.chunks, routed=routed
        )

    def _check(self) -> None:
        """Raise ``InvalidArgument`` if the parameters were changed since they were marked."""
        if self._loaded != self.own:
            raise InvalidArgument(
                f"experts {self._loaded} were loaded on the rank of {self.own}: load the state of "
                "this rank. With a Trainer use the callback commpress.hf.DividedExperts "
                "(commpress.hf.Compress does the same), which saves and loads every rank's experts"
            )
        self.check_parameters()
        ddp = DistributedDataParallel._get_active_ddp_module()
        if ddp is not None and (self._seen is None or self._seen() is not ddp):
            averaged_parameters(ddp)
            self._seen = weakref.ref(ddp)

    def check_parameters(self) -> None:
        """Raise ``InvalidArgument`` if there are other parameters than those that were marked."""
        if any(held_of(p) is None for p in self.experts.parameters()):
            raise InvalidArgument(
                "parameters of this rank's experts were replaced or added, as by "
                "load_state_dict(assign=True), fully_shard or adapters: load without assign, pass "
                "ignored_params=commpress.moe.held_parameters(model) to fully_shard, or call "
                "commpress.moe.parallelise again on the model with its adapters"
            )

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self._loaded, dtype=torch.int64)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self._loaded = state.tolist()

    def _apply_all(
        self, fetched: FetchedWeights, rows: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Compute the results of this rank's experts, then those of its copies."""
        here, theirs = counts.tensor_split([len(self.own)])
        parts = rows.split([int(here.sum()), int(theirs.sum())])
        return torch.cat(
            [
                self._apply_experts(parts[0], here),
                fetched.apply(parts[1], theirs, training=self.training),
            ]
        )

    def _apply_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if not len(rows):
            if not self.batched and self.replicas is None:
                return rows
            # gradients of zero, as for experts without tokens in a batch
            nothing = [p.reshape(-1)[:0].sum() for p in self.experts.parameters()]
            return rows + torch.stack(nothing).sum().to(rows.dtype)
        if self.batched:
            return self.experts(rows, *choices_of(rows, counts))
        parts = rows.split(counts.tolist())
        if self.tier is not None:
            return torch.cat(self.tier.apply(parts, self._arguments))
        pairs = zip(self.experts.children(), parts, strict=True)
        every = self.replicas is not None  # replicas wait for the gradients of all experts
        return torch.cat(
            [expert(part, *self._arguments(part)) for expert, part in pairs if len(part) or every]
        )

    def _arguments(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return an expert's further arguments: all choices are its only expert."""
        return choices_of(rows, torch.tensor([len(rows)])) if self.alone else ()

    def extra_repr(self) -> str:
        return f"experts {self.own} of {self.exchange.num_experts}"


def parallelise(model: nn.Module, **options: Any) -> list[Experts]:
    """Replace every batched layer of experts in ``model`` by ``Experts``, without a change of the
    model's code; collective.

    ``options`` are those of ``Experts`` and ``ExpertExchange``; each layer has its own exchange. A
    DDP around ``model``, made after this, does not average experts, including those of ``Experts``
    that ``model`` already has. Pass the same module that DDP will wrap. A ``store`` is shared by
    all layers, and ``resident`` counts the experts of all in memory.
    """
    found, layers = list(_layers(model)), experts_of(model)
    if not found and not layers:
        _refuse_dense(model)
        raise InvalidArgument(
            f"model is a {type(model).__name__} without layers of experts: expected modules with "
            "num_experts whose parameters all have the experts along their first dimension and "
            f"that are called with {', '.join(CALL)}. Use commpress.moe.Experts in the model"
        )
    if (store := options.pop("store", None)) is not None:
        options["store"] = _tiers(store, options.pop("resident", None))
    for layer in layers:
        layer.mark()  # includes adapters added since
    for parent, name, experts in found:
        if name == "base_layer":
            raise InvalidArgument(
                f"model has experts inside a {type(parent).__name__} with adapters that would not "
                "be divided: call parallelise before adding adapters, and again afterwards"
            )
        layers.append(Experts(experts, **options))
        setattr(parent, name, layers[-1])
    own = {id(p) for layer in layers for p in layer.parameters()}
    leave_to_themselves(model, [name for name, p in model.named_parameters() if id(p) in own])
    return layers


def copy_experts(model: nn.Module, copies: int) -> list[dict[int, int]]:
    """Make ``copies`` copies in each layer, of the experts with the most tokens since the last
    call; collective.

    Earlier copies are dropped. Call it on all ranks between two steps. It returns for each layer
    the number of ranks of each expert with copies.
    """
    check_counts(copies=copies)
    found = []
    for layer in experts_of(model):
        if layer.tier is not None:
            raise InvalidArgument(
                "model has experts in a store, which cannot be copied to other ranks: leave store= "
                "out"
            )
        assert layer.copied is not None
        layer.copied.check()
        load = layer.exchange.expert_load()
        found.append(hottest(load, copies, layer.exchange.channel.size))
        layer.exchange.copy_experts(found[-1], load)
    return found


def experts_of(model: nn.Module) -> list[Experts]:
    """Return all layers of divided experts, in the order of modules."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def held_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of this rank's experts, for ``fully_shard(ignored_params=)``."""
    return {p for layer in experts_of(model) for p in layer.parameters()}


def holders_of(model: nn.Module) -> dict[str, dist.ProcessGroup]:
    """Return by name the group of ranks that have a parameter, for parameters that not all ranks
    have."""
    alone: dist.ProcessGroup | None = None
    found: dict[str, dist.ProcessGroup] = {}
    replicas = {id(p): layer.replicas for layer in experts_of(model) for p in layer.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in replicas:
            continue
        group = replicas[id(parameter)]
        if group is None:
            group = alone = alone or dist.new_group(
                [dist.get_rank()], use_local_synchronization=True
            )
        found[name] = group
    return found


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Clip like torch's ``clip_grad_norm_`` for a model with experts divided among the ranks of
    ``process_group`` (default: all).

    It returns the norm of all gradients, with each expert counted once, and all ranks multiply by
    the same factor. Collective; call it after backward has ended on all ranks. torch's function
    sees only this rank's experts, and would multiply replicated gradients by a different factor on
    each rank. DTensors, as of FSDP2, are allowed. Experts in tiers are not, because their gradients
    are in a store: use ``ExpertOptimizer(max_grad_norm=)``.
    """
    every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(isinstance(streamer_of(p), ExpertTiers) for p in every):
        raise InvalidArgument(
            "parameters include experts in tiers, whose gradients are in a store: pass "
            "max_grad_norm= to commpress.moe.ExpertOptimizer, and do not clip elsewhere "
            "(max_grad_norm=0 with a Trainer)"
        )
    ranks, grads = ranks_of(process_group), [p.grad for p in every if p.grad is not None]
    shared, own = 0.0, 0.0
    for number, p in enumerate(every):
        if p.grad is None:
            continue
        norm: Any = torch.linalg.vector_norm(p.grad.float())
        square = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
        if is_held(f"#{number:05d}", p, ranks):
            held = held_of(p)
            own += square / (1 if held is None else len(held.holders))
        else:
            shared += square
    if dist.is_initialized() and len(ranks) > 1:
        device = "cpu" if "cpu:" in dist.get_backend_config(process_group) else "cuda"
        rows = list(torch.zeros(len(ranks), 1, dtype=torch.float64, device=device))
        dist.all_gather(
            rows, torch.tensor([own], dtype=torch.float64, device=device), group=process_group
        )
        own = sum(map(float, rows))
    total = torch.tensor((shared + own) ** 0.5)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    return total


def _tiers(store: TieredStore | ExpertTiers | None, resident: int | None) -> ExpertTiers | None:
    if isinstance(store, TieredStore):
        return ExpertTiers(store, resident)
    if resident is not None:
        raise InvalidArgument(
            f"resident is {resident}, but store is {type(store).__name__}: pass it with a "
            "TieredStore, or to ExpertTiers itself"
        )
    return store


def _refuse_pairs(
    exchange: ExpertExchange, replicas: dist.ProcessGroup | None, tiers: ExpertTiers | None
) -> None:
    both = {
        "replicas and store are given, and gradients in a store are not averaged": replicas
        is not None
        and tiers is not None,
        "copies and store are given, and experts in a store cannot be copied to other ranks": (
            tiers is not None and exchange.copies.holders
        ),
        "on_lost is 'mask', and the group replicas= would end with a lost rank": replicas
        is not None
        and exchange.on_lost == "mask",
    }
    for why, given in both.items():
        if given:
            raise InvalidArgument(f"{why}: leave one out")
    ranks, size = set(exchange.placement.owner[:-1].tolist()), exchange.channel.size
    if tiers is not None and len(ranks) < size:
        raise InvalidArgument(
            f"{exchange.num_experts} experts are not on all {size} ranks: leave store= out"
        )


def batch_of(module: Any) -> int:
    """Return the number of experts if ``module`` is a batched module of experts, else 0."""
    number = getattr(module, "num_experts", 0)
    if not isinstance(module, nn.Module) or not isinstance(number, int):
        return 0
    shapes = [p.shape for p in module.parameters()]
    called = tuple(inspect.signature(module.forward).parameters)[: len(CALL)]
    fits = bool(shapes) and all(len(shape) and shape[0] == number for shape in shapes)
    if not fits or called not in CALLS:
        return 0
    if cut := [
        name
        for name, buffer in module.named_buffers()
        if buffer.dim() and buffer.shape[0] == number
    ]:
        raise InvalidArgument(
            f"experts, a {type(module).__name__}, have a buffer {cut[0]!r} with a row for each "
            "expert, which would not be divided: make it a parameter with requires_grad=False, or "
            "pass a list of modules"
        )
    return number


def _refuse_dense(model: nn.Module) -> None:
    """Raise ``InvalidArgument`` for batched experts that get every token, as in Llama 4."""
    for name, module in model.named_modules():
        number = getattr(module, "num_experts", 0)
        if number and [
            p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] == number
        ]:
            called = ", ".join(inspect.signature(module.forward).parameters)
            raise InvalidArgument(
                f"model has experts in {name!r}, a {type(module).__name__} that is called with "
                f"{called}, expected {', '.join(CALL)}: each expert gets every token, so there are "
                "no choices by which to send tokens. Shard its weights by fully_shard, or rewrite "
                "the layer with commpress.moe.Experts([...]), which takes each token's choices"
            )


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    divided = {id(module) for layer in experts_of(model) for module in layer.modules()}
    for parent in model.modules():
        if id(parent) not in divided:
            for name, child in parent.named_children():
                if batch_of(child):
                    yield parent, name, child


def _divisor(exchange: ExpertExchange) -> int:
    """Return the number of ranks with different tokens."""
    return exchange.channel.size // exchange.tensor_size


def _mean(
    exchange: ExpertExchange | None, replicas: dist.ProcessGroup | None
) -> Callable[[Any], torch.Tensor | None]:
    """Return a hook of a parameter that divides its gradient by the ranks of ``exchange`` and
    averages it over ``replicas``."""

    def mean(gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:  # no copy of an expert had tokens
            return None
        divide = 1 if exchange is None else _divisor(exchange)
        if replicas is None:
            return gradient / divide
        summed = gradient.float() / (divide * replicas.size())
        dist.all_reduce(summed, group=replicas)
        return summed.to(gradient.dtype)

    return mean


def _own(experts: Iterable[nn.Module], own: list[int], number: int) -> Iterator[nn.Module]:
    count = 0
    for count, expert in enumerate(experts, 1):
        if count - 1 in own:
            yield expert
    if count != number:
        raise InvalidArgument(f"experts has {count} modules, expected {number} as in the exchange")


def _separate(module: Any, own: list[int]) -> Iterator[nn.Module]:
    """Yield modules with one expert each."""
    whole = list(module.parameters())
    for expert in own:
        alone = {
            id(p): nn.Parameter(
                p.detach()[expert : expert + 1].clone(), requires_grad=p.requires_grad
            )
            for p in whole
        }
        one = copy.deepcopy(module, dict(alone))
        one.num_experts = 1
        yield one


def _cut(module: Any, own: list[int]) -> nn.Module:
    """Keep only the rows of the experts ``own`` in every parameter."""
    for owner in list(module.modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            kept = nn.Parameter(
                parameter.detach()[own].clone(), requires_grad=parameter.requires_grad
            )
            setattr(owner, name, kept)
    module.num_experts = len(own)
    found: nn.Module = module
    return found
