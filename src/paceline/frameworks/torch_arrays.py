"""Torch tensors in a checkpoint: an `ArrayCodec`, imported only when one is saved, or a checkpoint holds one."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from paceline.frameworks.base import Block, Stored

_SAFETENSORS_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.uint32: "U32", torch.int32: "I32", torch.float32: "F32",
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}
_UNCOPYABLE = re.compile(r"torch\.(u?int[1-7]|quint.*|qint.*)")
_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor)}


def is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def problem(value: object) -> str | None:
    if isinstance(value, torch.Tensor):
        return _problem_of(value)
    if isinstance(value, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        return "it wraps the model, and would put 'module.' before its keys: save .module.state_dict()"
    return None


def _problem_of(tensor: torch.Tensor) -> str | None:
    if hasattr(tensor, "full_tensor"):
        return "it is one rank's part of a distributed tensor: save .full_tensor(), called on every rank"
    if tensor.is_nested:
        return "it is a nested tensor: save .unbind() as a list"
    if tensor.layout != torch.strided:
        return "it is sparse: save .to_dense()"
    if tensor.is_quantized:
        return "it is quantised: save .dequantize()"
    if type(tensor) not in _PLAIN_TYPES:
        return "it is a subclass of torch.Tensor: save it as a plain tensor"
    if _UNCOPYABLE.fullmatch(str(tensor.dtype)):
        return "torch itself cannot copy its dtype: save .view(torch.uint8)"
    if tensor.is_meta:
        return "it is on the meta device and has no data: materialise it first"
    return None


def identity(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if tensor.numel() == 0:
        return None
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return ("torch", *place, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def block_of(tensor: torch.Tensor) -> tuple[Block, dict[str, Any]]:
    shape, num_bytes = tuple(tensor.shape), tensor.numel() * tensor.element_size()

    def copy_into(memory: memoryview) -> None:
        with torch.no_grad():
            raw = torch.frombuffer(memory, dtype=torch.uint8)
            raw.view(tensor.dtype).view(shape).copy_(tensor.detach())

    name = _SAFETENSORS_NAMES.get(tensor.dtype)
    if name is not None:
        return Block(name, shape, num_bytes, tensor.element_size(), copy_into), {}
    extra = {"dtype": _dtype_name(tensor.dtype), "shape": list(shape)}
    return Block("U8", (num_bytes,), num_bytes, tensor.element_size(), copy_into), extra


def array_of(extra: dict[str, Any], stored: Stored, fill: Callable[[memoryview], None]) -> torch.Tensor:
    dtype = _dtype_of(extra["dtype"]) if "dtype" in extra else _DTYPES[stored.dtype]
    shape = tuple(extra.get("shape", stored.shape))
    if math.prod(shape) * dtype.itemsize != stored.num_bytes:
        raise ValueError(f"a tensor of {dtype} and shape {shape} does not fill {stored.num_bytes} bytes")
    with torch.inference_mode(False):
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if stored.num_bytes:
            raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
            fill(raw.numpy().data)
    return tensor


def value_node(value: object) -> tuple[str, dict[str, Any]] | None:
    if isinstance(value, torch.Size):
        return "torch.Size", {"value": list(value)}
    if isinstance(value, torch.device):
        return "torch.device", {"value": str(value)}
    if isinstance(value, torch.dtype):
        return "torch.dtype", {"value": _dtype_name(value)}
    return None


def value_of(tag: str, fields: dict[str, Any]) -> object:
    makers: dict[str, Callable[[Any], object]] = {
        "torch.Size": torch.Size,
        "torch.device": torch.device,
        "torch.dtype": _dtype_of,
    }
    return makers[tag](fields["value"])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype '{name}'")
    return dtype
