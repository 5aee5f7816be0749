"""Models of others parked between steps: GPT-2 of transformers, with an output layer that is its
embedding, whole and with LoRA of peft."""

import copy

import pytest
import torch

import commpress
from tiny_gpt2 import Words, model


def with_lora(gpt):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(gpt, peft.LoraConfig(r=4, target_modules=["c_attn"]))


@pytest.mark.parametrize("lora", [False, True])
def test_gpt2_has_the_same_bits(tmp_path, lora):
    found = []
    words = [Words(64)[i]["input_ids"] for i in range(64)]
    for parks in (False, True):
        net = with_lora(model(2)) if lora else model(2)
        optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), 1e-3)
        park = commpress.parked(net, optimizer, store=tmp_path / "park")
        for step in range(4):
            ids = torch.stack(words[8 * step : 8 * step + 8])
            net(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if parks:
                with park:
                    assert park.counters.freed
        found.append(copy.deepcopy([net.state_dict(), optimizer.state_dict()["state"]]))
    ours, twin = found[1], found[0]
    assert all(torch.equal(value, twin[0][name]) for name, value in ours[0].items())
    for i, entries in ours[1].items():
        assert all(torch.equal(value, twin[1][i][name]) for name, value in entries.items())
    if lora:  # the frozen weights were written once
        assert park.counters.written < park.counters.unchanged
    park.settle()
    net = with_lora(model(2)) if lora else model(2)
    other = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), 1e-3)
    commpress.load_parked(net, other, store=tmp_path / "park")
    assert all(torch.equal(value, twin[0][name]) for name, value in net.state_dict().items())


def test_transformers_weights_from_a_file_can_be_parked(tmp_path):
    """``from_pretrained`` may leave weights in memory that is mapped from the file."""
    model(2).save_pretrained(tmp_path / "saved")
    net = type(model(2)).from_pretrained(tmp_path / "saved")
    wanted = copy.deepcopy(net.state_dict())
    for _ in range(2):
        with commpress.parked(net, store=tmp_path / "park"):
            pass
        assert all(torch.equal(value, wanted[name]) for name, value in net.state_dict().items())


def test_accelerates_optimizer_is_parked(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    net = model(1)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    net, prepared = accelerator.prepare(net, optimizer)
    ids = torch.stack([Words(4)[i]["input_ids"] for i in range(4)])
    for _ in range(2):
        loss = net(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        prepared.step()
        prepared.zero_grad()
        with commpress.parked(net, prepared, store=tmp_path / "park") as park:
            assert park.counters.freed > 2 * sum(p.nbytes for p in net.parameters())
    assert all(torch.isfinite(p).all() for p in net.parameters())
