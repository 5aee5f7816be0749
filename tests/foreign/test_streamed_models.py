"""Models of transformers, streamed from a store: what their own code saves is what the plain model
holds."""

import contextlib
import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Trainer

import commpress
import commpress.hf
from commpress.errors import InvalidArgument
from small_store import open_store
from tiny_gpt2 import arguments
from tiny_models import BERT, GPT2, MODELS, loss_of, model

ENDS = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 64}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
KINDS = {
    "GPT2LMHeadModel": GPT2 | ENDS | {"n_head": 2, "n_embd": 32, "n_positions": 16},
    "LlamaForCausalLM": HEADS | ENDS | {"intermediate_size": 64, "tie_word_embeddings": False},
}
IDS = torch.arange(24).view(2, 12)


def made(kind="GPT2LMHeadModel", **sizes):
    torch.manual_seed(3)
    return model(kind, **sizes or KINDS[kind])


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", host="2MiB") as opened:
        yield opened


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("gradients", ["parameters", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saves_of_a_streamed_model(store, tmp_path, kind, gradients):
    net, other = made(kind), made(kind)
    commpress.stream(net, store=store, chunk_mb=0.01)
    on_disk = {"store": store, "chunk_mb": 0.01, "resident": {"host": 0}}
    optimizer = commpress.Offloaded(
        net.parameters(), torch.optim.AdamW, lr=1e-2, gradients=gradients, **on_disk
    )
    twin = torch.optim.AdamW(other.parameters(), lr=1e-2)
    for _ in range(2):
        net(IDS, labels=IDS).loss.backward()
        other(IDS, labels=IDS).loss.backward()
        optimizer.step()
        twin.step()
        twin.zero_grad()
    assert same(net.state_dict(), other.state_dict())
    net.save_pretrained(tmp_path / "saved")
    assert same(type(other).from_pretrained(tmp_path / "saved").state_dict(), other.state_dict())
    with pytest.raises(InvalidArgument, match="streamed model cannot be copied"):
        copy.deepcopy(net)


def test_a_checkpoint_of_the_trainer_of_a_streamed_model(store, tmp_path):
    results = []
    for streamed in (True, False):
        net, folder = made(), tmp_path / f"out-{streamed}"
        own = (torch.optim.AdamW, {"lr": 1e-2})
        if streamed:
            commpress.stream(net, store=store)
            place = {"optimizer": torch.optim.AdamW, "store": store}
            own = (commpress.Offloaded, {**place, "lr": 1e-2})
        options = {"max_steps": 2, "save_steps": 2, "max_grad_norm": 0.0}
        Trainer(
            net,
            arguments(folder, per_device_train_batch_size=8, **options),
            train_dataset=[{"input_ids": ids, "labels": ids} for ids in IDS],
            optimizer_cls_and_kwargs=own,
        ).train()
        results.append(type(net).from_pretrained(folder / "checkpoint-2").state_dict())
    assert same(*results)


@pytest.mark.parametrize("counts", [True, False])
def test_a_trainer_whose_micro_batches_pass_together(store, tmp_path, counts):
    """Four batches in steps of three and one, with masked labels; the loss is a mean over all
    labels of a step, or of the losses of its batches."""

    class Together(commpress.hf.Accumulating, Trainer):
        pass

    data = [
        {"input_ids": ids, "labels": ids.where(ids > 5 * n, -100)} for n in (0, 1) for ids in IDS
    ]
    found = []
    for kind in (Together, Trainer):
        net = made("LlamaForCausalLM")
        net.config.use_cache = False
        own = (torch.optim.AdamW, {"lr": 1e-2})
        if kind is Together:
            commpress.stream(net, store=store)
            place = {"optimizer": torch.optim.AdamW, "store": store}
            own = (commpress.Offloaded, {**place, "lr": 1e-2})
        options = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0, "logging_steps": 1}
        trainer = kind(
            net,
            arguments(tmp_path / kind.__name__, per_device_train_batch_size=1, **options),
            train_dataset=data,
            optimizer_cls_and_kwargs=own,
        )
        trainer.model_accepts_loss_kwargs = counts
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        found.append((losses, net.state_dict()))
    (losses, state), (others, other) = found
    assert len(losses) == 6
    assert losses == others
    assert same(state, other)


def test_a_trainer_of_a_model_in_memory_is_refused(tmp_path):
    class Together(commpress.hf.Accumulating, Trainer):
        pass

    data = [{"input_ids": ids, "labels": ids} for ids in IDS]
    trainer = Together(made(), arguments(tmp_path), train_dataset=data)
    with pytest.raises(InvalidArgument, match=r"call commpress.stream\(model, store="):
        trainer.train()


def test_adapters_of_peft_beside_a_streamed_model(store):
    peft = pytest.importorskip("peft")
    net, other = made(), made()
    commpress.stream(net, store=store)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    torch.manual_seed(4)
    adapted = peft.get_peft_model(net, lora)
    torch.manual_seed(4)
    twin = peft.get_peft_model(other, copy.deepcopy(lora))
    assert torch.equal(adapted(IDS).logits, twin(IDS).logits)
    assert same(adapted.state_dict(), twin.state_dict())
    assert same(peft.get_peft_model_state_dict(adapted), peft.get_peft_model_state_dict(twin))


def test_deberta_whose_encoder_reads_a_table_of_positions(store):
    """``rel_embeddings`` is never called, only its weight is read: named in the first forward, and
    right with ``keep``."""
    sizes = HEADS | BERT | {"vocab_size": 64, "intermediate_size": 64, "position_buckets": 8}
    sizes |= {"pos_att_type": ["p2c", "c2p"], "relative_attention": True}
    sizes |= {"norm_rel_ebd": "layer_norm", "max_position_embeddings": 16}
    other, net, kept = (made("DebertaV2ForMaskedLM", **sizes) for _ in range(3))
    commpress.stream(net, store=store)
    with pytest.raises(
        InvalidArgument,
        match=r"rel_embeddings.weight' of .* \(Embedding\) is read by .*LayerNorm\)",
    ):
        net(IDS)
    commpress.stream(kept, store=store, prefix="kept", keep=["deberta.encoder.rel_embeddings"])
    for _ in range(2):
        assert torch.equal(kept(IDS).logits, other(IDS).logits)


@pytest.mark.parametrize("again", [False, True])
def test_saved_tensors_of_transformers_in_a_store(store, again):
    """Dropout is on, and so is, in one case, transformers' own checkpointing."""
    found = []
    tier = commpress.activations(store, budget="64KiB", min_bytes=0)
    for where in (tier, contextlib.nullcontext()):
        net = made("GPT2LMHeadModel", **KINDS["GPT2LMHeadModel"] | {"resid_pdrop": 0.1}).train()
        if again:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        with where:
            loss = net(IDS, labels=IDS).loss
        loss.backward()
        found.append({name: p.grad for name, p in net.named_parameters()})
    assert same(*found)
    tier.settle()
    assert tier.counters.saved
    assert not len(store)


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_weights_of_gpt2_trained_with_saved_tensors_in_a_codec(store, codec):
    """Exact exponents change no bit; eight bits leave no element asleep, and none moves far."""
    lr, ends = 1e-3, []
    tier = commpress.activations(store, budget=0, min_bytes=0, codec=codec)
    for where in (tier, contextlib.nullcontext()):
        net = made("GPT2LMHeadModel", **KINDS["GPT2LMHeadModel"])
        start = {name: p.detach().clone() for name, p in net.named_parameters()}
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0)
        for _ in range(6):
            with where:
                loss = net(IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append({name: p.detach() - start[name] for name, p in net.named_parameters()})
    ours, plain = ends
    assert tier.counters.written < (0.9 if codec == "exact" else 0.3) * tier.counters.saved
    for name, moved in plain.items():
        assert codec != "exact" or torch.equal(ours[name], moved), name
        assert not ((ours[name] == 0) & (moved.abs() > lr)).any(), name
        assert float(ours[name].abs().max()) <= 7 * lr, name


@pytest.mark.parametrize("kind", MODELS)
def test_micro_batches_together_through_the_blocks_of_transformers(tmp_path, kind):
    """Decoders, encoders, both, and a mixture of experts: losses equal, gradients up to the
    order of sums where a tensor has several uses."""
    torch.manual_seed(0)
    net = MODELS[kind]()
    for part in net.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False
    other = copy.deepcopy(net)
    with open_store(tmp_path / "store", host="64MiB") as store:
        streamed = commpress.stream(net, store=store)
        optimizer = commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, lr=1.0)
        got = streamed.accumulate(lambda seed: loss_of(net, seed, early=False), range(3))
        optimizer.step()
        wanted = [loss_of(other, seed, early=False) for seed in range(3)]
        sum(wanted).backward()
        assert got == [loss.detach() for loss in wanted]
        state = streamed.state_dict()
        for name, p in other.named_parameters():
            if p.grad is not None:
                moved = p.detach() - p.grad
                torch.testing.assert_close(state[name], moved, rtol=1e-6, atol=3e-7, msg=name)


def test_a_cache_of_keys_is_named(store):
    """It would hide keys of the forward from the backward, without another loss."""
    net = made().train()
    streamed = commpress.stream(net, store=store)
    with pytest.raises(
        InvalidArgument, match=r"'transformer.h.0' changes its arguments.*use_cache=False"
    ):
        streamed.accumulate(lambda ids: net(ids, labels=ids).loss, [IDS])
