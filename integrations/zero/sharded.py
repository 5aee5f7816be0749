"""Each rank its own part of the state, for ``torch.distributed.checkpoint``, to be loaded at any world size.

A parameter's state is one flat tensor in the checkpoint, of which a rank writes and reads the run that it owns. So neither
ranks nor buckets leave a trace there. Numbers of the parameter groups travel as tensors: nothing is pickled.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from commpress.integrations.zero.state import MASTER, like
from commpress.integrations.zero.stored_state import StoredState


class Slice(torch.Tensor):
    """A flat tensor of ``numel`` elements of which this rank holds ``local``, beginning at ``offset``, or nothing."""

    local: torch.Tensor
    offset: int

    @staticmethod
    def __new__(cls, local: torch.Tensor, offset: int, numel: int) -> "Slice":
        self = torch.Tensor._make_wrapper_subclass(cls, (numel,), dtype=local.dtype, device=local.device)
        self.local, self.offset = local, offset
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Slice({self.offset}:{self.offset + self.local.numel()} of {self.numel()})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"a Slice is for torch.distributed.checkpoint only, it cannot compute {func}")

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties.create_from_tensor(self.local), size=torch.Size([self.numel()])
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if not self.local.numel():
            return []
        return [ChunkStorageMetadata(torch.Size([self.offset]), torch.Size([self.local.numel()]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local


def sharded(owner: Any) -> dict[str, Any]:
    """{"state": {name: {key: Slice or tensor}}, "param_groups": {number: {option: tensor}}}; slices are views.

    A rank has entries only for what it owns.
    """
    materialize(owner)
    states: dict[str, dict[str, Any]] = {}
    for bucket in owner.buckets:
        for own in bucket.runs:
            numel, state = own.member.parameter.numel(), owner.inner.state[own.weight]
            one = states[own.member.name] = {key: Slice(state[key], own.start, numel) for key in owner.moments}
            one |= {key: torch.tensor(float(state[key]), dtype=torch.float64) for key in owner.scalars}
            if bucket.mastered:
                one[MASTER] = Slice(own.weight, own.start, numel)
    return {"state": states, "param_groups": {str(i): _numbers(g) for i, g in enumerate(owner.param_groups)}}


def load_sharded(owner: Any, state: dict[str, Any]) -> None:
    """Take over what ``torch.distributed.checkpoint.load`` has written into the result of ``sharded``."""
    for bucket in owner.buckets:
        bucket.trust()
        for own in bucket.runs:
            loaded, held = state["state"][own.member.name], owner.inner.state[own.weight]
            for key in owner.moments:
                if loaded[key].local is not held[key]:
                    held[key].copy_(loaded[key].local)
            held.update({key: like(example, loaded[key].item()) for key, example in owner.scalars.items()})
            owner.inner.state[own.weight] = held
            if bucket.mastered and loaded[MASTER].local is not own.weight:
                own.weight.copy_(loaded[MASTER].local)
    for number, group in enumerate(owner.param_groups):
        for key, tensor in state["param_groups"][str(number)].items():
            group[key] = _like(group[key], tensor)


def materialize(owner: Any) -> None:
    """Let the inner optimizer make the state of its first step, without the step."""
    if isinstance(owner.inner.state, StoredState):
        owner.inner.state.begin_all()
        return
    weights = [own.weight for bucket in owner.buckets for own in bucket.runs]
    weights = [weight for weight in weights if not owner.inner.state.get(weight)]
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    if weights:
        owner.inner.step()
    for weight, old in zip(weights, before, strict=True):
        weight.copy_(old)
        weight.grad = None
        for value in owner.inner.state[weight].values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def _numbers(group: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(value, dtype=torch.float64) for key, value in group.items() if _numeric(value)}


def _numeric(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(isinstance(v, (int, float)) for v in value)
    return isinstance(value, (int, float))


def _like(value: Any, tensor: torch.Tensor) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(type(v)(n) for v, n in zip(value, tensor.tolist(), strict=True))
    return type(value)(tensor.item())
