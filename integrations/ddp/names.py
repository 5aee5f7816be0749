"""Names of parameters, the keys of residuals: the user's, or numbers in the order of DDP's
buckets."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commpress.collectives.buckets import Span
from commpress.collectives.exchange import Tensors
from commpress.collectives.transports.factory import ranks_of
from commpress.errors import InvalidArgument
from commpress.optim.layout import is_held, refuse_averaging


def averaged_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters that ``ddp`` averages; raises ``InvalidArgument`` if some of them are not the same
    on all its ranks."""
    found = [
        (name, p)
        for name, p in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore
    ]
    refuse_averaging(found, ranks_of(ddp.process_group))
    held = [
        (name, p) for name, p in ddp.module.named_parameters() if name in ddp.parameters_to_ignore
    ]
    for name, p in held:
        is_held(name, p, ranks_of(ddp.process_group))  # raises if no rank would average it
    return found


class ParameterNames:
    """Names of the parameters that a user named, or that DDP has brought."""

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] = ()) -> None:
        parameters = dict(named_parameters)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.device = next((each.device for each in parameters.values()), None)
        # sizes of parameters known beforehand
        self.numels = {name: parameter.numel() for name, parameter in parameters.items()}
        # name → elements, in the order in which DDP first brought them
        self.brought: dict[str, int] = {}
        self._expected: list[str] = []

    def expect(self, names: Sequence[str]) -> None:
        """Expect unnamed parameters from DDP in this order, as in the saved run."""
        self._names, self._expected = {}, list(names)

    def known(self, parameter: torch.Tensor) -> str | None:
        return self._names.get(id(parameter))

    def of(self, parameter: torch.Tensor) -> str:
        name = self._names.get(id(parameter))
        if name is None:
            name = self._expected.pop(0) if self._expected else f"#{len(self._names):05d}"
            self._names[id(parameter)] = name
        self.brought.setdefault(name, parameter.numel())
        return name

    def tensors(self, bucket: dist.GradBucket) -> Tensors:
        """Return the spans of a bucket's gradients in its buffer, and their shapes."""
        parameters, spans, at = bucket.parameters(), [], 0
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            spans.append(Span(self.of(parameter), at, gradient.numel()))
            at += gradient.numel()
        if at != bucket.buffer().numel():
            raise InvalidArgument(
                f"a bucket of {bucket.buffer().numel()} elements has gradients of {at}: unknown "
                "layout"
            )
        return spans, [parameter.shape for parameter in parameters]
