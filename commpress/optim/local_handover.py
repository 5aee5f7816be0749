"""Local updates among other ranks: Θ and the outer state stay equal, residuals each rank's own,
rounds begin anew.

exchange that nobody has finished         left out; what was trained goes with the next one
exchange that some ranks have finished    counts: the others take its mean, or Θ where that has
                                          moved already
overlap under way                         arrives now
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from commpress.collectives.change import Change
from commpress.collectives.handover import Standing, cannot_follow
from commpress.collectives.scalars import gathered
from commpress.optim.fragments import Flight
from commpress.work import Steps

if TYPE_CHECKING:
    from commpress.optim.local_updates import LocalUpdates

# tensors of the last exchange; others are bases of codecs
MEAN, WEIGHTS, OUTER = "mean", "weights", "outer "


def reform(local: "LocalUpdates", change: Change) -> Steps[Callable[[], None]]:
    """Hand residuals over; the result makes the change, once all ranks have come as far."""
    if local.inner.together:
        raise cannot_follow(
            local, "inner has ranks that train together (they have shards, or average gradients)"
        )
    came = local.flight is not None and local.finished == local.exchanged
    mine = [0.0 if change.was is None else float(local.steps_done)]
    counts = yield from gathered(
        mine, transport=local.channel.transport, sequence=local.channel.take()
    )
    common = {"steps": int(counts.max()), "exchanged": local.finished, "taken": local.taken}
    for fragment in local.fragments:
        fragment.bring(local.exchanges)
    try:
        standing = yield from local.handover.steps(
            change,
            {"": local.exchanges.residuals},
            local.channel.workspace,
            shared=common,
            tensors=_last(local, came=came) | local.exchanges.bases,
        )
    except BaseException:
        for fragment in local.fragments:
            fragment.put_back(local.exchanges)
        raise
    return local.handover.with_it(lambda: _follow(local, change, standing, came=came))


def _last(local: "LocalUpdates", *, came: bool) -> dict[str, torch.Tensor]:
    """Outcome of the last exchange that this rank has finished: its mean, or the shared weights
    that this has moved."""
    if local.flight is not None and came:
        return {MEAN: local.flight.fragment.work}
    if local.moved is None or local.flight is not None:
        return {}
    fragment = local.fragments[local.moved]
    with fragment.opened():
        outer = {
            OUTER + name: each.float().clone()
            for name, each in fragment.state.items()
            if torch.is_tensor(each)
        }
        return {WEIGHTS: fragment.weights.clone()} | outer


def _follow(local: "LocalUpdates", change: Change, standing: Standing, *, came: bool) -> None:
    """Begin a round as all others do. Who is new gets the rest from ``load_shared_state``."""
    given, common = standing.tensors, standing.shared
    flight, local.flight = local.flight, None
    if flight is not None and change.was is not None:
        if MEAN in given:
            flight.fragment.work.copy_(given[MEAN])
            local.land(flight, taken=common["taken"])
        elif WEIGHTS in given:
            _move(local, flight, given)
        elif came:
            local.land(flight, taken=local.taken)
        else:
            flight.give_up()
    if flight is not None:
        flight.fragment.detach(local.exchanges)
    local.exchanges.bases.update(
        {n: t for n, t in given.items() if n not in (MEAN, WEIGHTS) and not n.startswith(OUTER)}
    )
    local.channel.workspace.clear()
    local.exchanges.reform(local.channel.size)
    local.exact.reform(local.channel.size)
    for fragment in local.fragments:
        fragment.put_back(local.exchanges)
    local.counters.lost_ranks = local.handover.lost
    local.begin_at(common["steps"], common["exchanged"])


def _move(local: "LocalUpdates", flight: Flight, given: dict[str, Any]) -> None:
    """Θ := that of a rank where the mean has arrived; then this rank's weights follow as if it had
    arrived here."""
    fragment = flight.fragment
    with fragment.opened(write=True):
        fragment.weights.copy_(given[WEIGHTS])
        for name, each in given.items():
            if name.startswith(OUTER):
                here = fragment.state.get(name.removeprefix(OUTER))
                if torch.is_tensor(here):
                    here.copy_(each)
                else:
                    fragment.state[name.removeprefix(OUTER)] = each.to(fragment.weights.device)
    local.land(flight, taken=False)
