"""Mixture-of-experts models of transformers, their experts divided among ranks by one call: the
model of one process."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import InvalidArgument
from tiny_models import model
from variants import seldom

VOCABULARY, LENGTH = 64, 12


SHARED = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4}
SHARED |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 48}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "num_key_value_heads": 4}
DEEPSEEK = {"moe_intermediate_size": 24, "num_hidden_layers": 3, "first_k_dense_replace": 1}
DEEPSEEK |= {"n_routed_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 4}
DEEPSEEK |= {"n_group": 2, "topk_group": 1, "n_shared_experts": 1} | LATENT
QWEN = {"moe_intermediate_size": 24, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 4}
GPT_OSS = {"intermediate_size": 24, "head_dim": 8, "num_local_experts": 5}
GPT_OSS |= {"num_experts_per_tok": 2, "attention_dropout": 0.0}
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_dropout": 0.0}

mixtral = partial(model, "MixtralForCausalLM", **SHARED | MIXTRAL)
qwen = partial(model, "Qwen3MoeForCausalLM", **SHARED | QWEN)
MODELS = {
    "mixtral": mixtral,
    "qwen": qwen,
    "deepseek": partial(model, "DeepseekV3ForCausalLM", **SHARED | DEEPSEEK),
    "gpt_oss": partial(model, "GptOssForCausalLM", **SHARED | GPT_OSS),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),
    "onebit": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, weight_decay=0.0),
    "zero_one": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3, weight_decay=0.0),
}
OURS = {  # in exact steps; what they do later is in tests/optim/test_held.py
    "onebit": lambda p: commpress.OneBitAdam(p, lr=1e-3, eps=1e-3, exact_steps=9),
    "zero_one": lambda p: commpress.ZeroOneAdam(p, lr=1e-3, eps=1e-3, sync=2, exact_steps=9),
}


def tokens_of(rank, step):
    return torch.randint(
        VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + rank)
    )


def stepped(name, kind, options, ranks, mine):
    """Weights after three steps on the batches of ``ranks``: in one process, or divided among
    them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = MODELS[name]()
    layers, wrapped, batches, share = [], net, ranks, len(ranks)
    if mine is not None:
        layers, batches, share = commpress.moe.parallelise(net, **options), [mine], 1
        wrapped = DistributedDataParallel(net)
    optimizer = (OPTIMIZERS if mine is None else OPTIMIZERS | OURS)[kind](net.parameters())
    if mine is not None and kind in OURS:
        commpress.overlap(wrapped, optimizer)
    for step in range(3):
        for rank in batches:
            tokens = tokens_of(rank, step)
            (wrapped(input_ids=tokens, labels=tokens).loss / share).backward()
        optimizer.step()
        optimizer.zero_grad()
    return by_name(net), layers


