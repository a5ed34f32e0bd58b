"""Pickling for the trip between driver and worker.

Functions and classes of `__main__` and notebooks travel by value (cloudpickle). Some values of a framework travel as
others, such as a DDP model as the model it wraps: the receiver may have neither the process group nor the GPU.
"""

import io
import pickle
from typing import Any

import cloudpickle

from paceline import frameworks


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        framework = frameworks.of(obj)
        if framework is not None and (stand_in := framework.pack_as(obj)) is not obj:
            return _same, (stand_in,)
        return super().reducer_override(obj)


def _same(obj: Any) -> Any:
    return obj


def dumps(obj: Any) -> bytes:
    buffer = io.BytesIO()
    _Packer(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


loads = pickle.loads
