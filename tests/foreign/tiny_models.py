"""Tiny models of transformers, wide enough that fused biases travel compressed, and batches for
them."""

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, LENGTH, WIDTH = 96, 16, 96
EARLY_TOKENS, EARLY_LENGTH = 6, 8  # what batches hold until tensors, rows and positions wake up


def _shared(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
    } | changes


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": LENGTH,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def gpt_neox() -> torch.nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**_shared()))


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(**_shared(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    )


def opt() -> torch.nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "num_hidden_layers": 2,
        "ffn_dim": 128,
        "word_embed_proj_dim": WIDTH,
        "dropout": 0.0,
        "layerdrop": 0.0,
    }
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            **sizes,
        )
    )


def t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {
        "d_model": WIDTH,
        "d_kv": 24,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    )


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_shared(num_key_value_heads=2)))


def mixtral() -> torch.nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 8, "num_experts_per_tok": 1, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**_shared(intermediate_size=32, **experts)))


def vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=10, **sizes))


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "bert": bert,
    "opt": opt,
    "t5": t5,
    "llama": llama,
    "mixtral": mixtral,
    "vit": vit,
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
