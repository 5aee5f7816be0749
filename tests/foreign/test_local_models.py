"""Models of transformers, peft and torch under local updates: what is trained moves, alike on every
rank, and nothing else."""

import copy

import pytest
import torch
from torch import nn

import commpress
import tiny_models
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument
from local_twin import options_of


def trained(make, loss_of, size, *, inner=None, steps=12, **options):
    """(weights at first, models of all ranks, their local updates, losses of the first and the last
    step)."""
    torch.manual_seed(0)
    first, switch = make(), Loopback(size)
    models = [copy.deepcopy(first) for _ in range(size)]
    options = {"every": 4, "codec": "int4", "fragments": 2, "overlap": 1} | options
    inner = inner or (lambda model: torch.optim.AdamW(model.named_parameters(), lr=3e-3))
    local = [
        commpress.LocalUpdates(inner(m), process_group=switch.transport(r), **options_of(**options))
        for r, m in enumerate(models)
    ]
    losses = []
    for step in range(steps):
        mine = [loss_of(model, 10 * (step % 4) + rank) for rank, model in enumerate(models)]
        torch.stack(mine).sum().backward()
        losses.append(float(sum(mine).detach()) / size)
        for one in local:
            for optimizer in one.inner:
                optimizer.step()
        simulate([one.steps() for one in local])
        for one in local:
            one.zero_grad()
    simulate([one.draining() for one in local])
    for model in models[1:]:
        assert all(
            torch.equal(a, b)
            for a, b in zip(models[0].parameters(), model.parameters(), strict=True)
        )
    return dict(first.named_parameters()), models, local, losses


def tiny_loss(model, seed):
    return tiny_models.loss_of(model, seed, early=False)


@pytest.mark.parametrize(
    ("kind", "size", "dtype"),
    [
        ("gpt2", 2, torch.float32),
        ("t5", 3, torch.float32),
        ("vit", 1, torch.float32),
        ("gpt2", 2, torch.bfloat16),
    ],
)
def test_every_tensor_of_a_transformer_moves(kind, size, dtype):
    """T5's embedding is tied three times: it is one tensor, exchanged once."""
    before, models, local, losses = trained(
        lambda: tiny_models.MODELS[kind]().to(dtype), tiny_loss, size
    )
    assert losses[-1] < losses[0] - 0.3
    for name, p in models[0].named_parameters():
        assert not torch.equal(p, before[name]), name
        assert torch.isfinite(p).all(), name
    assert sum(f.numel for f in local[0].fragments) == sum(
        p.numel() for p in models[0].parameters()
    )


def lora():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        tiny_models.gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    )


def test_adapters_are_exchanged_without_the_weights_they_adapt():
    """The optimizer was given all parameters, as trainers do."""
    before, models, local, _ = trained(lora, tiny_loss, 2)
    moved = {name for name, p in models[0].named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert sum(f.numel for f in local[0].fragments) == sum(
        p.numel() for p in models[0].parameters() if p.requires_grad
    )


def test_a_layer_that_thaws_is_named_and_a_new_object_trains_it():
    _, models, local, _ = trained(lora, tiny_loss, 2, steps=1)
    base = next(p for name, p in models[0].named_parameters() if "wte" in name)
    base.requires_grad_()
    with pytest.raises(InvalidArgument, match=r"unfrozen.*make a new LocalUpdates"):
        next(local[0].steps(), None)


def test_groups_keep_their_rates_and_a_parameter_without_elements_is_welcome():
    """A group of rate 0 stays where it is; batch normalisation's buffers are each rank's own."""

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
            self.nothing = nn.Parameter(torch.empty(0, 3))

    def loss_of(model, seed):
        return (
            model(torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))).square().mean()
        )

    def inner(model):
        return torch.optim.SGD(
            [
                {"params": [*model[0].parameters(), model.nothing]},
                {"params": model[3].parameters(), "lr": 0.0},
                {"params": model[1].parameters(), "lr": 0.5},
            ],
            lr=0.1,
        )

    before, models, _, _ = trained(Net, loss_of, 3, inner=inner, min_numel=0, codec="sign")
    after = dict(models[0].named_parameters())
    assert [name for name in before if torch.equal(after[name], before[name])] == [
        "nothing",
        "3.weight",
        "3.bias",
    ]
    assert not torch.equal(models[0][1].running_mean, models[1][1].running_mean)


@pytest.mark.parametrize("named", ["labels", "attention_mask", "input_ids"])
def test_the_trainer_counts_tokens(named, tmp_path):
    """Of both batches that a step accumulates, and of none of an evaluation."""
    from transformers import Trainer, TrainerCallback

    from tiny_gpt2 import arguments, model

    class Ragged(torch.utils.data.Dataset):
        def __len__(self):
            return 16

        def __getitem__(self, index):
            ids = torch.randint(50, (16,), generator=torch.Generator().manual_seed(index))
            rest = torch.arange(16) > 9
            more = {"labels": ids.masked_fill(rest, -100), "attention_mask": (~rest).long()}
            return {"input_ids": ids, named: more.get(named, ids)}

    class Seen(TrainerCallback):
        def on_step_end(self, *given, **things):
            counts.append(local.local.fragments[0].tokens)

    class Unlabelled(Trainer):
        def compute_loss(self, model, inputs, **given):
            return model(**inputs).logits.square().mean()

    counts, local = [], commpress.hf.LocalTraining(every=1000, weight="tokens", codec=None)
    given = arguments(
        tmp_path,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = Unlabelled(model(), given, train_dataset=Ragged(), callbacks=[local, Seen()])
    trainer.train()
    assert counts == [4 * {"input_ids": 16}.get(named, 10) * steps for steps in (1, 2, 3)]
    trainer.model.train()(torch.ones(1, 4, dtype=torch.long))
    assert local.local.counters.steps == 3


def test_what_has_no_tokens_is_refused():
    from commpress.integrations.trainers.hf import tokens_of

    with pytest.raises(InvalidArgument, match=r"tokens=.*steps"):
        tokens_of({"pixel_values": torch.ones(2, 3, 8, 8)})
