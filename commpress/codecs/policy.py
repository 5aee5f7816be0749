"""Policies: they choose a codec for each tensor, and compose like codecs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from commpress.codecs.codec import Codec
from commpress.codecs.family import EXACT
from commpress.codecs.registry import codec_named
from commpress.errors import InvalidArgument, check_counts


class Policy(Protocol):
    def choose(self, name: str, numel: int) -> Codec:
        """Return the codec of the parameter ``name`` (empty if unknown) with ``numel`` elements."""


@dataclass(frozen=True)
class Same:
    """Use one codec for everything."""

    codec: Codec

    def choose(self, name: str, numel: int) -> Codec:
        return self.codec


@dataclass(frozen=True)
class BySize:
    """Send tensors of fewer than ``min_numel`` elements exactly: they take few bytes and suffer
    most from compression."""

    large: "Policy | Codec | str"
    min_numel: int

    def choose(self, name: str, numel: int) -> Codec:
        return policy_of(self.large).choose(name, numel) if numel >= self.min_numel else EXACT


@dataclass(frozen=True)
class ByName:
    """Use the codec of the first pattern (a regular expression, searched anywhere in the name) that
    matches, else ``otherwise``.

    ``ByName({"head": "int8"}, "sign")`` spends eight bits on an output layer: its gradients are
    the spikiest.
    """

    rules: Mapping[str, Codec | str]
    otherwise: "Policy | Codec | str"

    def choose(self, name: str, numel: int) -> Codec:
        for pattern, codec in self.rules.items():
            if re.search(pattern, name):
                return codec_named(codec)
        return policy_of(self.otherwise).choose(name, numel)


@dataclass(frozen=True)
class ByRole:
    """Use a codec for each role of a tensor in a model; ``by_role`` makes it and finds the
    roles."""

    roles: Mapping[str, str]  # parameter → body, attention, embedding, output, norm or bias
    codecs: Mapping[str, Codec]  # role → codec

    def choose(self, name: str, numel: int) -> Codec:
        return self.codecs[self.roles.get(name, "body")]


_ATTENTION = re.compile(r"attn|attention|qkv|[qkvo]_proj|c_attn", re.IGNORECASE)


def by_role(
    model: torch.nn.Module,
    body: Codec | str = "int4",
    *,
    attention: Codec | str | None = None,
    embedding: Codec | str = "fp8",
    output: Codec | str = "fp8",
    norm: Codec | str = "none",
    bias: Codec | str = "none",
) -> ByRole:
    """Make a policy for ``model``: a coarse codec for most elements, finer ones where errors matter
    most.

    Gradients of embeddings and of the output layer are the spikiest, because most of them belong to
    few tokens. Norms and biases have few elements with a large effect, and are sent exactly.

    - ``body``: codec of large layers.
    - ``attention``: codec of projections in attention, ``body`` if None; "none" compresses only the
      large layers between (the layer-selective choice of TAGC).
    - ``embedding``, ``output``: codecs of embeddings and of the output layer.
    - ``norm``, ``bias``: codecs of norms and of biases.
    """
    codecs = {
        "body": body,
        "attention": attention if attention is not None else body,
        "embedding": embedding,
    }
    codecs |= {"output": output, "norm": norm, "bias": bias}
    return ByRole(roles_of(model), {role: codec_named(codec) for role, codec in codecs.items()})


def roles_of(model: torch.nn.Module) -> dict[str, str]:
    """Map each parameter to its role. The output layer is the last of several matrices that are no
    embeddings, or the embedding if tied."""
    roles: dict[str, str] = {}
    matrices: list[str] = []
    seen: set[int] = set()
    for place, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied: only its first name counts, as in named_parameters
                continue
            seen.add(id(parameter))
            name = f"{place}.{leaf}" if place else leaf
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
                roles[name] = "embedding"
            elif "norm" in type(module).__name__.lower():
                roles[name] = "norm"
            elif parameter.dim() < 2:
                roles[name] = "bias"
            else:
                attention = isinstance(module, torch.nn.MultiheadAttention) or _ATTENTION.search(
                    name
                )
                roles[name] = "attention" if attention else "body"
                matrices.append(name)
    last = next(
        (m for m in reversed(list(model.modules())) if isinstance(m, torch.nn.Linear)), None
    )
    tied = last is not None and any(
        isinstance(m, torch.nn.Embedding) and m.weight is last.weight for m in model.modules()
    )
    if len(matrices) > 1 and not tied:
        roles[matrices[-1]] = "output"
    return roles


def check_exclude(exclude: object) -> None:
    """Refuse a single string, which would count as one pattern for each of its letters."""
    if isinstance(exclude, str):
        raise InvalidArgument(
            f"exclude is {exclude!r}, expected a tuple of regular expressions: ({exclude!r},)"
        )


def policy_of(
    codec: str | Codec | Policy, *, min_numel: int = 0, exclude: tuple[str, ...] = ()
) -> Policy:
    """Return the policy that uses ``codec`` for tensors of at least ``min_numel`` elements with a
    name that matches no pattern of ``exclude``; all others are sent exactly."""
    check_counts(min_numel=min_numel)
    check_exclude(exclude)
    policy: Policy = codec if hasattr(codec, "choose") else Same(codec_named(codec))  # type: ignore[assignment]
    if min_numel:
        policy = BySize(policy, min_numel)
    return ByName(dict.fromkeys(exclude, EXACT), policy) if exclude else policy
