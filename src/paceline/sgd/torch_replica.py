"""A PyTorch model as a replica. What it trains is what its optimizer has."""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline import frameworks
from paceline.errors import ArgumentError, ArgumentTypeError, TrainerStateError
from paceline.sgd.packing import Array, Slot
from paceline.sgd.replica import Computed, OwnPosition, check_weights, loss_of


class TorchReplica(OwnPosition):
    """See `Replica`."""

    kind: ClassVar[str] = "torch"

    def __init__(self, model: Any):
        import torch

        self.model, self._owner_pid = model, os.getpid()
        self.module = _module_of(model)
        self.optimizer = _optimizer_of(model)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"The optimizer of {type(model).__qualname__} is {self.optimizer!r}; expected one of torch.optim, "
                "returned by get_optimizer()."
            )
        self.scheduler = model.get_scheduler() if hasattr(model, "get_scheduler") else None
        names = {id(one): name for name, one in self.module.named_parameters()} if self.module is not None else {}
        self.params = [weight for weight in self._optimized() if weight.requires_grad]
        self._known = set(map(id, self.params))
        self._is_outside = [id(weight) not in names for weight in self.params]
        """Of the module: a weight of the loss, say, or of another module."""
        self.names = [names.get(id(weight), f"parameter_{number}") for number, weight in enumerate(self.params)]
        self.slots: Sequence[Slot] = [
            Slot(name, tuple(weight.shape), _travels_as(weight))
            for name, weight in zip(self.names, self.params, strict=True)
        ]

    @classmethod
    def takes(cls, model: Any) -> bool:
        if not callable(getattr(model, "get_loss", None)):
            return False
        owner = frameworks.of(_optimizer_of(model))
        return owner is not None and owner.name == cls.kind

    def compute(self) -> Computed:
        loss, metrics = self.backward()
        return Computed(loss, [_as_array(weight.grad) for weight in self.params], metrics)

    def backward(self) -> tuple[float, dict[str, Any]]:
        """The loss of the next batch; its gradients are where torch puts them."""
        for weight in (*(self.module.parameters() if self.module is not None else ()), *self._optimized()):
            weight.grad = None
        given = loss_of(self.model, self._owner_pid)
        loss, metrics = given if isinstance(given, tuple) and len(given) == 2 else (given, {})
        if not hasattr(loss, "backward") or loss.numel() != 1:
            raise ArgumentTypeError(
                f"{type(self.model).__qualname__}.get_loss() has returned {_described(loss)}; expected a tensor with "
                "one element, or (loss, metrics)."
            )
        if loss.requires_grad:  # of a model without weights, nothing does
            loss.backward()
        elif self.params:
            raise ArgumentTypeError(
                f"The loss of {type(self.model).__qualname__} depends on none of its weights: it was computed without "
                "gradients (torch.no_grad, .item(), .detach())."
            )
        return loss.item(), self._metrics(metrics)

    def apply(self, gradients: Sequence[Array | None]) -> None:
        import torch

        for weight, gradient in zip(self.params, gradients, strict=True):
            if gradient is None:
                weight.grad = None
                continue
            given = torch.from_numpy(gradient if gradient.flags.writeable else gradient.copy())
            if weight.grad is None or weight.grad.is_sparse:
                weight.grad = given.to(weight.device, weight.dtype, copy=True)
            else:  # the memory of its own gradient, which nobody needs any more
                weight.grad.copy_(given)
        self.make_step()

    def make_step(self) -> None:
        """Of the optimizer, with the gradients that the weights have."""
        strangers = [one for one in self._optimized() if one.grad is not None and id(one) not in self._known]
        if strangers:
            raise TrainerStateError(
                f"{len(strangers)} weights of shapes {[list(one.shape) for one in strangers]} have a gradient, but "
                "were frozen, or not the optimizer's, when the model was made: each replica would train them by itself "
                "alone. Let model_creator make trainable what is to be trained."
            )
        if self.params:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def weights(self) -> dict[str, Array]:
        return {name: _as_array(value, copy=True) for name, value in self._tensors().items()}  # type: ignore[misc]

    def set_weights(self, weights: Mapping[str, Any]) -> None:
        import torch

        tensors = self._tensors()
        check_weights(tensors, weights)
        given = {name: _as_tensor(name, weights[name]) for name in tensors}
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(given[name])

    def state_dict(self) -> dict[str, Any]:
        state = {"weights": self._tensors(), "optimizer": self.optimizer.state_dict()}
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        return copy.deepcopy(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        import torch

        tensors = self._tensors()
        check_weights(tensors, state["weights"])
        given = {name: _as_tensor(name, state["weights"][name]) for name in tensors}
        former = self._load_optimizer(state.get("optimizer"))  # first: it refuses what is not its own
        if self.scheduler is not None and "scheduler" in state:
            try:
                _load_scheduler(self.scheduler, state["scheduler"])
            except ArgumentError:
                self.optimizer.load_state_dict(former)
                raise
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(given[name])

    def _load_optimizer(self, state: Any) -> dict[str, Any]:
        """Returns what it had. Of an optimizer of another kind, torch takes the options as they are, and the next step
        lacks its own."""
        former: dict[str, Any] = self.optimizer.state_dict()  # no copy: what is loaded takes the place of it
        # Not all of the defaults: torch adds one when it loads, which an optimizer of a user's own need not have.
        needed = self.optimizer.defaults.keys() & {name for group in self.optimizer.param_groups for name in group}
        try:
            self.optimizer.load_state_dict(copy.deepcopy(state))
            missing = {name for group in self.optimizer.param_groups for name in needed - group.keys()}
            problem = f"it has no {', '.join(sorted(missing))}" if missing else None
        except Exception as error:
            problem = str(error) if state is not None else "there is none"
        if problem is not None:
            self.optimizer.load_state_dict(former)
            raise ArgumentError(
                f"The state of the optimizer is not that of {type(self.optimizer).__qualname__}: {problem}."
            )
        return former

    def validate(self) -> dict[str, Any]:
        import torch

        with torch.no_grad():
            return super().validate()

    def _tensors(self) -> dict[str, Any]:
        """By name, the model's own: all of the module, and what else is trained."""
        state = self.module.state_dict() if self.module is not None else {}
        found = {name: value for name, value in state.items() if hasattr(value, "copy_")}
        trained = zip(self.names, self.params, self._is_outside, strict=True)
        return found | {name: weight.detach() for name, weight, is_outside in trained if is_outside}

    def _optimized(self) -> Iterator[Any]:
        return (weight for group in self.optimizer.param_groups for weight in group["params"])


def _module_of(model: Any) -> Any:
    """None for a model whose weights only its optimizer knows."""
    import torch

    places = (model, *(getattr(model, name, None) for name in ("module", "model", "net")))
    return next((one for one in places if isinstance(one, torch.nn.Module)), None)


def _optimizer_of(model: Any) -> Any:
    get = getattr(model, "get_optimizer", None)
    if get is None:
        return getattr(model, "optimizer", None)
    made = vars(model).get("_paceline_optimizer") if hasattr(model, "__dict__") else None
    return made if made is not None else _remembered(model, get())


def _remembered(model: Any, optimizer: Any) -> Any:
    """`get_optimizer` is called once: by `takes` to see whose it is, or when the replica is made."""
    if hasattr(model, "__dict__"):
        object.__setattr__(model, "_paceline_optimizer", optimizer)
    return optimizer


def _travels_as(weight: Any) -> str:
    return "float32" if weight.element_size() <= 2 else str(weight.dtype).removeprefix("torch.")


def _load_scheduler(scheduler: Any, state: Any) -> None:
    """Of a scheduler of another kind, some look for what only theirs have."""
    former = copy.deepcopy(scheduler.state_dict())
    try:
        scheduler.load_state_dict(copy.deepcopy(state))
    except Exception as error:
        scheduler.load_state_dict(former)
        raise ArgumentError(
            f"The state of the scheduler is not that of {type(scheduler).__qualname__}: "
            f"{type(error).__name__}: {error}."
        ) from error


def _as_tensor(name: str, value: Any) -> Any:
    """Of what is given as a weight. ArgumentError if it has no numbers."""
    import torch

    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(np.array(value))
    except TypeError:  # of objects, strings …
        raise ArgumentError(f"The weight {name} is {value!r}; expected a tensor or an array of numbers.") from None


def _as_array(tensor: Any, copy: bool = False) -> Array | None:
    if tensor is None:
        return None
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and tensor.element_size() <= 2:  # numpy has no bfloat16
        tensor = tensor.float()
    array: Array = tensor.cpu().resolve_conj().resolve_neg().numpy()
    return array.copy() if copy else array


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)
