"""Hugging Face: the model that a config.json describes."""

from typing import Any

import torch

from commpress.errors import InvalidArgument, MissingPackage


def model_from_config(content: dict[str, Any]) -> torch.nn.Module:
    """Of the class the config names, else the plain model; no code of the config's own is run, no
    weights are loaded."""
    try:
        from transformers import AutoConfig, AutoModel
        from transformers.models.auto import modeling_auto
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "a Hugging Face config needs transformers: pip install 'commpress[hf]'"
        ) from error
    kind = content["model_type"]
    options = {
        key: value for key, value in content.items() if key not in ("model_type", "auto_map")
    }
    try:
        config = AutoConfig.for_model(kind, **options)
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"model_type {kind!r} of the config is none that transformers knows: {error}"
        ) from error
    named = (content.get("architectures") or [None])[0]
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_PRETRAINING_MAPPING,
    ):
        cls: Any = mapping.get(type(config), None)
        if cls is not None and (named is None or cls.__name__ == named):
            return cls(config)
    return AutoModel.from_config(config)
