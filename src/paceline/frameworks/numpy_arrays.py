"""NumPy arrays and scalars in a checkpoint: an `ArrayCodec`, imported only when one is saved, or a checkpoint holds
one.
"""

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.frameworks.base import Block, Stored

_SAFETENSORS_NAMES = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8",
    "<u2": "U16", "<i2": "I16", "<f2": "F16",
    "<u4": "U32", "<i4": "I32", "<f4": "F32",
    "<u8": "U64", "<i8": "I64", "<f8": "F64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def problem(value: object) -> str | None:
    if not isinstance(value, np.ndarray | np.generic):
        return None
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        return "convert it with numpy.asarray(...)"
    dtype = value.dtype
    if dtype.hasobject:
        return "its elements are Python objects: give it a numeric dtype, or save it as a list with .tolist()"
    if dtype.kind not in "biufcSUVmM" or (dtype.kind == "V" and dtype.type is not np.void):
        return f"NumPy itself does not know its dtype {dtype}: convert it with .astype(...)"
    return None


def identity(array: np.ndarray[Any, Any]) -> tuple[object, ...] | None:
    if array.size == 0:
        return None
    return ("numpy", array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)


def block_of(array: np.ndarray[Any, Any]) -> tuple[Block, dict[str, Any]]:
    def copy_into(memory: memoryview) -> None:
        np.copyto(np.ndarray(array.shape, array.dtype, buffer=memory), array)

    num_bytes = array.size * array.dtype.itemsize
    name = None if array.dtype.fields else _SAFETENSORS_NAMES.get(array.dtype.str)
    if name is not None:
        return Block(name, array.shape, num_bytes, array.dtype.itemsize, copy_into), {}
    extra = {"dtype": np.lib.format.dtype_to_descr(array.dtype), "shape": list(array.shape)}
    return Block("U8", (num_bytes,), num_bytes, array.dtype.alignment, copy_into), extra


def array_of(extra: dict[str, Any], stored: Stored, fill: Callable[[memoryview], None]) -> np.ndarray[Any, Any]:
    dtype = _dtype(extra["dtype"]) if "dtype" in extra else np.dtype(_DTYPES[stored.dtype])
    shape = tuple(extra.get("shape", stored.shape))
    if math.prod(shape) * dtype.itemsize != stored.num_bytes:
        raise ValueError(f"an array of dtype {dtype} and shape {shape} does not fill {stored.num_bytes} bytes")
    array = np.empty(shape, dtype)
    if stored.num_bytes:
        fill(array.reshape(-1).view(np.uint8).data)
    return array


def value_node(value: object) -> tuple[str, dict[str, Any]] | None:
    """Scalars, as the bytes they are: a float32 is no Python float."""
    if not isinstance(value, np.generic):
        return None
    data = base64.b64encode(value.tobytes()).decode()
    return "numpy", {"dtype": np.lib.format.dtype_to_descr(value.dtype), "base64": data}


def value_of(tag: str, fields: dict[str, Any]) -> Any:
    dtype = _dtype(fields["dtype"])
    if dtype.itemsize == 0:
        return dtype.type()
    # the copy makes a structured scalar writable, as it was: one that looks into bytes is not
    return np.ndarray((), dtype, buffer=base64.b64decode(fields["base64"])).copy()[()]


def _dtype(description: Any) -> np.dtype[Any]:
    dtype = np.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        # raw bytes taken for object pointers would be whatever the author of the file wants them to be
        raise ValueError("an array of Python objects is never part of a checkpoint")
    return dtype