def compared(name, kind, options):
    """The largest difference of a dense weight and of an expert's, and what there is to differ."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    ours, layers = stepped(name, kind, options, ranks, rank)
    twin, _ = stepped(name, kind, options, ranks, None)
    torch.manual_seed(0)
    start = dict(MODELS[name]().named_parameters())
    assert ours.keys() == twin.keys()
    own = layers[0].exchange.placement.on(rank)
    worst, moved = {"dense": 0.0, "experts": 0.0}, 0.0
    for key, value in twin.items():
        place = "experts" if ".experts." in key else "dense"
        expected = value[own] if place == "experts" else value
        worst[place] = max(worst[place], float((ours[key] - expected).abs().max()))
        moved = max(moved, float((value - start[key]).abs().max()))
    return worst, moved, sum(layer.exchange.counters.received for layer in layers)


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("mixtral", {}, "sgd"),
        *(seldom("mixtral", {}, kind) for kind in OPTIMIZERS if kind != "sgd"),
        ("deepseek", {"topology": "2,1"}, "adamw"),
        ("gpt_oss", {"placement": [0, 1, 2, 0, 2]}, "adamw"),
        ("qwen", {"topology": "2,1", "chunks": 2}, "zero_one"),
        *(seldom("qwen", {"topology": "2,1", "chunks": 2}, kind) for kind in ("onebit", "adamw")),
    ],
    ids=str,
)
def test_divided_experts_train_as_in_one_process(pool, name, options, kind):
    """Up to the order of sums: matrix products round by how many rows they have, and DDP adds
    gradients by rank."""
    found = pool.run(compared, name, kind, options, size=3)
    for worst, moved, _ in found:
        assert moved > 1e-3
        assert max(worst.values()) < 3e-5
    layers, chosen = 2, 2 if name in ("mixtral", "gpt_oss") else 4
    assert sum(received for *_, received in found) == 3 * 3 * layers * chosen * 2 * LENGTH


def with_the_hook():
    torch.manual_seed(0)
    model = mixtral()
    commpress.moe.parallelise(model, codec="int8")
    ddp = DistributedDataParallel(model)
    state = commpress.compress(ddp, "int8")
    for step in range(2):
        tokens = tokens_of(dist.get_rank(), step)
        ddp(input_ids=tokens, labels=tokens).loss.backward()
    dense = torch.cat(
        [p.grad.flatten() for n, p in model.named_parameters() if ".experts." not in n]
    )
    return dense.numpy(), state.counters.steps


def test_ddp_with_a_codec_averages_all_but_experts(pool):
    (a, steps), (b, _) = pool.run(with_the_hook)
    assert (a == b).all()
    assert steps == 2
    assert copy.copy(a).any()


# ---------------------------------------------------------------- what people do with these models


RATE = 1e-3  # of Adam, so that an element moves by about as much in a step


def adam_steps(model, wrapped, ranks):
    """Parameters by name after two steps of two micro-batches, clipped; ``ranks`` are those whose
    batches this process has."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    clip = torch.nn.utils.clip_grad_norm_ if wrapped is model else commpress.moe.clip_grad_norm_
    for step in range(2):
        for part in range(2):
            for rank in ranks:
                tokens = tokens_of(rank, 2 * step + part)
                (wrapped(input_ids=tokens, labels=tokens).loss / 2 / len(ranks)).backward()
        clip(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return by_name(model)


def by_name(model):
    return {
        name.replace("experts.experts", "experts"): p.detach().clone()
        for name, p in model.named_parameters()
    }


def differing(ours, twin, start, part):
    """Parameters of which an element moved far more than Adam moves it, stood still where the
    twin's moved, or is elsewhere."""
    assert ours.keys() == twin.keys()
    wrong = []
    for name, value in twin.items():
        expected, before = part(name, value), part(name, start[name])
        moved = (ours[name] - before).abs()
        still = (moved == 0) & ((expected - before).abs() > RATE / 2)
        if (
            (moved > 20 * RATE).any()
            or still.any()
            or (ours[name] - expected).abs().max() > 0.1 * RATE
        ):
            wrong.append(name)
    return wrong


def used(name, way, copies):
    """Experts with copies in a model under checkpointing, or compiled."""
    torch.set_num_threads(1)
    found = []
    for mine in (True, False):
        torch.manual_seed(0)
        model = MODELS[name]()
        start = by_name(model)
        layers = commpress.moe.parallelise(model, copies=copies) if mine else []
        if way != "compiled":
            model.gradient_checkpointing_enable({"use_reentrant": way == "reentrant"})
            model.enable_input_require_grads()
        if layers:
            own, ddp = layers[0].own, DistributedDataParallel(model)
            wrapped = torch.compile(ddp, backend="eager") if way == "compiled" else ddp
            found.append(adam_steps(model, wrapped, [dist.get_rank()]))
        else:
            found.append(adam_steps(model.train(), model, range(dist.get_world_size())))
    return differing(*found, start, lambda key, value: value[own] if ".experts." in key else value)


@pytest.mark.parametrize(
    ("name", "way", "copies"),
    [
        ("qwen", "checkpointed", {1: 3, 4: 2}),
        ("mixtral", "reentrant", {}),
        seldom("mixtral", "compiled", {0: 2}),
    ],
    ids=str,
)
def test_checkpointed_and_compiled_models_with_copies_of_experts(pool, name, way, copies):
    """Over micro-batches, clipped; no element moves by 20 learning rates, and none stands still
    that Adam moves."""
    assert pool.run(used, name, way, copies, size=3) == [[], [], []]


def with_adapters():
    """LoRA of attention and of experts: its matrices of experts lie with them, and train as in one
    process."""
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(1)
    own: list[int] = []
    number = 6

    def adapted(model):
        torch.manual_seed(3)
        return get_peft_model(
            model,
            LoraConfig(
                r=2,
                target_modules=["q_proj"],
                target_parameters=["experts.gate_up_proj", "experts.down_proj"],
                init_lora_weights=False,
            ),
        )

    def part(key, value):
        if ".experts." not in key:
            return value
        if "lora_A" in key:
            return value.view(number, -1, value.shape[1])[own].flatten(0, 1)
        return (
            value.view(len(value), -1, number)[:, :, own].flatten(1)
            if "lora_B" in key
            else value[own]
        )

    torch.manual_seed(0)
    model, twin = mixtral(), mixtral()
    twin.load_state_dict(model.state_dict())
    twin = adapted(twin)
    with pytest.raises(
        InvalidArgument, match="inside a ParamWrapper with adapters that would not be divided"
    ):
        commpress.moe.parallelise(twin)
    own += commpress.moe.parallelise(model, placement=[0, 1, 1, 0, 1, 0])[0].own
    model = adapted(model)
    with pytest.raises(InvalidArgument, match="parallelise again on the model with its adapters"):
        model(input_ids=tokens_of(0, 0))
    commpress.moe.parallelise(model)
    start = by_name(twin)
    with torch.no_grad():
        for key, p in model.named_parameters():
            key = key.replace("experts.experts", "experts")
            p.copy_(part(key, start[key]))
    ours = adam_steps(model, DistributedDataParallel(model), [dist.get_rank()])
    moved = max(
        float((ours[key] - part(key, start[key])).abs().max())
        for key in start
        if ".experts." in key and "lora" in key
    )
    return differing(ours, adam_steps(twin, twin, range(2)), start, part), moved


def test_adapters_of_experts_train_as_in_one_process(pool):
    for wrong, moved in pool.run(with_adapters):
        assert wrong == []
        assert moved > RATE


@pytest.mark.parametrize("name", ["qwen", "deepseek"])
def test_models_in_bfloat16(name):
    """Gradients are as far from those of float32 as transformers' own."""

    def gradients(dtype, divided):
        torch.manual_seed(0)
        model = MODELS[name]().to(torch.bfloat16).to(dtype)  # the same weights
        if divided:
            commpress.moe.parallelise(model, process_group=Loopback(1).transport(0), chunks=2)
        tokens = tokens_of(0, 0)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters()])

    exact = gradients(torch.float32, False)
    theirs, ours = (
        (gradients(torch.bfloat16, divided) - exact).norm() for divided in (False, True)
    )
    assert ours < 1.2 * theirs < 0.02 * exact.norm()


def test_llama4_whose_experts_get_every_token_is_refused_with_the_layer_by_name():
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 1}
    net = model("Llama4ForCausalLM", **sizes, **heads, **experts)
    says = (
        r"experts in .model\.layers\.0\.feed_forward\.experts., a Llama4TextExperts .*with "
        r"hidden_states, .*fully_shard"
    )
    with pytest.raises(InvalidArgument, match=says):
        commpress.moe.parallelise(net)
