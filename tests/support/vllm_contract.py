"""The part of vLLM 0.33 that its weight transfer engines meet, written down: it stands in where
vLLM is not installed. Only names, signatures and what is abstract; no behaviour of vLLM is tested.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import ClassVar, Generic, TypeVar

BASE = "vllm.distributed.weight_transfer.base"
FACTORY = "vllm.distributed.weight_transfer.factory"
RELOAD = "vllm.model_executor.model_loader.reload"
A, B = TypeVar("A"), TypeVar("B")


def stand_in() -> None:
    """Make ``import vllm…`` of these modules work."""
    for name in (BASE, FACTORY, RELOAD):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    for each in (
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
        TrainerInitInfo,
        WeightSource,
        WeightTransferEngine,
        TrainerWeightTransferEngine,
    ):
        setattr(sys.modules[BASE], each.__name__, each)
    sys.modules[FACTORY].WeightTransferEngineFactory = type("Workers", (_Factory,), {"known": {}})
    sys.modules[FACTORY].WeightTransferTrainerFactory = type("Trainers", (_Factory,), {"known": {}})
    sys.modules[RELOAD].initialize_layerwise_reload = lambda model: model.reload("begins")
    sys.modules[RELOAD].finalize_layerwise_reload = lambda model, config: model.reload("ends")


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightSource(ABC):
    @property
    @abstractmethod
    def metadata(self): ...

    def iter_full(self):
        raise NotImplementedError


class WeightTransferEngine(ABC, Generic[A, B]):
    def __init__(self, config, vllm_config, device, model):
        self.config, self.device, self.model = config, device, model
        self.model_config = vllm_config.model_config

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def start_weight_update(self): ...

    @abstractmethod
    def receive_weights(self, update_info): ...

    @abstractmethod
    def finish_weight_update(self): ...

    @abstractmethod
    def shutdown(self): ...


class TrainerWeightTransferEngine(ABC, Generic[A]):
    def __init__(self, *, client, source=None, is_sender=True, rank=0):
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info, *, client, source=None): ...

    @abstractmethod
    def send_weights(self): ...


class _Factory:
    known: ClassVar[dict]

    @classmethod
    def register_engine(cls, name, module, class_name):
        if name in cls.known:
            raise ValueError(name)
        cls.known[name] = module, class_name

    @classmethod
    def create_engine(cls, config, vllm_config, device, model):
        module, name = cls.known[config.backend]
        return getattr(import_module(module), name)(config, vllm_config, device, model)

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        module, name = cls.known[init_info.backend]
        return getattr(import_module(module), name).trainer_init(
            init_info=init_info, client=client, source=source
        )
