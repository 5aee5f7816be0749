"""Hashing of tokens: of those that are alike and go to one expert only the mean travels, and each
adds its own difference.

    y = E(c) + (x − c)      (LSH-MoE, 2411.08446)
    c: the mean of the tokens that share x's expert and hashes

A hash is the vertex of a cross-polytope that is nearest to the token, turned at random: which of
``dims`` coordinates is largest in magnitude, and its sign. Turning is two Walsh-Hadamard transforms
with random signs before each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch.nn import functional

from commpress.errors import InvalidArgument
from commpress.kernels.rotation import hadamard


class LSH:
    """Send means of similar tokens: at most a ``share`` of one rank's choices, or one for each of
    its experts.

    - ``hashes``: at most so many are compared, of ``dims`` coordinates each; as many as the share
      allows. ``seed``: of turning.
    - ``probes``: choices of each call that travel by themselves. ``error`` is ‖E(x) − E(c) − x + c‖
      / ‖E(x)‖ over them, in the last call.
    - ``bound``: where a rank's error was above it, all ranks send every token from the next call
      but one, for ``retry`` calls.

    What it costs depends on how alike tokens are: experts that change tokens by the same vector, or
    not at all, lose nothing. A token that is not finite travels alone.
    """

    def __init__(
        self,
        share: float = 0.2,
        *,
        hashes: int = 6,
        dims: int = 8,
        seed: int = 0,
        probes: int = 8,
        bound: float = 0.5,
        retry: int = 100,
    ) -> None:
        if not 0 < share <= 1:
            raise InvalidArgument(
                f"share is {share!r}, expected a part of the tokens, above 0 and up to 1"
            )
        if min(hashes, dims, retry) < 1 or probes < 0 or not bound > 0:
            raise InvalidArgument(
                f"hashes is {hashes}, dims {dims}, probes {probes}, bound {bound} and retry "
                f"{retry}, expected at least 1, 1, 0, more than 0, and 1"
            )
        self.share, self.hashes, self.dims, self.seed = share, hashes, dims, seed
        self.probes, self.bound, self.retry = probes, bound, retry
        self.error = 0.0
        self.worst = 0.0  # of all ranks, as they told in the last routing
        self.calls = 0
        self.exact_calls = 0  # of these, those in which every token travelled
        self._left = 0

    def __repr__(self) -> str:
        options = ("hashes", "dims", "seed", "probes", "bound", "retry")
        return (
            f"LSH({self.share}, {', '.join(f'{name}={getattr(self, name)}' for name in options)})"
        )

    def starts(self) -> bool:
        """True if this call sends means. The same on all ranks: it follows from what all were
        told."""
        self.calls += 1
        if self._left == 0 and self.worst > self.bound:
            self._left, self.error, self.worst = self.retry, 0.0, 0.0
        if self._left == 0:
            return True
        self._left -= 1
        self.exact_calls += 1
        return False

    @property
    def told(self) -> int:
        """The error as ranks tell it to each other, in millionths; what is no number counts as the
        largest."""
        return min(int(1e6 * self.error), 10**12) if self.error == self.error else 10**12

    def hear(self, told: Sequence[int]) -> None:
        """Errors of all ranks."""
        self.worst = max(told) / 1e6

    def cluster(self, tokens: torch.Tensor, topk_idx: torch.Tensor) -> "TokenClusters":
        """The means to send, and who is in them."""
        chosen = topk_idx.detach().cpu().numpy()
        token, slot = np.nonzero(chosen >= 0)
        expert = chosen[token, slot]
        known = tokens.detach().to(torch.float32)
        turned = turn(known, self.hashes * self.dims, self.seed)
        codes = vertices(turned.reshape(-1, self.hashes, self.dims)).cpu().numpy()
        bucket = self._buckets(expert, codes[token])
        alone = ~known.isfinite().all(1).cpu().numpy()[token]
        probed = np.zeros(len(token), bool)
        if self.probes and len(token):
            first = self.calls % max(len(token) // self.probes, 1)
            probed[first :: max(len(token) // self.probes, 1)] = True
            probed &= ~alone & (np.cumsum(probed) <= self.probes)
        single = alone | probed
        apart = np.where(single, bucket.max(initial=0) + 1 + np.arange(len(token)), bucket)
        numbers, place = np.unique(apart, return_inverse=True)
        count = len(numbers)
        home = np.searchsorted(numbers, bucket[probed])  # of probes: where they would be
        there = home < count
        there[there] = numbers[home[there]] == bucket[probed][there]
        of = np.zeros(count, np.int64)
        of[place] = expert
        order = np.argsort(place, kind="stable")
        offsets = np.searchsorted(place[order], np.arange(count))
        where = np.full(chosen.shape, -1, np.int64)
        where[token, slot] = place
        probes = np.stack([token[probed][there], place[probed][there], home[there]])
        device = tokens.device
        return TokenClusters(
            *(
                torch.from_numpy(np.ascontiguousarray(a)).to(device)
                for a in (of[:, None], token[order], offsets, where, probes)
            )
        )

    def _buckets(self, expert: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """A number for each choice: equal for those of one expert whose first hashes are equal, as
        many as the share allows.

        With the hash that would be too many, the fullest are still divided.
        """
        _, bucket = np.unique(expert, return_inverse=True)
        most = int(self.share * len(expert))
        for code in codes.T:
            count = int(bucket.max(initial=-1)) + 1
            _, finer = np.unique(bucket * (2 * self.dims) + code, return_inverse=True)
            if finer.max(initial=-1) < most:
                bucket = finer
                continue
            if most > count:
                parent = np.zeros(finer.max() + 1, np.int64)
                parent[finer] = bucket
                children, size = (
                    np.bincount(parent, minlength=count),
                    np.bincount(bucket, minlength=count),
                )
                fullest = np.argsort(-size, kind="stable")
                divided = np.zeros(count, bool)
                divided[fullest] = np.cumsum(children[fullest] - 1) <= most - count
                bucket = np.where(divided[bucket], count + finer, bucket)
                _, bucket = np.unique(bucket, return_inverse=True)
            break
        return bucket


@dataclass(frozen=True, eq=False)
class TokenClusters:
    """Clusters of one rank's choices: what travels instead of tokens, and how what comes back is
    shared out."""

    topk_idx: torch.Tensor  # int64[clusters, 1]: the expert of each
    members: torch.Tensor  # int64: tokens, cluster by cluster
    offsets: torch.Tensor  # int64[clusters]: where the members of each begin
    where: torch.Tensor  # int64[tokens, k]: the cluster of each choice; -1: none
    probes: torch.Tensor  # int64[3, n]: token, its own cluster, and the one it would be in

    def centroids(self, tokens: torch.Tensor) -> torch.Tensor:
        """[clusters, width], differentiably."""
        if not len(self.offsets):
            return tokens[:0]
        return functional.embedding_bag(
            self.members, _floats(tokens), self.offsets, mode="mean"
        ).to(tokens.dtype)

    def expand(
        self, made: torch.Tensor, centroids: torch.Tensor, tokens: torch.Tensor, gates: torch.Tensor
    ) -> torch.Tensor:
        """Σ gates · (what was made of the choice's mean + the token − the mean), differentiably."""
        tokens_, changes = _floats(tokens), _floats(made) - _floats(centroids)
        weights = torch.where(self.where >= 0, gates, 0).to(tokens_.dtype)
        own = weights.sum(1, keepdim=True) * tokens_
        if not len(changes):
            return (own + changes.sum()).to(tokens.dtype)
        mixed = functional.embedding_bag(
            self.where.clamp(min=0), changes, mode="sum", per_sample_weights=weights
        )
        return (mixed + own).to(tokens.dtype)

    def error(self, made: torch.Tensor, centroids: torch.Tensor, tokens: torch.Tensor) -> float:
        """Relative error over the probes; 0 without any."""
        token, alone, shared = self.probes
        exact = made[alone].float()
        guess = (made[shared].float() - centroids[shared].float()) + tokens[token].float()
        norm = float(exact.norm())
        return float((guess - exact).norm()) / norm if norm else 0.0


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)


