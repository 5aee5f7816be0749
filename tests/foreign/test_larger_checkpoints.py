"""Checkpoints of transformers, read shard by shard into a streamed model that was never in
memory."""

import json
import shutil
import sys
from pathlib import Path
from subprocess import run

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from transformers import LlamaForCausalLM

import commpress
from commpress.errors import InvalidArgument, StateMismatch
from small_store import open_store
from tiny_models import model

IDS = torch.arange(24).view(2, 12)
HERE = Path(__file__)


def llama(tied=True):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "tie_word_embeddings": tied}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    return model("LlamaForCausalLM", **sizes, **heads, **ends)


def on_meta(tied=True, dtype=torch.float32):
    with torch.device("meta"):
        return llama(tied).to(dtype)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", host="2MiB") as opened:
        yield opened


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{tied or not: a folder of several shards}."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for tied in (True, False):
        torch.manual_seed(3)
        llama(tied).save_pretrained(folder / str(tied), max_shard_size="30KB")
        assert len(list((folder / str(tied)).glob("model-*.safetensors"))) >= 3
    return folder


def steps(net, optimizer):
    losses = []
    for _ in range(3):
        loss = net(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tied", [True, False])
def test_shards_train_as_the_whole_model_does(store, tmp_path, checkpoints, tied):
    """Fine-tuned from the meta device, saved, and taken by transformers: the bits of the model in
    memory."""
    plain, net = LlamaForCausalLM.from_pretrained(checkpoints / str(tied)), on_meta(tied)
    streamed = commpress.stream(net, store=store, weights=checkpoints / str(tied))
    assert not any(group.present for group in streamed.groups)
    wanted = steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    assert (
        steps(net, commpress.Offloaded(net.parameters(), torch.optim.AdamW, store=store, lr=1e-2))
        == wanted
    )
    shutil.copy(checkpoints / str(tied) / "config.json", tmp_path)
    streamed.save(tmp_path / "model.safetensors")
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in plain.state_dict().items()
    )


def test_a_store_that_has_values_keeps_them(store, checkpoints):
    net = on_meta()
    commpress.stream(net, store=store, weights=checkpoints / "True")
    steps(net, commpress.Offloaded(net.parameters(), torch.optim.AdamW, store=store, lr=1e-2))
    trained = net(IDS).logits
    again = on_meta()
    commpress.stream(again, store=store, weights=checkpoints / "True")
    assert torch.equal(again(IDS).logits, trained)


def test_floats_become_those_of_the_model(store, checkpoints):
    net = on_meta(dtype=torch.bfloat16)
    commpress.stream(net, store=store, weights=checkpoints / "True")
    plain = LlamaForCausalLM.from_pretrained(checkpoints / "True", dtype=torch.bfloat16)
    assert all(
        torch.equal(value, net.state_dict()[name]) for name, value in plain.state_dict().items()
    )


def test_a_model_on_the_meta_device_begins_as_its_own_function_says(store):
    torch.manual_seed(0)
    net, plain = on_meta(), llama()
    commpress.stream(net, store=store)
    for (name, mine), theirs in zip(
        net.state_dict().items(), plain.state_dict().values(), strict=True
    ):
        assert mine.mean().item() == pytest.approx(theirs.mean().item(), abs=5e-3), name
        # torch's: 0.1 and 1
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.1), name
    for (name, mine), theirs in zip(net.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert net(IDS, labels=IDS).loss.isfinite()


def test_a_function_of_the_caller_goes_first(store):
    net = on_meta()

    def ones(module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(1)

    commpress.stream(net, store=store, initialize=ones)
    assert all(bool((value == 1).all()) for value in net.state_dict().values())
    with pytest.raises(
        InvalidArgument,
        match=r"parameter 'weight' of module 'model.embed_tokens' .*gives it no values",
    ):
        commpress.stream(on_meta(), store=store, prefix="other", initialize=lambda module: None)


def test_what_is_no_checkpoint_of_the_model_is_refused(store, tmp_path, checkpoints):
    def refused(match, error=StateMismatch, path=tmp_path):
        with pytest.raises(error, match=match):
            commpress.stream(on_meta(tied=False), store=store, weights=path)
        assert "parameters/meta" not in store

    index = tmp_path / "model.safetensors.index.json"
    refused("neither model.safetensors.index.json nor", InvalidArgument)
    refused("'lm_head.weight' is not in", path=checkpoints / "True")
    for text in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        refused("is no index")
    for name in ("../a.safetensors", "/a.safetensors", "..", "pickle.bin"):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused("expected files beside it")


@pytest.mark.slow
def test_memory_is_bounded_by_a_block_and_not_by_the_checkpoint(tmp_path):
    script = HERE.with_name("larger_checkpoint_script.py")
    result = run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    size, more = map(float, result.stdout.split())
    assert size > 250
    assert more < 2 / 3 * size  # 156 of 295: 48 of it are the store's host=
