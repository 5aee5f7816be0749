"""Tiny models of transformers, wide enough that fused biases travel compressed, and batches for
them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

VOCABULARY, LENGTH, WIDTH = 96, 16, 96
EARLY_TOKENS, EARLY_LENGTH = 6, 8  # what batches hold until tensors, rows and positions wake up


def model(kind: str, **sizes: Any) -> torch.nn.Module:
    """A model by the name of its class in transformers."""
    import transformers

    made = getattr(transformers, kind)
    return made(made.config_class(**sizes))


def no_dropout(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": WIDTH}
WORDS = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
SHARED = LAYERS | WORDS | {"intermediate_size": 128}
GPT2 = no_dropout("resid_pdrop", "embd_pdrop", "attn_pdrop") | {"n_layer": 2, "n_head": 4}
OPT = no_dropout("dropout", "layerdrop") | {"ffn_dim": 128, "word_embed_proj_dim": WIDTH}
T5 = {"d_model": WIDTH, "d_kv": 24, "d_ff": 128, "num_layers": 2, "num_heads": 4}
T5 |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "dropout_rate": 0.0}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 32}
VIT = {"intermediate_size": 128, "image_size": 16, "patch_size": 4, "num_labels": 10}
BERT = no_dropout("hidden_dropout_prob", "attention_probs_dropout_prob")

gpt2 = partial(
    model, "GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=WIDTH, n_positions=LENGTH, **GPT2
)
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt2": gpt2,
    "gpt_neox": partial(model, "GPTNeoXForCausalLM", **SHARED),
    "bert": partial(model, "BertForMaskedLM", **SHARED, **BERT),
    "opt": partial(model, "OPTForCausalLM", **LAYERS, **WORDS, **OPT),
    "t5": partial(model, "T5ForConditionalGeneration", **T5),
    "llama": partial(model, "LlamaForCausalLM", **SHARED, num_key_value_heads=2),
    "mixtral": partial(
        model, "MixtralForCausalLM", **SHARED | {"num_key_value_heads": 2} | EXPERTS
    ),
    "vit": partial(model, "ViTForImageClassification", **LAYERS, **VIT),
}


def loss_of(model: torch.nn.Module, seed: int, *, early: bool) -> torch.Tensor:
    """The loss of one batch. Early ones hold few tokens and short sequences: most rows of
    embeddings have no gradient yet."""
    generator = torch.Generator().manual_seed(seed)
    if model.config.model_type == "vit":
        pixels = torch.randn(4, 3, 16, 16, generator=generator)
        return model(pixel_values=pixels, labels=torch.randint(10, (4,), generator=generator)).loss
    tokens, length = (EARLY_TOKENS, EARLY_LENGTH) if early else (VOCABULARY, LENGTH)
    batch = torch.randint(tokens, (4, length), generator=generator)
    return model(input_ids=batch, labels=batch).loss
