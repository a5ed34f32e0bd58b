"""NumPy arrays and scalars in a checkpoint. Imported only once NumPy is in use, or when a checkpoint holds
its arrays.
"""

import base64
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from paceline.checkpoints.content.tensorfile import Block, Entry

_SAFETENSORS_NAMES = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8",
    "<u2": "U16", "<i2": "I16", "<f2": "F16",
    "<u4": "U32", "<i4": "I32", "<f4": "F32",
    "<u8": "U64", "<i8": "I64", "<f8": "F64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


def is_array(value: object) -> bool:
    return isinstance(value, np.ndarray)


def is_scalar(value: object) -> bool:
    return isinstance(value, np.generic)


def problem(value: Any) -> str | None:
    """Why this array or scalar cannot be stored as raw bytes, with the remedy; None if it can."""
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        return "convert it with numpy.asarray(...)"
    dtype = value.dtype
    if dtype.hasobject:
        return "its elements are Python objects: give it a numeric dtype, or save it as a list with .tolist()"
    if dtype.kind not in "biufcSUVmM" or (dtype.kind == "V" and dtype.type is not np.void):
        return f"NumPy itself does not know its dtype {dtype}: convert it with .astype(...)"
    return None


def identity(array: np.ndarray[Any, Any]) -> tuple[object, ...] | None:
    """Equal for arrays that are the same memory seen in the same way; None where memory says nothing (no
    elements).
    """
    if array.size == 0:
        return None
    return ("numpy", array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)


def block_of(array: np.ndarray[Any, Any]) -> tuple[Block, dict[str, Any]]:
    """The array as a block, and what its node must say beyond the file's header."""

    def copy_into(memory: memoryview) -> None:
        np.copyto(np.ndarray(array.shape, array.dtype, buffer=memory), array)

    num_bytes = array.size * array.dtype.itemsize
    name = None if array.dtype.fields else _SAFETENSORS_NAMES.get(array.dtype.str)
    if name is not None:
        return Block(name, array.shape, num_bytes, array.dtype.itemsize, copy_into), {}
    extra = {"dtype": np.lib.format.dtype_to_descr(array.dtype), "shape": list(array.shape)}
    return Block("U8", (num_bytes,), num_bytes, array.dtype.alignment, copy_into), extra


def array_of(extra: dict[str, Any], entry: Entry, fill: Callable[[memoryview], None]) -> np.ndarray[Any, Any]:
    dtype = _dtype(extra["dtype"]) if "dtype" in extra else np.dtype(_DTYPES[entry.dtype])
    shape = tuple(extra.get("shape", entry.shape))
    if math.prod(shape) * dtype.itemsize != entry.num_bytes:
        raise ValueError(f"an array of dtype {dtype} and shape {shape} does not fill {entry.num_bytes} bytes")
    array = np.empty(shape, dtype)
    if entry.num_bytes:
        fill(array.reshape(-1).view(np.uint8).data)
    return array


def scalar_node(scalar: np.generic) -> dict[str, Any]:
    return {
        "dtype": np.lib.format.dtype_to_descr(scalar.dtype),
        "base64": base64.b64encode(scalar.tobytes()).decode(),
    }


def scalar_of(extra: dict[str, Any]) -> Any:
    dtype = _dtype(extra["dtype"])
    if dtype.itemsize == 0:
        return dtype.type()
    # the copy makes a structured scalar writable, as it was: one that looks into bytes is not
    return np.ndarray((), dtype, buffer=base64.b64decode(extra["base64"])).copy()[()]


def _dtype(description: Any) -> np.dtype[Any]:
    dtype = np.lib.format.descr_to_dtype(description)
    if dtype.hasobject:
        # raw bytes taken for object pointers would be whatever the author of the file wants them to be
        raise ValueError("an array of Python objects is never part of a checkpoint")
    return dtype
