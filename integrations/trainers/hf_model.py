"""Hugging Face: make the model described by a config.json."""

from typing import Any

import torch

from commpress.errors import InvalidArgument, MissingPackage


def model_from_config(content: dict[str, Any]) -> torch.nn.Module:
    """Make a model of the class named in the config, else the plain model. No code of the config is
    run, and no weights are loaded."""
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
            f"model_type {kind!r} of the config is unknown to transformers: {error}"
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
