"""Models that nobody here wrote, under every compressed optimizer: no weight jumps, and none stands
still that Adam moves.

Two ranks in one process go through the freeze. Then tensors are unfrozen, sequences become longer,
and tokens and experts turn up that the warm-up has not seen.
"""

import copy
from functools import cache
from itertools import product

import pytest
import torch

import commpress
from commpress.collectives.transports.loopback import Loopback, simulate
from tiny_models import MODELS, loss_of
from variants import every_second, seldom

RANKS, WARMUP, LATE, STEPS, PEAK = 2, 12, 18, 48, 1e-3
LEARNING_RATES = 20  # a step may move an element this far

EXACT = {"exact_steps": WARMUP}
OPTIMIZERS = {
    "OneBitAdam": (commpress.OneBitAdam, EXACT),
    "OneBitAdam-int8": (commpress.OneBitAdam, EXACT | {"codec": "int8", "exact_codec": "int8"}),
    "ZeroOneAdam": (commpress.ZeroOneAdam, {"variance_updates": 4}),
    "ZeroOneAdam-every": (commpress.ZeroOneAdam, {"sync": "every"}),
    "OneBitLamb": (commpress.OneBitLamb, EXACT),
    "OneBitLamb-frozen": (commpress.OneBitLamb, EXACT | {"rates": "frozen"}),
    "ShardedOneBitAdam": (commpress.ShardedOneBitAdam, EXACT),
    "ShardedZeroOneAdam": (commpress.ShardedZeroOneAdam, {"variance_updates": 4}),
}
WHOLE = {  # codecs of whole tensors, of one rank or of a rank for every matrix
    f"{name}-{kind}": (OPTIMIZERS[name][0], OPTIMIZERS[name][1] | {"codec": codec})
    for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
    for kind, codec in {
        "powersgd-4": "powersgd-4",
        "ranks": commpress.PerLayer("powersgd-4+fp8", 4),
    }.items()
}
LAMBS = {name for name in (*OPTIMIZERS, *WHOLE) if "Lamb" in name}


def rate(step):
    """A short rise, then a fall to a third, so that 0/1 Adam takes local steps."""
    return PEAK * min((step + 1) / 4, 1 - 0.67 * max(step - 4, 0) / STEPS)


def late(model):
    """A whole block, and the biases and norms of another: unfrozen at step LATE."""
    names = [name for name, _ in model.named_parameters()]
    blocks = sorted({name.split(".1.")[0] + ".1." for name in names if ".1." in name})
    few = [name for name in names if ".0." in name and name.endswith("bias")]
    return {name for name in names if any(name.startswith(block) for block in blocks)} | set(few)


def gradients(model, step, rank, unfrozen):
    for name, p in model.named_parameters():
        p.requires_grad_(step >= LATE or name not in unfrozen)
        p.grad = None
    loss_of(model, 1000 * rank + step, early=step < LATE).backward()


@cache
def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]()


@cache
def moved_by_exact_steps(name, lamb):
    """From one process with mean gradients: the largest move of each tensor in a step, and which
    elements moved at all."""
    model = copy.deepcopy(model_of(name))
    unfrozen = late(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=PEAK, weight_decay=0.0)
    if lamb:
        alone = Loopback(1).transport(0)
        optimizer = commpress.OneBitLamb(parameters.values(), lr=PEAK, transport=alone)
    start = {key: p.detach().clone() for key, p in parameters.items()}
    largest, asleep = dict.fromkeys(parameters, 0.0), {}
    for step in range(STEPS):
        if step == LATE:
            asleep = {key: p.detach() == start[key] for key, p in parameters.items()}
        sums = {}
        for rank in range(RANKS):
            gradients(model, step, rank, unfrozen)
            for key, p in parameters.items():
                if p.grad is not None:
                    sums[key] = sums.get(key, 0) + p.grad / RANKS
        for key, p in parameters.items():
            p.grad = sums.get(key)
        optimizer.param_groups[0]["lr"] = rate(step)
        before = {key: p.detach().clone() for key, p in parameters.items()}
        optimizer.step()
        for key, p in parameters.items():
            largest[key] = max(largest[key], float((p.detach() - before[key]).abs().max()))
    moved = {key: (p.detach() - start[key]).abs() > PEAK for key, p in parameters.items()}
    return largest, moved, {key: moved[key] & asleep[key] for key in moved}


