"""Entry point of vLLM's plugins: the weight transfer backend "commpress"."""

from contextlib import suppress

MODULE = "commpress.integrations.weights.vllm_engine"


def register() -> None:
    """Make the backend known to workers and trainers. vLLM may call it several times."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory, name in (
        (WeightTransferEngineFactory, "WeightReaderEngine"),
        (WeightTransferTrainerFactory, "WeightPublisherEngine"),
    ):
        with suppress(ValueError):  # it is known already
            factory.register_engine("commpress", MODULE, name)
