"""PyTorch: its values and its generators. See `Framework` for what is asked; its process groups are a backend."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from paceline.frameworks import torch_accelerate
from paceline.frameworks.base import ArrayCodec, Framework


class Torch(Framework):
    name: ClassVar[str] = "torch"
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    array_tag: ClassVar[str | None] = "tensor"
    value_tags: ClassVar[tuple[str, ...]] = ("torch.Size", "torch.device", "torch.dtype")

    def plain(self, value: Any) -> Any:
        """A tensor of one element and no dimension as a number, any other as a numpy array."""
        import torch

        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if value.dim() == 0:
            return value.item()
        value = value.cpu().resolve_conj().resolve_neg()  # of which numpy knows nothing
        is_known = not value.is_floating_point() or value.dtype in (torch.float16, torch.float32, torch.float64)
        return (value if is_known else value.float()).numpy()  # numpy has no bfloat16, nor any of 8 bits

    def pack_as(self, value: Any) -> Any:
        """A GPU's tensor as the CPU's, a plain one as an array, and a DDP model as the model it wraps."""
        import torch

        if isinstance(value, torch.Tensor):
            if _Plain.takes(value):
                return _Plain(value)
            return value if value.device.type in ("cpu", "meta") else value.detach().cpu()
        return value.module if isinstance(value, torch.nn.parallel.DistributedDataParallel) else value

    def codec(self) -> ArrayCodec:
        from paceline.frameworks import torch_arrays

        return torch_arrays

    def thread_variables(self, num_threads: int) -> dict[str, str]:
        return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(num_threads))

    def interface_variables(self, interface: str) -> dict[str, str]:
        """gloo would look up the host's name, and take whatever interface has that address."""
        return {"GLOO_SOCKET_IFNAME": interface}

    def reseed(self) -> None:
        import torch

        torch.seed()

    def settings(self) -> Mapping[str, Any]:
        """The default dtype, the precision of matrix products, and whether algorithms have to be deterministic."""
        import torch

        found = {"dtype": torch.get_default_dtype(), "deterministic": torch.get_deterministic_debug_mode()}
        with contextlib.suppress(RuntimeError):  # set in the newer way, for one device alone
            found["matmul"] = torch.get_float32_matmul_precision()
        return {name: value for name, value in found.items() if value != _defaults()[name]}

    def adopt(self, settings: Mapping[str, Any]) -> None:
        import torch

        wanted = {**_defaults(), **settings}
        torch.set_default_dtype(wanted["dtype"])
        if torch.get_deterministic_debug_mode() != wanted["deterministic"]:  # it imports half of torch
            torch.set_deterministic_debug_mode(wanted["deterministic"])
        with contextlib.suppress(RuntimeError):
            if torch.get_float32_matmul_precision() != wanted["matmul"]:
                torch.set_float32_matmul_precision(wanted["matmul"])

    def putting_back(self) -> Callable[[], None]:
        return torch_accelerate.putting_back()

    def seed(self, seed: int) -> None:
        import torch

        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> Any:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        import torch

        torch.set_rng_state(state)


def _defaults() -> dict[str, Any]:
    import torch

    return {"dtype": torch.float32, "deterministic": 0, "matmul": "highest"}


class _Plain:
    """Travels as a numpy array, and arrives as a tensor. torch itself writes a file for each, and reads it, which takes
    a model of many tensors several times as long."""

    def __init__(self, tensor: Any):
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy: a tensor that numpy has seen cannot be resized any more.
        return _tensor_of, (self._tensor.clone().numpy(), self._tensor.stride())

    @staticmethod
    def takes(tensor: Any) -> bool:
        """Whether it is nothing but numbers in a row, of a kind that numpy knows."""
        import torch

        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.dtype in (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool)
            and tensor.is_contiguous()
            and not (tensor.requires_grad or tensor.is_neg() or tensor.is_nested or tensor.__dict__)
        )


def _tensor_of(array: Any, stride: tuple[int, ...]) -> Any:
    import torch

    tensor = torch.from_numpy(array).clone()
    return tensor if tensor.stride() == stride else tensor.as_strided(tensor.shape, stride)  # of dimensions of size 1