@pytest.mark.parametrize("name", every_second(MODELS))
def test_the_scenario_wakes_tensors_rows_and_elements(name):
    _, moved, woken = moved_by_exact_steps(name, False)
    whole = [key for key in woken if woken[key].any() and bool((woken[key] == moved[key]).all())]
    assert whole, "no tensor moves for the first time after the freeze"
    if name != "vit":
        assert any(
            woken[key].any() and not bool(woken[key].all())
            for key in woken
            if key not in late(model_of(name))
        )


# the others: what wakes tensors, rows and elements is in tests/optim/test_tensor_states.py
OFTEN = [
    ("OneBitAdam", "gpt2"),
    ("ZeroOneAdam", "bert"),
    ("ZeroOneAdam-every", "opt"),
    ("OneBitLamb-powersgd-4", "gpt2"),
    ("OneBitAdam-ranks", "gpt2"),
]
OTHERS = [*product(OPTIMIZERS, MODELS), *product(WHOLE, ("gpt2", "bert", "llama"))]


@pytest.mark.parametrize(
    ("optimizer", "name"), [*OFTEN, *(seldom(*pair) for pair in OTHERS if pair not in OFTEN)]
)
def test_no_weight_jumps_and_none_stands_still(optimizer, name):
    models = [copy.deepcopy(model_of(name)) for _ in range(RANKS)]
    unfrozen = late(models[0])
    parameters = [dict(model.named_parameters()) for model in models]
    kind, options = (OPTIMIZERS | WHOLE)[optimizer]
    optimizers = [
        kind(parameters[rank].values(), lr=PEAK, transport=transport, **options)
        for rank, transport in enumerate(Loopback(RANKS).transports())
    ]
    largest, moved, _ = moved_by_exact_steps(name, optimizer in LAMBS)
    start = {key: p.detach().clone() for key, p in parameters[0].items()}
    anchor, allowed = start, 0.0
    stirred = {key: torch.zeros_like(p, dtype=torch.bool) for key, p in start.items()}
    for step in range(STEPS):
        for rank, model in enumerate(models):
            gradients(model, step, rank, unfrozen)
            optimizers[rank].param_groups[0]["lr"] = rate(step)
        with torch.no_grad():
            assert simulate([o.steps() for o in optimizers]) == [True] * RANKS
        allowed += LEARNING_RATES * rate(step) / (1 - 0.9 ** (step + 1))
        for rank in range(RANKS):
            for key, p in parameters[rank].items():
                stirred[key] |= p.detach() != start[key]
                bound = LEARNING_RATES * largest[key] if optimizer in LAMBS else allowed
                move = float((p.detach() - anchor[key]).abs().max())
                assert move <= bound, (
                    f"step {step} moves {key} by {move:g}, {move / max(bound, 1e-12):.2g} times "
                    "the bound"
                )
        if all(torch.equal(p, parameters[1][key]) for key, p in parameters[0].items()):
            anchor, allowed = {key: p.detach().clone() for key, p in parameters[0].items()}, 0.0
    chosen = [o.choice.state().get("rules", {}) for o in optimizers]
    assert all(rules == chosen[0] for rules in chosen)
    assert len(set(chosen[0].values())) > 1 or "ranks" not in optimizer, "matrices differ"
    assert allowed == 0.0 or "ZeroOne" in optimizer, "the ranks' weights differ"
    still = {key: int((moved[key] & ~stirred[key]).sum()) for key in start}
    assert not any(still.values()), {key: count for key, count in still.items() if count}