def vertices(coordinates: torch.Tensor) -> torch.Tensor:
    """Of [..., dims] the nearest vertex of the cross-polytope: twice the place of the largest
    magnitude, + 1 if negative."""
    place = coordinates.abs().argmax(-1, keepdim=True)
    return (2 * place + (coordinates.gather(-1, place) < 0)).squeeze(-1)


def turn(tokens: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """The first ``count`` coordinates of tokens [n, width] turned at random: H D₂ H D₁ x, in as
    many dimensions as it takes."""
    return tokens @ _directions(tokens.shape[1], count, seed, tokens.device).T


def walsh_hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal fast transform of [n, 2^m]: H_ab = H_a ⊗ H_b, so two products with small
    matrices."""
    size = x.shape[1]
    a = 1 << (size.bit_length() - 1) // 2
    left, right = hadamard(x.device, a), hadamard(x.device, size // a)
    return (left @ (x.reshape(-1, a, size // a) @ right)).reshape(len(x), size)


@cache
def _directions(width: int, count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Rows of H D₂ H D₁: so few are needed that one product with them is faster than transforming
    every token."""
    size = 1 << max(width - 1, count - 1, 1).bit_length()
    generator = torch.Generator().manual_seed(seed)
    first, second = (2.0 * torch.randint(2, (2, size), generator=generator) - 1).to(device)
    return (walsh_hadamard(walsh_hadamard(torch.eye(count, size, device=device)) * second) * first)[
        :, :width
    ].contiguous()
