"""Tensors as plain memory of the host, which MPI reads and writes; tensors that are something else go by way of a copy."""

from collections.abc import Sequence

import torch

from commpress.errors import InvalidArgument


class Landing:
    """Where what comes for a tensor lands, as plain numbers side by side: in its own memory if that is so, else beside it.

    ``space`` begins with the tensor's numbers.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, flat = tensor, flat_of(tensor)
        self.space = numbers_of(flat)
        self.beside = flat.data_ptr() != tensor.data_ptr()

    def settle(self) -> None:
        if self.beside:
            self.tensor.detach().copy_(self.space.view(self.tensor.dtype).view(self.tensor.shape))


class Joined:
    """Several tensors in one."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.space = torch.cat([numbers_of(flat_of(t)) for t in tensors])

    def settle(self) -> None:
        for tensor, part in zip(self.tensors, self.space.split([t.numel() for t in self.tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.dtype).view(tensor.shape))


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in order, in memory of the host: its own, or a copy."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)


def numbers_of(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as numbers that can be added: truth values as bytes."""
    return flat.view(torch.uint8) if flat.dtype == torch.bool else flat


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise InvalidArgument(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: what arrives must lie side by side")
    return tensor
