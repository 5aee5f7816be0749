"""Positions in data that survive a change of ranks: every sample of an epoch is read once.

    stream = π₀ π₁ π₂ …          πₑ: a permutation of all samples, drawn from seed and epoch
    a step of P ranks, b samples each, reads stream[p : p + P·b], rank r the r-th b of them
    once committed, p ← p + P·b

The position is one number, p. Samples that were read in advance, or in a step that was not
committed, are after it and are read again by the ranks of that time.
"""

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from commpress.collectives.change import Change
from commpress.errors import InvalidArgument, StateMismatch, check_counts


class ElasticSampler(Sampler[int]):
    """This rank's samples, from the last committed step to the end of the epoch.
    ``commpress.elastic`` commits and hands over; in your own loop call ``commit`` after each step,
    and iterate again after ``reform``.

    - ``data``: a dataset with a length; the samples are 0 … length − 1.
    - ``batch_size``: samples of one rank in one step: the DataLoader's batch size times the number
      of batches that a step accumulates.
    - ``shuffle``: read a new permutation in each epoch, from ``seed``; else read in order.
    - ``drop_last``: leave out the last samples of an epoch that are too few for a step of all
      ranks. If False, the first step of the next epoch begins with them, so that none is lost.
    - ``rank``, ``size``: rank and number of ranks, by default of ``process_group``.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if not hasattr(data, "__len__") or not len(data):
            lacks = "of no samples" if hasattr(data, "__len__") else "without a length"
            raise InvalidArgument(
                f"data is a {type(data).__name__} {lacks}, expected a dataset with numbered "
                "samples: a position in a stream cannot be handed over"
            )
        check_counts(seed=seed)
        check_counts(1, batch_size=batch_size, size=1 if size is None else size)
        if (rank is None) != (size is None):
            raise InvalidArgument(f"rank is {rank!r} and size {size!r}, expected both or neither")
        if rank is None or size is None:
            rank, size = (
                (dist.get_rank(process_group), dist.get_world_size(process_group))
                if dist.is_initialized()
                else (0, 1)
            )
        if not 0 <= rank < size:
            raise InvalidArgument(
                f"rank is {rank}, expected 0 to {size - 1} because size is {size}"
            )
        self.samples, self.batch_size, self.shuffle, self.drop_last = (
            len(data),
            batch_size,
            shuffle,
            drop_last,
        )
        self.seed, self.rank, self.size = seed, rank, size
        self.epoch = 0
        self.position = 0  # in the stream: committed steps have read all before it
        self.dropped = 0  # samples left out at the ends of epochs
        self._drawn: dict[int, torch.Tensor] = {}  # permutations in use, by epoch
        self._follow()

    @property
    def window(self) -> int:
        """Samples of one step of all ranks."""
        return self.batch_size * self.size

    @property
    def steps(self) -> int:
        """Steps to the end of the epoch."""
        return ((self.epoch + 1) * self.samples - self.position) // self.window

    def __len__(self) -> int:
        """Return this rank's samples to the end of the epoch."""
        return self.steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        """Iterate from the present committed position, for the present ranks; later commits do not
        move the iterator."""
        first = self.share.start
        return (
            index
            for at in range(first, first + self.steps * self.window, self.window)
            for index in self._indices(at)
        )

    @property
    def share(self) -> range:
        """Positions in the stream that this rank reads in the next step."""
        first = self.position + self.rank * self.batch_size
        return range(first, first + self.batch_size)

    def _indices(self, first: int) -> Iterator[int]:
        """Yield the samples of this rank in one step."""
        for at in range(first, first + self.batch_size):
            epoch, place = divmod(at, self.samples)
            yield int(self._permutation(epoch)[place]) if self.shuffle else place

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch not in self._drawn:
            self._drawn = {
                known: self._drawn[known] for known in self._drawn if abs(known - epoch) == 1
            }
            draws = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._drawn[epoch] = torch.randperm(self.samples, generator=draws)
        return self._drawn[epoch]

    # ------------------------------------------------------------ position

    def commit(self, steps: int = 1) -> None:
        """Record steps that all ranks have taken. After the last of an epoch the next one
        begins."""
        check_counts(steps=steps)
        if steps > self.steps:
            raise InvalidArgument(
                f"steps is {steps}, but epoch {self.epoch} has {self.steps} steps left: commit "
                "each step once"
            )
        self.position += steps * self.window
        self._follow()

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``, unless it is the present one: a run that resumes in the middle of an
        epoch continues there."""
        check_counts(epoch=epoch)
        if epoch != self.epoch:
            self.epoch, self.position = epoch, epoch * self.samples
            self._follow()

    def reform(self, change: Change) -> None:
        """Continue as one of the present ranks."""
        self.rank, self.size = change.rank, change.size
        self._follow()

    def _follow(self) -> None:
        """Begin the next epoch if this one has no room for a step of all ranks."""
        if self.drop_last and self.window > self.samples:
            raise InvalidArgument(
                f"drop_last is True and data has {self.samples} samples, but a step of {self.size} "
                f"ranks reads {self.window}, so an epoch would have no step: pass drop_last=False "
                "or a smaller batch_size"
            )
        while not self.steps:
            self.epoch += 1
            if self.drop_last:
                self.dropped += self.epoch * self.samples - self.position
                self.position = self.epoch * self.samples

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state, equal on every rank and valid for any number of them."""
        same = {"samples": self.samples, "shuffle": self.shuffle, "seed": self.seed}
        return same | {"epoch": self.epoch, "position": self.position, "dropped": self.dropped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("samples", "shuffle", "seed"):
            if state[name] != getattr(self, name):
                raise StateMismatch(
                    f"the sampler was saved with {name}={state[name]!r}, but this one has "
                    f"{getattr(self, name)!r}, so its position would mean other samples: construct "
                    "it with the same data and options"
                )
        self.epoch, self.position, self.dropped = (
            int(state["epoch"]),
            int(state["position"]),
            int(state["dropped"]),
        )
        self._follow()


class Batches:
    """Read a loader step by step: a batch for ``train_step``, or a list of batches if a step
    accumulates several.

    ``loader`` must have an ``ElasticSampler``; None: steps read nothing.
    """

    def __init__(self, loader: "DataLoader[Any] | None") -> None:
        self.loader, self.count = loader, 1
        self.sampler: ElasticSampler | None = None
        self._iterator: Iterator[Any] | None = None
        self._left = 0  # remaining steps of the iterator
        if loader is None:
            return
        sampler = getattr(loader, "sampler", None)
        if not isinstance(loader, DataLoader) or not isinstance(sampler, ElasticSampler):
            raise InvalidArgument(
                f"data is a {type(loader).__name__} with the sampler {type(sampler).__name__}, "
                "expected a DataLoader with a commpress.ElasticSampler, as in DataLoader(data, 32, "
                "sampler=commpress.ElasticSampler(data, 32)): only it knows which samples were "
                "read by committed steps"
            )
        size = loader.batch_size or 0
        if not size or sampler.batch_size % size:
            raise InvalidArgument(
                f"data has batches of {loader.batch_size} samples, but its sampler has "
                f"{sampler.batch_size} samples a step, expected the same number, or k times as "
                "many to accumulate gradients over k batches"
            )
        self.sampler, self.count = sampler, sampler.batch_size // size

    def ready(self) -> None:
        """Begin reading if it has not begun."""
        if self.loader is not None and self.sampler is not None and not self._left:
            self._left = self.sampler.steps
            self._iterator = iter(self.loader)

    def next(self) -> tuple[Any, ...]:
        """Return the batches of one step."""
        if self.loader is None:
            return ()
        self.ready()
        assert self._iterator is not None
        self._left -= 1
        batches = [next(self._iterator) for _ in range(self.count)]
        return (batches[0],) if self.count == 1 else (batches,)

    def restart(self) -> None:
        """Read again from the committed position, dropping batches read in advance."""
        self._iterator, self._left = None, 0


class Progress:
    """Committed steps and the position in the data: the loop's own part of the shared state."""

    def __init__(self, batches: Batches) -> None:
        self.step, self._batches = 0, batches

    def state_dict(self) -> dict[str, Any]:
        sampler = self._batches.sampler
        return {"step": self.step, "sampler": None if sampler is None else sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        if self._batches.sampler is not None and state["sampler"] is not None:
            self._batches.sampler.load_state_dict(state["sampler"])
