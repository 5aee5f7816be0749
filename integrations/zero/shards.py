"""Parameters that are cut over ranks already, as FSDP2 leaves them: each rank treats what it has of
them (DTensors)."""

from collections.abc import Iterable
from typing import Any

from commpress.collectives.channel import Channel
from commpress.collectives.scalars import gathered
from commpress.errors import InvalidArgument
from commpress.optim.layout import is_cut


class Cut:
    """Ranks over which ``parameters`` are cut, a channel among them; collective. For a norm all
    must be cut in the same way."""

    def __init__(self, parameters: Iterable[Any], *, clipped: bool) -> None:
        found = dict.fromkeys(
            (p.device_mesh, p.placements) if is_cut(p) else None for p in parameters
        )
        if clipped and len(found) > 1:
            raise InvalidArgument(
                "max_grad_norm with parameters that are cut over ranks in different ways, or only "
                "some of them: leave it out and clip with torch.nn.utils.clip_grad_norm_"
            )
        self._channels = [
            (Channel.among(mesh.get_group(number)), mesh.device_type)
            for mesh, placements in filter(None, found)
            for number, placement in enumerate(placements)
            # of FSDP2 under tensor parallelism a _StridedShard, which says it is no shard
            if not placement.is_replicate()
        ]

    def every(self, value: float) -> list[float]:
        """Each rank's ``value`` that has other elements; collective."""
        values = [value]
        for channel, device in self._channels:
            steps = gathered(
                values, transport=channel.transport, sequence=channel.take(), device=device
            )
            values = channel.run(steps).T.ravel().tolist()
        return values
