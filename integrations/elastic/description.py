"""Description of a process in a run: all settings that must be equal on all of them, as text by
name.

A newcomer sends its description after its greeting, and the member that answers compares it with
its own.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from commpress.checksum import checksum_of
from commpress.integrations.ddp.hook import CompressedState
from commpress.integrations.elastic.exact_means import ExactMeans
from commpress.integrations.elastic.sampler import ElasticSampler
from commpress.kernels.cpu.digest import digest
from commpress.torch_private import hook_states

LONGEST = 200  # characters of a value, which may be a whole plan
# attributes of DDP that decide which calls it makes
LAYOUT = ("bucket_bytes_cap", "find_unused_parameters", "static_graph")


class Description:
    """Description of the objects that a loop trains, without learning rates and others that healing
    copies."""

    def __init__(
        self,
        state: Mapping[str, Any],
        replicas: Iterable[DistributedDataParallel],
        sampler: ElasticSampler | None,
        **loop: Any,
    ) -> None:
        """Describe these objects. ``loop``: other options that decide which rank does what in a
        step."""
        self._state = state
        self._fixed = {
            "commpress": version("commpress"),
            "kernels": digest()[:12],
            "state": ", ".join(state) or "built anew",
        }
        self._fixed |= {name: _text(value) for name, value in (loop | _reading(sampler)).items()}
        for name, each in state.items():
            self._fixed[name] = type(each).__name__
            if isinstance(each, torch.nn.Module):
                self._fixed |= {f"{name}.{key}": text for key, text in _tensors(each)}
            elif type(each).__module__.startswith("commpress."):
                self._fixed |= {f"{name}.{key}": _text(value) for key, value in _options(each)}
        for number, replica in enumerate(replicas):
            self._fixed |= {
                f"DDP {number}: {name}": _text(getattr(replica, name, None)) for name in LAYOUT
            }
            self._fixed |= {f"DDP {number}: {name}": text for name, text in _hooks(replica)}

    def __call__(self) -> Mapping[str, str]:
        optimizers = {
            name: each
            for name, each in self._state.items()
            if isinstance(each, torch.optim.Optimizer)
        }
        # groups may be added later
        groups = {f"{name}.param_groups": _sizes(each) for name, each in optimizers.items()}
        return self._fixed | groups


def _reading(sampler: ElasticSampler | None) -> dict[str, Any]:
    """Return the options that decide which rank reads which samples."""
    if sampler is None:
        return {"data": None}
    names = ("samples", "batch_size", "shuffle", "drop_last", "seed")
    return {"data": type(sampler)} | {f"data.{name}": getattr(sampler, name) for name in names}


def _tensors(module: torch.nn.Module) -> Iterable[tuple[str, str]]:
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        frozen = ", frozen" * (isinstance(each, torch.nn.Parameter) and not each.requires_grad)
        yield name, f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}{frozen}"


def _options(each: Any) -> Iterable[tuple[str, Any]]:
    """Yield the constructor's options that the object has stored."""
    for kind in type(each).__mro__:
        if kind.__module__.startswith("commpress.") and "__init__" in vars(kind):
            kept = [name for name in inspect.signature(kind).parameters if name in vars(each)]
            yield from [
                (name, vars(each)[name]) for name in kept if name not in ("inner", "transport")
            ]


def _hooks(replica: DistributedDataParallel) -> Iterable[tuple[str, str]]:
    """Yield the name and options of the hook that sends a replica's gradients."""
    states = [state for state in hook_states(replica) if not isinstance(state, ExactMeans)]
    yield "hook", ", ".join(type(state).__name__ for state in states) or "none"
    for options in [state.options for state in states if isinstance(state, CompressedState)]:
        yield from [(name, _text(value)) for name, value in options.items()]


def _sizes(optimizer: torch.optim.Optimizer) -> str:
    return _text([len(group["params"]) for group in optimizer.param_groups])


def _text(value: Any) -> str:
    """Format a value as text, the same in every process."""
    spec = getattr(value, "spec", None)
    text = (
        spec
        if isinstance(spec, str)
        else value.__qualname__
        if isinstance(value, type)
        else repr(value)
    )
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return (
        text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({checksum_of(text.encode()):016x})"
    )
