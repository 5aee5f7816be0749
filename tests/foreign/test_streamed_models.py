"""Models of transformers, streamed from a store: what their own code saves is what the plain model
holds."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

import commpress
from commpress.errors import InvalidArgument
from small_store import open_store

GPT2 = GPT2Config(
    n_layer=2,
    n_head=2,
    n_embd=32,
    vocab_size=64,
    n_positions=16,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)
LLAMA = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=2,
    vocab_size=64,
    tie_word_embeddings=False,
)
for config in (GPT2, LLAMA):
    config.bos_token_id = config.eos_token_id = 0
KINDS = [(GPT2LMHeadModel, GPT2), (LlamaForCausalLM, LLAMA)]
IDS = torch.arange(24).view(2, 12)


def made(kind, config):
    torch.manual_seed(3)
    return kind(copy.deepcopy(config))


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", host="2MiB") as opened:
        yield opened


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(("kind", "config"), KINDS)
def test_what_transformers_saves_of_a_streamed_model(store, tmp_path, kind, config):
    net, other = made(kind, config), made(kind, config)
    commpress.stream(net, store=store)
    optimizer = commpress.Offloaded(net.parameters(), torch.optim.AdamW, store=store, lr=1e-2)
    twin = torch.optim.AdamW(other.parameters(), lr=1e-2)
    for _ in range(2):
        net(IDS, labels=IDS).loss.backward()
        other(IDS, labels=IDS).loss.backward()
        optimizer.step()
        twin.step()
        twin.zero_grad()
    assert same(net.state_dict(), other.state_dict())
    net.save_pretrained(tmp_path / "saved")
    assert same(kind.from_pretrained(tmp_path / "saved").state_dict(), other.state_dict())
    with pytest.raises(InvalidArgument, match="streamed model cannot be copied"):
        copy.deepcopy(net)


def test_a_checkpoint_of_the_trainer_of_a_streamed_model(store, tmp_path):
    results = []
    for streamed in (True, False):
        net = made(*KINDS[0])
        own = (torch.optim.AdamW, {"lr": 1e-2})
        if streamed:
            commpress.stream(net, store=store)
            own = (
                commpress.Offloaded,
                {"optimizer": torch.optim.AdamW, "store": store, "lr": 1e-2},
            )
        arguments = TrainingArguments(
            str(tmp_path / f"out-{streamed}"),
            max_steps=2,
            save_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
        )
        trainer = Trainer(
            net,
            arguments,
            train_dataset=[{"input_ids": ids, "labels": ids} for ids in IDS],
            optimizer_cls_and_kwargs=own,
        )
        trainer.train()
        results.append(
            GPT2LMHeadModel.from_pretrained(
                tmp_path / f"out-{streamed}" / "checkpoint-2"
            ).state_dict()
        )
    assert same(*results)


def test_adapters_of_peft_beside_a_streamed_model(store):
    peft = pytest.importorskip("peft")
    net, other = made(*KINDS[0]), made(*KINDS[0])
    commpress.stream(net, store=store)
    torch.manual_seed(4)
    adapted = peft.get_peft_model(
        net, peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    )
    torch.manual_seed(4)
    twin = peft.get_peft_model(
        other, peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    )
    assert torch.equal(adapted(IDS).logits, twin(IDS).logits)
    assert same(adapted.state_dict(), twin.state_dict())
    assert same(peft.get_peft_model_state_dict(adapted), peft.get_peft_model_state_dict(twin))


def test_deberta_whose_encoder_reads_a_table_of_positions(store):
    """``rel_embeddings`` is never called, only its weight is read: named in the first forward, and
    right with ``keep``."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DebertaV2Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        vocab_size=64,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        norm_rel_ebd="layer_norm",
        position_buckets=8,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    other, net, kept = (made(transformers.DebertaV2ForMaskedLM, config) for _ in range(3))
    commpress.stream(net, store=store)
    with pytest.raises(
        InvalidArgument,
        match=r"rel_embeddings.weight' of .* \(Embedding\) is read by .*LayerNorm\)",
    ):
        net(IDS)
    commpress.stream(kept, store=store, prefix="kept", keep=["deberta.encoder.rel_embeddings"])
    for _ in range(2):
        assert torch.equal(kept(IDS).logits, other(IDS).logits)
