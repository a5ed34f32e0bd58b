"""What a user passes to a Trainer, checked and brought into one form. Nothing here starts or writes anything."""

import inspect
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from numbers import Real
from typing import Any, ParamSpec, TypeVar

from paceline.checkpoints import CheckpointStrategy, read_info
from paceline.data.given import resolve_dataset
from paceline.errors import ArgumentError, ArgumentTypeError
from paceline.runs import RunRequest
from paceline.workers.base import Resources, Size

DETAILED_METRICS = "SGD_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS"

P = ParamSpec("P")
R = TypeVar("R")


def same_arguments_as(source: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Gives a method the signature of another, so that their arguments are written down once."""

    def decorate(method: Callable[..., R]) -> Callable[P, R]:
        signature = inspect.signature(source)
        kept = inspect.signature(method).return_annotation
        method.__signature__ = signature.replace(return_annotation=kept)  # type: ignore[attr-defined]
        return method

    return decorate


def bound(method: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call by name, defaults among them, without `self`. TypeError as from the call itself."""
    call = inspect.signature(method).bind(*args, **kwargs)
    call.apply_defaults()
    return {name: value for name, value in call.arguments.items() if name != "self"}


def request_of(train_func: Callable[..., Any], **options: Any) -> RunRequest:
    """What was asked of a run, each option checked and brought into one form by the function named after it."""
    checks: dict[str, Callable[[Any], Any]] = {
        "config": config_of,
        "checkpoint": checkpoint_of,
        "checkpoint_strategy": strategy_of,
        "dataset": resolve_dataset,
        "record_ids": record_ids_of,
    }
    checked = {name: checks[name](value) if name in checks else value for name, value in options.items()}
    if checked.get("record_ids"):
        _check_recordable(checked["record_ids"], checked.get("dataset"))
    return RunRequest(
        train_func=train_func,
        takes_config=takes_config(train_func, has_config=options.get("config", ...) is not None),
        is_namespace=isinstance(options.get("config"), Namespace),
        detailed_metrics=os.environ.get(DETAILED_METRICS, "0") not in ("", "0"),
        **checked,
    )


def takes_config(train_func: Callable[..., Any], has_config: bool = True) -> bool:
    """Whether to hand over the config. Only parameters without a default have to be filled, and only one can be; one
    that has a default keeps it if no config was given."""
    if not callable(train_func):
        raise ArgumentTypeError(
            f"train_func is {train_func!r} of type {type(train_func).__name__}; expected a function."
        )
    try:
        parameters = inspect.signature(train_func).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not tell
        return True
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    unfilled = [
        p.name
        for index, p in enumerate(parameters)
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p not in positional[:1]
    ]
    if unfilled:
        name = getattr(train_func, "__name__", repr(train_func))
        raise ArgumentError(
            f"{name} has {len(unfilled) + len(positional[:1])} required parameters; a training function takes none, or "
            f"one: the config. Put {', '.join(unfilled)} into the config, or bind them with functools.partial."
        )
    return bool(positional) and (has_config or positional[0].default is inspect.Parameter.empty)


def config_of(config: Any) -> dict[str, Any]:
    """The config as a dict. OmegaConf's is resolved into plain containers."""
    if isinstance(config, Namespace):
        return dict(vars(config))
    if type(config).__module__.partition(".")[0] == "omegaconf":
        config = _plain_container(config)
    if config is not None and not isinstance(config, Mapping):
        hint = " Give dataclasses.asdict(config)." if is_dataclass(config) else ""
        raise ArgumentTypeError(
            f"config is {config!r} of type {type(config).__name__}; expected a dict, an argparse.Namespace or "
            f"OmegaConf's DictConfig.{hint}"
        )
    return dict(config or {})


def _plain_container(config: Any) -> Any:
    """Of OmegaConf's, which is imported if there is a config of it."""
    try:
        return sys.modules["omegaconf"].OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except Exception as error:
        raise ArgumentError(
            f"config cannot be resolved ({type(error).__name__}: {error}). Give its missing values, or what its "
            "interpolations refer to, before you pass it to run()."
        ) from error


def checkpoint_of(checkpoint: dict[str, Any] | str | os.PathLike[str] | None) -> str | dict[str, Any] | None:
    if checkpoint is None or isinstance(checkpoint, dict):
        return checkpoint
    if not isinstance(checkpoint, str | os.PathLike):
        raise ArgumentTypeError(
            f"checkpoint is a {type(checkpoint).__name__}; expected a dict, or the path or URL of a checkpoint."
        )
    return read_info(os.fspath(checkpoint)).path


def strategy_of(strategy: CheckpointStrategy | None) -> CheckpointStrategy:
    if strategy is None:
        return CheckpointStrategy()
    if not isinstance(strategy, CheckpointStrategy):
        raise ArgumentTypeError(f"checkpoint_strategy is a {type(strategy).__name__}; expected a CheckpointStrategy.")
    return strategy


def record_ids_of(record_ids: Any) -> bool | str:
    if not isinstance(record_ids, bool | str):
        raise ArgumentTypeError(
            f"record_ids is {record_ids!r} of type {type(record_ids).__name__}; expected True, for the numbers of "
            "rows, or the name of the column that names a row."
        )
    if record_ids == "":
        raise ArgumentError('record_ids="": expected True, or the name of the column that names a row.')
    return record_ids


def _check_recordable(record_ids: bool | str, supply: Any) -> None:
    if supply is None:
        raise ArgumentError(
            f"record_ids={record_ids!r} records which rows of the run's dataset went into which step, and this run has "
            "none: give it to run(dataset=...)."
        )
    if supply.engine == "ray":
        raise ArgumentError(
            f"record_ids={record_ids!r}: the rows of a Ray dataset are dealt by Ray, and have no numbers. Give the "
            "files that it is read from: dataset=paceline.data.read_parquet(...)."
        )


def resources_of(
    use_gpu: bool,
    cpus_per_worker: float | None,
    gpus_per_worker: float | None,
    resources_per_worker: Mapping[str, float] | None,
) -> Resources:
    """One truth out of four arguments; contradictions are errors."""
    custom = dict(resources_per_worker or {})
    cpus = _one_of("CPU", "cpus_per_worker", custom.pop("CPU", None), cpus_per_worker)
    gpus = _one_of("GPU", "gpus_per_worker", custom.pop("GPU", None), gpus_per_worker)
    for name, amount in {"CPU": cpus, "GPU": gpus, **custom}.items():
        if amount is not None and (isinstance(amount, bool) or not isinstance(amount, int | float) or amount < 0):
            raise ArgumentError(f"{name} per worker is {amount!r}; expected a number that is not negative.")
    if use_gpu and gpus == 0:
        raise ArgumentError("use_gpu=True contradicts zero GPUs per worker: leave one of them out.")
    if not use_gpu and gpus and "GPU" in (resources_per_worker or {}):
        raise ArgumentError(f"resources_per_worker asks for {gpus:g} GPU, but use_gpu is False: set use_gpu=True.")
    return Resources(cpus, float(use_gpu) if gpus is None else gpus, custom)


def _one_of(key: str, argument: str, from_dict: float | None, given: float | None) -> float | None:
    if from_dict is not None and given is not None and from_dict != given:
        raise ArgumentError(f"resources_per_worker[{key!r}]={from_dict:g} contradicts {argument}={given:g}.")
    return from_dict if given is None else given


_MOST_WORKERS = 100_000
"""More than any cluster has had: a slip of the finger, for which lists of that length would be made first."""


def size_of(num_workers: Any, replacement_timeout_s: float) -> Size:
    replacement_timeout_s = check_duration("replacement_timeout_s", replacement_timeout_s)
    if not isinstance(num_workers, tuple | list):
        if check_int("num_workers", num_workers) < 0:
            raise ArgumentError(f"num_workers={num_workers}: expected 1 or more, or 0 to run in this process.")
        if num_workers > _MOST_WORKERS:
            raise ArgumentError(f"num_workers={num_workers}: expected {_MOST_WORKERS} or fewer.")
        return Size(num_workers, num_workers, replacement_timeout_s)
    if len(num_workers) != 2:
        raise ArgumentError(f"num_workers={num_workers!r}: expected a number, or a pair (min, max).")
    least, most = num_workers
    check_int("the minimum of num_workers", least)
    if most != math.inf:
        check_int("the maximum of num_workers", most)
    if not 1 <= least <= most:
        raise ArgumentError(f"num_workers={num_workers!r}: expected 1 <= min <= max; max may be math.inf.")
    if least > _MOST_WORKERS:
        raise ArgumentError(f"num_workers={num_workers!r}: expected a min of {_MOST_WORKERS} or fewer.")
    return Size(least, most, replacement_timeout_s)


def check_int(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} is {value!r} of type {type(value).__name__}; expected a whole number.")
    return value


def check_duration(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ArgumentError(f"{name}={value!r}: expected a number of seconds, from 0 on.")
    return value


def check_timeout(name: str, value: float | None) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real | None):
        raise ArgumentTypeError(f"{name} is {value!r} of type {type(value).__name__}; expected a number of seconds.")
    if value is not None and not value > 0:
        raise ArgumentError(f"{name}={value!r}: expected a positive number of seconds, or None.")
    return value
