"""A forward that runs in autocast and answers in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.prepare.nesting import map_tensors
from paceline.prepare.scope import Precision

DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class AutocastForward:
    """Stands in for `module.forward` as an attribute of the module.

    The module keeps its class, its children and so the keys of its state. This object holds the module, not a
    bound method: a copied or unpickled model then gets a forward that is bound to the copy.
    """

    def __init__(self, module: torch.nn.Module, device_type: str, dtype: torch.dtype):
        self.module, self.device_type, self.dtype = module, device_type, dtype
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, where `inspect.signature` looks for the parameters."""
        if self.replaced is not None:
            return self.replaced
        own: Callable[..., Any] = type(self.module).forward.__get__(self.module)
        return own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            output = self.__wrapped__(*args, **kwargs)
        return map_tensors(_widened, output)


def run_in_autocast(module: torch.nn.Module, device_type: str, precision: Precision) -> None:
    """Idempotent: a module that already has such a forward keeps it."""
    if not isinstance(vars(module).get("forward"), AutocastForward):
        module.forward = AutocastForward(module, device_type, DTYPES[precision])


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Only what autocast narrows: float64 would lose digits, integers their type."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
