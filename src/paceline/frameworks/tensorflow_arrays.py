"""TensorFlow's tensors in a checkpoint: an `ArrayCodec`, imported only when one is saved, or a checkpoint holds one. A
variable is kept as the tensor that it holds, and comes back as that."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from paceline.frameworks.base import Block, Stored

_SAFETENSORS_NAMES = {
    tf.bool: "BOOL", tf.uint8: "U8", tf.int8: "I8",
    tf.uint16: "U16", tf.int16: "I16", tf.float16: "F16", tf.bfloat16: "BF16",
    tf.uint32: "U32", tf.int32: "I32", tf.float32: "F32",
    tf.uint64: "U64", tf.int64: "I64", tf.float64: "F64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


def is_array(value: object) -> bool:
    return isinstance(value, tf.Tensor | tf.Variable)


def problem(value: object) -> str | None:
    if isinstance(value, tf.SparseTensor | tf.RaggedTensor):
        return "it is sparse or ragged: save it as a plain tensor, with tf.sparse.to_dense(...) or .to_tensor()"
    if isinstance(value, tf.Tensor | tf.Variable):
        if not hasattr(value, "numpy"):
            return "it belongs to a graph and has no value here: save it outside of the tf.function"
        if value.dtype not in _SAFETENSORS_NAMES and value.dtype not in (tf.complex64, tf.complex128):
            return f"its dtype is {value.dtype.name}: save text as .numpy().tolist(), and numbers cast to another dtype"
    return None


def identity(array: Any) -> tuple[object, ...] | None:
    """Tensors do not change, and what two of them share cannot be told."""
    return None


def block_of(array: Any) -> tuple[Block, dict[str, Any]]:
    held = np.asarray(array.numpy())
    shape, num_bytes = tuple(array.shape), held.size * held.dtype.itemsize

    def copy_into(memory: memoryview) -> None:
        np.copyto(np.ndarray(held.shape, held.dtype, buffer=memory), held)

    name = _SAFETENSORS_NAMES.get(array.dtype)
    if name is not None:
        return Block(name, shape, num_bytes, held.dtype.itemsize, copy_into), {}
    extra = {"dtype": array.dtype.name, "shape": list(shape)}
    return Block("U8", (num_bytes,), num_bytes, held.dtype.itemsize, copy_into), extra


def array_of(extra: dict[str, Any], stored: Stored, fill: Callable[[memoryview], None]) -> Any:
    dtype = _dtype_of(extra["dtype"]) if "dtype" in extra else _DTYPES[stored.dtype]
    shape = tuple(extra.get("shape", stored.shape))
    if math.prod(shape) * dtype.size != stored.num_bytes:
        raise ValueError(f"a tensor of {dtype.name} and shape {shape} does not fill {stored.num_bytes} bytes")
    raw = bytearray(stored.num_bytes)
    if raw:
        fill(memoryview(raw))
    return tf.constant(np.frombuffer(raw, dtype.as_numpy_dtype).reshape(shape), dtype)


def value_node(value: object) -> tuple[str, dict[str, Any]] | None:
    return None


def value_of(tag: str, fields: dict[str, Any]) -> Any:
    raise ValueError(f"there is no small value of TensorFlow called {tag!r}")


def _dtype_of(name: str) -> Any:
    if name not in ("complex64", "complex128"):
        raise ValueError(f"a tensor of dtype {name!r} is never part of a checkpoint")
    return tf.as_dtype(name)
