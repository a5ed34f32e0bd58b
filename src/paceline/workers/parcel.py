"""Pickling for the trip between driver and worker.

Functions and classes of `__main__` and notebooks travel by value (cloudpickle). On the way, a DDP-wrapped model becomes
the model it wraps and a GPU tensor becomes a CPU tensor: the receiver may have neither the process group nor the GPU.
"""

import io
import pickle
import sys
from typing import Any

import cloudpickle


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.Tensor) and obj.device.type not in ("cpu", "meta"):
                return _same, (obj.detach().cpu(),)
            if isinstance(obj, torch.nn.Module) and "DistributedDataParallel" in map(_name, type(obj).__mro__):
                return _same, (obj.module,)
        return super().reducer_override(obj)


def _name(cls: type) -> str:
    return cls.__name__


def _same(obj: Any) -> Any:
    return obj


def dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


loads = pickle.loads
