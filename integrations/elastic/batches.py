"""Batches of a DataLoader, step by step, and again from the committed position after the ranks have
changed."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from commpress.errors import InvalidArgument
from commpress.integrations.elastic.sampler import ElasticSampler


class Batches:
    """Reads of a loader, step by step: a batch, or a list of them where a step accumulates several,
    for ``train_step``.

    ``loader`` has an ``ElasticSampler``; None: steps read nothing.
    """

    def __init__(self, loader: "DataLoader[Any] | None") -> None:
        self.loader, self.count = loader, 1
        self.sampler: ElasticSampler | None = None
        self._iterator: Iterator[Any] | None = None
        self._left = 0  # steps that the iterator has
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
                f"data has batches of {loader.batch_size} and its sampler {sampler.batch_size} "
                "samples a step, expected the same, or for gradients accumulated over k batches k "
                "times as many"
            )
        self.sampler, self.count = sampler, sampler.batch_size // size

    def ready(self) -> None:
        """Begin to read where nobody has begun."""
        if self.loader is not None and self.sampler is not None and not self._left:
            self._left = self.sampler.steps
            self._iterator = iter(self.loader)

    def next(self) -> tuple[Any, ...]:
        """Of one step."""
        if self.loader is None:
            return ()
        self.ready()
        assert self._iterator is not None
        self._left -= 1
        batches = [next(self._iterator) for _ in range(self.count)]
        return (batches[0],) if self.count == 1 else (batches,)

    def restart(self) -> None:
        """Read again what was read ahead, from the committed position."""
        self._iterator, self._left = None, 0


class Progress:
    """Steps committed, and the position in the data: the loop's own part of what all ranks
    share."""

    def __init__(self, batches: Batches) -> None:
        self.step, self._batches = 0, batches

    def state_dict(self) -> dict[str, Any]:
        sampler = self._batches.sampler
        return {"step": self.step, "sampler": None if sampler is None else sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])
        if self._batches.sampler is not None and state["sampler"] is not None:
            self._batches.sampler.load_state_dict(state["sampler"])
