"""JAX, with optax and flax, whose states are made of its arrays. See `Framework` for what is asked; its groups are a
backend. There is no global generator: a function has its keys, and saves them like any other array.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from paceline.frameworks.base import ArrayCodec, Framework

_DEFAULTS: dict[str, Any] = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_disable_jit": False,
}


class Jax(Framework):
    """It may be forked as long as no device was made; importing it makes none."""

    name: ClassVar[str] = "jax"
    packages: ClassVar[tuple[str, ...]] = ("jax", "jaxlib", "optax", "flax")
    array_tag: ClassVar[str | None] = "jax"
    value_tags: ClassVar[tuple[str, ...]] = ("optax",)

    def plain(self, value: Any) -> Any:
        """An array without dimensions as a number, any other as a numpy array; what only all processes together have
        stays what it is, and so does a key."""
        import jax
        from jax import numpy as jnp

        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return value
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        if not (value.is_fully_addressable or value.is_fully_replicated):
            return value
        if value.ndim == 0:
            return value.item()
        host = jax.device_get(value)
        is_known = not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype in ("f2", "f4", "f8")
        return host if is_known else host.astype("f4")  # numpy has no bfloat16, nor any of 8 bits

    def codec(self) -> ArrayCodec:
        from paceline.frameworks import jax_arrays

        return jax_arrays

    def thread_variables(self, num_threads: int) -> dict[str, str]:
        return {"PJRT_NPROC": str(num_threads)}

    def settings(self) -> Mapping[str, Any]:
        """The width of numbers, the precision of matrix products, how random numbers are made, and what is checked."""
        import jax

        found = {name: getattr(jax.config, name, default) for name, default in _DEFAULTS.items()}
        return {name: value for name, value in found.items() if value != _DEFAULTS[name]}

    def adopt(self, settings: Mapping[str, Any]) -> None:
        import jax

        for name, value in {**_DEFAULTS, **settings}.items():
            if getattr(jax.config, name, value) != value:
                jax.config.update(name, value)  # type: ignore[no-untyped-call]
