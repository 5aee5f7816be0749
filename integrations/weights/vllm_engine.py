"""vLLM's weight transfer over published versions: a reader in each worker, a publisher on each
trainer rank. Written for the interface of vLLM 0.33."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer import base
from vllm.model_executor.model_loader import reload

from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.weights.publisher import Publisher
from commpress.integrations.weights.receiver import Receiver


@dataclass
class ReaderInitInfo(base.WeightTransferInitInfo):
    """``source`` and ``limit`` as ``Receiver`` takes them; the key is COMMPRESS_RUN_KEY."""

    source: str
    limit: int | str = "64GiB"


@dataclass
class ReaderUpdateInfo(base.WeightTransferUpdateInfo):
    """The version to load; None for the newest."""

    version: int | None = None


class WeightReaderEngine(base.WeightTransferEngine[ReaderInitInfo, ReaderUpdateInfo]):
    """Loads versions under the names of the checkpoint, through the model's ``load_weights``.

    A version is fetched and verified before the model is touched. Every worker holds all weights in
    host memory, whatever part of them its model takes.
    """

    init_info_cls = ReaderInitInfo
    update_info_cls = ReaderUpdateInfo
    supports_draft_weight_update = False

    receiver: Receiver | None = None
    _updating, _loaded = False, 0

    def init_transfer_engine(self, init_info: ReaderInitInfo) -> None:
        self.receiver = Receiver(init_info.source, limit=init_info.limit)

    def start_weight_update(self) -> None:
        self._updating = True

    def receive_weights(self, update_info: ReaderUpdateInfo) -> None:
        receiver, version = self.receiver, update_info.version
        if receiver is None or not self._updating:
            raise StateMismatch(
                "receive_weights was called before init_transfer_engine and start_weight_update: "
                "call these first"
            )
        # one that could not be loaded may be asked for again
        if (version is None or version != receiver.version) and receiver.prepare(version):
            receiver.install()
        if self._loaded == receiver.version:
            return
        self._loaded = 0
        reload.initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(receiver.weights.items()))
        finally:
            reload.finalize_layerwise_reload(self.model, self.model_config)
        self._loaded = receiver.version

    def finish_weight_update(self) -> None:
        self._updating = False

    def shutdown(self) -> None:
        self.receiver = None


@dataclass
class PublisherInitInfo(base.TrainerInitInfo):
    """``to`` and ``dtype`` (such as "bfloat16") as ``Publisher`` takes them. ``source``, ``limit``:
    for the workers' receivers; by default they read what ``to`` names."""

    backend: ClassVar[str] = "commpress"
    to: str
    source: str | None = None
    dtype: str | None = None
    limit: int | str = "64GiB"


class WeightPublisherEngine(base.TrainerWeightTransferEngine[PublisherInitInfo]):
    """Publishes on every trainer rank; rank 0 tells the workers.

    ``source`` is a module or whatever else ``Publisher`` takes, whose shards are published as they
    are, or a ``WeightSource``, which gathers each tensor.
    """

    init_info_cls = PublisherInitInfo
    publisher: Publisher

    @classmethod
    def trainer_init(
        cls, init_info: PublisherInitInfo, *, client: Any, source: Any = None
    ) -> "WeightPublisherEngine":
        if source is None:
            raise InvalidArgument("source is None, expected the model or a WeightSource")
        dtype = None if init_info.dtype is None else getattr(torch, init_info.dtype, None)
        if init_info.dtype is not None and not isinstance(dtype, torch.dtype):
            raise InvalidArgument(f"dtype is {init_info.dtype!r}, expected such as 'bfloat16'")
        gathers = isinstance(source, base.WeightSource)
        weights = (lambda: dict(source.iter_full())) if gathers else source
        sender = init_info.is_sender
        engine = cls(client=client, source=source, is_sender=sender, rank=init_info.rank)
        engine.publisher = Publisher(weights, init_info.to, dtype=dtype)
        if sender:
            where = {"source": init_info.source or init_info.to, "limit": init_info.limit}
            client.init_weight_transfer_engine(where)
        return engine

    def send_weights(self) -> None:
        report = self.publisher.publish()
        if self.is_sender and report is not None:
            self.client.start_weight_update()
            self.client.update_weights({"version": report.version})
            self.client.finish_weight_update(weight_version=str(report.version))

    def shutdown(self) -> None:
        self.publisher.close()
