"""Models that nobody here wrote under the codec of ``compress``: no element stands still that AdamW
moves.

Codes of equal steps send elements far below the largest of their block late, if at all, and Adam,
which divides by their own size, moves them as far as any other. The judge is AdamW on the exact
mean gradients of the same run, beside it.
"""

from functools import partial
from inspect import signature

import pytest
import torch

import commpress
from commpress.codecs import policy_of
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.transports.loopback import Loopback, simulate
from tiny_models import MODELS, VOCABULARY, model
from variants import seldom

RANKS, RATE = 2, 1e-3
DEFAULT = signature(commpress.CompressedState).parameters["codec"].default


def detr():
    import transformers

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]}
    backbone = transformers.ResNetConfig(**sizes, layer_type="basic", out_features=["stage4"])
    sizes = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in sizes.items()}
    sizes |= {"d_model": 32, "num_queries": 6, "num_labels": 4, "dropout": 0.0}
    kind = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return model("DetrForObjectDetection", **kind, **sizes, backbone_config=backbone)


def boxes(net, generator):
    labels = torch.randint(4, (2, 2), generator=generator)
    places = torch.rand(2, 2, 4, generator=generator) * 0.4 + 0.3
    targets = [{"class_labels": c, "boxes": b} for c, b in zip(labels, places, strict=True)]
    return net(pixel_values=torch.randn(2, 3, 64, 64, generator=generator), labels=targets).loss


def words(net, generator, smoothing=0.0):
    batch = torch.randint(VOCABULARY, (4, 16), generator=generator)
    logits, targets = net(input_ids=batch).logits[:, :-1], batch[:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing
    )


SIZES = {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 4}
CASES = {
    "detr": (detr, boxes),
    "mamba": (partial(model, "MambaForCausalLM", vocab_size=VOCABULARY, **SIZES), words),
    "gpt2-smoothed": (MODELS["gpt2"], partial(words, smoothing=0.1)),
    "llama": (MODELS["llama"], words),
}

FOUR = tuple(CASES)
# of transformers, each with all of these sizes and some of its own
FAMILIES = """Albert Bert DebertaV2 Electra ModernBert Roberta
Cohere Falcon GPTNeoX Gemma Gemma2 Glm4 Granite Helium Llama Mistral Mixtral Nemotron Olmo Olmo2
Olmoe Persimmon Phi Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe SmolLM3 StableLm Starcoder2"""
MASKED = FAMILIES.splitlines()[0].split()
COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64}
COMMON |= {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SPARSE |= {"shared_expert_intermediate_size": 32}
OWN = {"Albert": {"embedding_size": 32}, "Mixtral": {"num_local_experts": 4}}
OWN |= dict.fromkeys(("Olmoe", "Qwen2Moe"), SPARSE) | {"Qwen3Moe": SPARSE | {"head_dim": 16}}
OWN |= {key: {"head_dim": 16} for key in ("Gemma", "Gemma2", "Glm4", "Helium", "Qwen3")}
CASES |= {
    name: (
        partial(
            model,
            f"{name}For{'MaskedLM' if name in MASKED else 'CausalLM'}",
            **COMMON | OWN.get(name, {}),
        ),
        words,
    )
    for name in FAMILIES.split()
}


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def moves(name, codec, steps):
    """Moves of each element in learning rates, in the run and by AdamW on the exact means."""
    make, loss_of = CASES[name]
    torch.manual_seed(0)
    net = make()
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    parameters = {key: p for key, p in net.named_parameters() if p.requires_grad}
    spans, at = [], 0
    for key, p in parameters.items():
        spans.append(Span(key, at, p.numel()))
        at += p.numel()
    shapes = [p.shape for p in parameters.values()]
    start, exact = flat(parameters.values()), torch.nn.Parameter(flat(parameters.values()))
    channels = [Channel(transport) for transport in Loopback(RANKS).transports()]
    sets = [Exchanges(policy_of(codec), RANKS, channel.workspace) for channel in channels]
    optimizers = [
        torch.optim.AdamW(every, lr=RATE, weight_decay=0.0)
        for every in ([exact], parameters.values())
    ]
    for step in range(steps):
        buffers = []
        for rank in range(RANKS):
            net.zero_grad()
            loss_of(net, torch.Generator().manual_seed(1000 * rank + step)).backward()
            buffers.append(
                flat(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values())
            )
        exact.grad = torch.stack(buffers).mean(0)
        jobs = []
        for channel, exchanges, buffer in zip(channels, sets, buffers, strict=True):
            exchange = exchanges.of((), lambda: (spans, shapes), buffer.device)
            call = channel.call(exchange.sequences, step)
            jobs.append(exchange.steps(channel, buffer, call))
        for outcomes in simulate(jobs):
            settle(outcomes, taken=True)
        for p, mean in zip(
            parameters.values(), buffers[0].split([s.numel for s in spans]), strict=True
        ):
            p.grad = mean.view_as(p).clone()
        for optimizer in optimizers:
            optimizer.step()
    return (flat(parameters.values()) - start).abs() / RATE, (exact.detach() - start).abs() / RATE


OFTEN = [("detr", 50), ("mamba", 50)]
OTHERS = [(name, 50) for name in CASES] + [(name, 200) for name in FOUR]
LONG = [seldom(*case) for case in OTHERS if case not in OFTEN]


@pytest.mark.parametrize(("name", "steps"), [*OFTEN, *LONG])
def test_no_element_stands_still_that_adamw_moves(name, steps):
    mine, exact = moves(name, DEFAULT, steps)
    still = (mine == 0) & (exact > 1)
    assert int(still.sum()) <= len(exact) // 10_000
    assert not bool((still & (exact > 10)).any())
    # where the gradients of both ranks cancel, their errors need not
    assert int(((mine != 0) & (exact == 0)).sum()) <= len(exact) // 1000


def test_codes_of_equal_steps_leave_elements_where_they_are():
    mine, exact = moves("mamba", "int8", 16)
    assert int(((mine == 0) & (exact > 1)).sum()) > len(exact) // 1000
