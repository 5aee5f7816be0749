"""Which codec for which tensor: policies compose like codecs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from commpress.codecs.codec import Codec, codec_named
from commpress.codecs.family import EXACT


class Policy(Protocol):
    def choose(self, name: str, numel: int) -> Codec:
        """The codec of the parameter ``name`` (empty if unknown) with ``numel`` elements."""


@dataclass(frozen=True)
class Same:
    """One codec for everything."""

    codec: Codec

    def choose(self, name: str, numel: int) -> Codec:
        return self.codec


@dataclass(frozen=True)
class BySize:
    """Tensors of fewer than ``min_numel`` elements travel exactly: they cost few bytes and lose most."""

    large: "Policy | Codec | str"
    min_numel: int

    def choose(self, name: str, numel: int) -> Codec:
        return policy_of(self.large).choose(name, numel) if numel >= self.min_numel else EXACT


@dataclass(frozen=True)
class ByName:
    """The first pattern (regular expression, anywhere in the name) that matches decides, else ``otherwise``.

    ``ByName({"head": "int8"}, "sign")`` spends eight bits on an output layer, whose gradients are the spikiest.
    """

    rules: Mapping[str, Codec | str]
    otherwise: "Policy | Codec | str"

    def choose(self, name: str, numel: int) -> Codec:
        for pattern, codec in self.rules.items():
            if re.search(pattern, name):
                return codec_named(codec)
        return policy_of(self.otherwise).choose(name, numel)


def policy_of(codec: str | Codec | Policy, *, min_numel: int = 0, exclude: tuple[str, ...] = ()) -> Policy:
    """``codec`` for tensors of at least ``min_numel`` elements whose name matches no pattern of ``exclude``."""
    policy: Policy = codec if hasattr(codec, "choose") else Same(codec_named(codec))  # type: ignore[assignment]
    if min_numel:
        policy = BySize(policy, min_numel)
    return ByName(dict.fromkeys(exclude, EXACT), policy) if exclude else policy
