"""JAX arrays, random keys and optax states in a checkpoint: an `ArrayCodec`, imported only when one is saved, or a
checkpoint holds one.
"""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from paceline.errors import MissingDependencyError
from paceline.frameworks.base import Block, Stored

_SAFETENSORS_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32",
    "uint64": "U64", "int64": "I64", "float64": "F64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


def is_array(value: object) -> bool:
    return isinstance(value, jax.Array)


def problem(value: object) -> str | None:
    if isinstance(value, jax.core.Tracer):
        return "it is being traced and has no value yet: save what the jitted function returns"
    if isinstance(value, jax.Array):
        return _problem_of(value)
    package = type(value).__module__.partition(".")[0]
    if package == "optax" and (_state_name(value) is None or any(map(callable, value))):  # type: ignore[call-overload]
        return "save the state that its init(...) returns, or jax.tree.leaves(...) of what is no state of optax's"
    if package == "flax":
        return (
            "save flax.nnx.to_pure_dict(flax.nnx.state(...)) of a module, flax.serialization.to_state_dict(...) of it"
        )
    return None


def _problem_of(array: jax.Array) -> str | None:
    if array.is_deleted():
        return "it was donated to a jitted function: save what that has returned"
    if not (array.is_fully_addressable or array.is_fully_replicated):
        return (
            "each process has only a part of it: save jax.device_put(..., NamedSharding(mesh, PartitionSpec())), which "
            "every rank has to call, or [part.data for part in ....addressable_shards] with per_rank={...}"
        )
    return None


def identity(array: jax.Array) -> tuple[object, ...] | None:
    return ("jax", id(array))  # nobody can change one, and the state that is being saved keeps it alive


def block_of(array: jax.Array) -> tuple[Block, dict[str, Any]]:
    extra: dict[str, Any] = {}
    if _is_key(array):
        extra["key"] = str(jax.random.key_impl(array))
        array = jax.random.key_data(array)
    shape, dtype = tuple(array.shape), np.dtype(array.dtype)
    num_bytes = math.prod(shape) * dtype.itemsize

    def copy_into(memory: memoryview) -> None:
        np.copyto(np.ndarray(shape, dtype, buffer=memory), np.asarray(array))

    name = _SAFETENSORS_NAMES.get(dtype.name)
    if name is not None:
        return Block(name, shape, num_bytes, dtype.itemsize, copy_into), extra
    extra |= {"dtype": dtype.name, "shape": list(shape)}
    return Block("U8", (num_bytes,), num_bytes, dtype.itemsize, copy_into), extra


def array_of(extra: dict[str, Any], stored: Stored, fill: Callable[[memoryview], None]) -> jax.Array:
    """On the default device, and not committed to it: a jitted function may use it together with whatever else it has,
    also with arrays that all processes share."""
    dtype = _dtype_of(extra.get("dtype") or _DTYPES[stored.dtype])
    shape = tuple(extra.get("shape", stored.shape))
    if math.prod(shape) * dtype.itemsize != stored.num_bytes:
        raise ValueError(f"an array of {dtype} and shape {shape} does not fill {stored.num_bytes} bytes")
    host = np.empty(shape, dtype)
    if stored.num_bytes:
        fill(host.reshape(-1).view(np.uint8).data)
    with jax.enable_x64(True):  # or 64 bits would become 32 in a process that has not asked for them
        array = jnp.asarray(host)
    return jax.random.wrap_key_data(array, impl=extra["key"]) if "key" in extra else array


def value_node(value: object) -> tuple[str, dict[str, Any]] | None:
    """A state of optax, by the name that optax gives to its class. Such a class is a tuple with names, and holds
    nothing else."""
    name = _state_name(value)
    if name is None:
        return None
    return "optax", {"class": name, "fields": dict(value._asdict())}  # type: ignore[attr-defined]


def value_of(tag: str, fields: dict[str, Any]) -> Any:
    return _state_class(fields["class"])(**fields["fields"])


def _is_key(array: jax.Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _dtype_of(name: str) -> np.dtype[Any]:
    """Numbers and booleans only: raw bytes taken for pointers to objects would be whatever the file's author wants."""
    try:
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.name != name or not (dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)):
        raise ValueError(f"jax has no dtype '{name}'")
    return dtype


def _state_name(value: object) -> str | None:
    """None for what is not one of optax's own classes of states."""
    kind = type(value)
    return kind.__name__ if _is_state_class(kind) and _class_named(kind.__name__) is kind else None


def _state_class(name: str) -> type[Any]:
    try:
        kind = _class_named(name)
    except ModuleNotFoundError as error:
        raise MissingDependencyError("optax", "jax", "loading a checkpoint that holds states of optax") from error
    if not _is_state_class(kind):
        raise ValueError(f"optax has no state '{name}'")
    found: type[Any] = kind
    return found


def _class_named(name: str) -> Any:
    """Where optax has it for all to see, or else where it defines it: some states, as that of a schedule whose values
    are injected, have no public name. By its name alone, since its module may be another one tomorrow."""
    import optax

    if hasattr(optax, name):
        return getattr(optax, name)
    modules = [module for path, module in list(sys.modules.items()) if path.startswith("optax.")]
    found = ((module.__name__, vars(module).get(name)) for module in modules)
    return next((kind for path, kind in found if getattr(kind, "__module__", None) == path), None)


def _is_state_class(kind: Any) -> bool:
    """A tuple with names and nothing more: making one runs no code."""
    is_named = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_named and kind.__module__.partition(".")[0] == "optax" and kind.__bases__ == (tuple,)
