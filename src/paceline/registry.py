"""The things that are chosen by name, and where each of them is. They are imported when they are chosen, not before.

This is the one place where a name stands for an import: through it a lower floor can hand out what stands above it.
"""

from importlib import import_module
from typing import Any

KINDS = {
    "backend": {
        "tensorflow": "paceline.backends.tensorflow:TensorflowConfig",
        "horovod": "paceline.backends.horovod:HorovodConfig",
        "jax": "paceline.backends.jax:JaxConfig",
        "torch": "paceline.backends.torch:TorchConfig",
    },
    "engine": {
        "inline": "paceline.workers.inline:InlineEngine",
        "local": "paceline.workers.local:LocalEngine",
        "ray": "paceline.workers.ray:RayEngine",
    },
    "framework": {
        "jax": "paceline.frameworks.jax:Jax",
        "numpy": "paceline.frameworks.numpy:Numpy",
        "tensorflow": "paceline.frameworks.tensorflow:Tensorflow",
        "torch": "paceline.frameworks.torch:Torch",
    },
    "dataset": {
        "arrow": "paceline.data.kinds.arrow:ArrowSource",
        "csv": "paceline.data.kinds.text:CsvSource",
        "huggingface": "paceline.data.kinds.huggingface:HuggingFaceSource",
        "huggingface_stream": "paceline.data.kinds.huggingface:HuggingFaceStreamSource",
        "json": "paceline.data.kinds.text:JsonSource",
        "numpy": "paceline.data.kinds.numpy:NumpySource",
        "pandas": "paceline.data.kinds.pandas:PandasSource",
        "parquet": "paceline.data.kinds.parquet:ParquetSource",
        "torch": "paceline.data.kinds.torch:TorchSource",
        "torch_stream": "paceline.data.kinds.torch:TorchStreamSource",
    },
    "replica": {
        "jax": "paceline.sgd.jax_replica:JaxReplica",
        "numpy": "paceline.sgd.numpy_replica:NumpyReplica",
        "tensorflow": "paceline.sgd.tensorflow_replica:TensorflowReplica",
        "torch": "paceline.sgd.torch_replica:TorchReplica",
    },
    "rows": {"audit": "paceline.recording.audit:audit", "diff": "paceline.recording.row_difference:diff"},
    "sgd_device": {"torch": "paceline.sgd.torch_allreduce:on_device"},
    "sgd_exchange": {"torch": "paceline.sgd.torch_allreduce:exchange_of"},
    "sgd_shelf": {"message": "paceline.sgd.shelf:MessageShelf", "ray": "paceline.sgd.ray_shelf:RayShelf"},
    "sgd_strategy": {
        "allreduce": "paceline.sgd.strategies:AllReduce",
        "ps": "paceline.sgd.strategies:ParameterServers",
        "simple": "paceline.sgd.strategies:Simple",
    },
    "search": {"tune": "paceline.search:tune_trainable"},
}

WORKER_MODULES = (
    "paceline.workers.worker_process",
    "paceline.session",
    "paceline.checkpoints.saver",
    "paceline.checkpoints.storage.local",
)
"""What every worker uses of Paceline: good to have imported before it is forked."""

LAUNCH_WORKER_MODULES = ("paceline.launch.as_main",)
"""What a worker uses besides that runs a script."""

EXPERIMENT_WORKER_MODULES = ("torchmetrics", "paceline.data.door", "paceline.experiment.measures")
"""What a worker uses besides that trains a typed experiment: torchmetrics, which takes as long as torch to import,
if the experiment has imported it."""

JAX_WORKER_MODULES = ("paceline.frameworks.jax_arrays",)
"""What a worker that trains with jax is likely to use besides."""

TORCH_WORKER_MODULES = (
    "paceline.frameworks.torch_arrays",
    "paceline.prepare.loader",
    "paceline.prepare.model",
)
"""What a worker that trains with torch is likely to use besides."""

SGD_WORKER_MODULES = (
    "paceline.sgd.serving",
    "paceline.sgd.model_calls",
    "paceline.sgd.shelf",
    "paceline.sgd.torch_allreduce",
    *(place.partition(":")[0] for place in KINDS["replica"].values()),
)
"""What a worker of DistributedSGD uses besides, if it has torch."""

TENSORFLOW_IMPORT = "paceline.backends.tensorflow_import"
"""By which a worker imports TensorFlow."""


def find(kind: str, name: str) -> Any:
    """Import it. KeyError for a name that is not there: `names` says which are."""
    module, _, attribute = KINDS[kind][name].partition(":")
    return getattr(import_module(module), attribute)


def names(kind: str) -> list[str]:
    return sorted(KINDS[kind])
