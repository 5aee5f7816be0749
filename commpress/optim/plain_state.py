"""``optimizer.state`` as people expect it: whoever looks finds plain momentum, in whatever form it is kept between steps."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch


class PlainState(defaultdict[torch.Tensor, dict[str, Any]]):
    """Calls a method of the optimizer before it lets anybody see a parameter's state. A copy of it calls nobody."""

    _settle: WeakMethod[Callable[[], None]] | None = None

    def before_looking(self, settle: Callable[[], None]) -> None:
        self._settle = WeakMethod(settle)

    def _plain(self) -> None:
        if self._settle is not None and (settle := self._settle()) is not None:
            settle()

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        self._plain()
        return super().__getitem__(parameter)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        self._plain()
        return super().get(parameter, default)

    def values(self) -> Any:
        self._plain()
        return super().values()

    def items(self) -> Any:
        self._plain()
        return super().items()
