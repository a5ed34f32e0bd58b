"""TensorFlow: its values. See `Framework` for what is asked; how its workers become a group is a backend.

It has no global generator whose state could be kept: unseeded operations draw seeds of their own, and seeded ones count
inside of their kernels. So it is not seeded here either: nobody could give the former state back.
"""

from typing import Any, ClassVar

from paceline.frameworks.base import ArrayCodec, Framework


class Tensorflow(Framework):
    name: ClassVar[str] = "tensorflow"
    packages: ClassVar[tuple[str, ...]] = ("tensorflow",)
    array_tag: ClassVar[str | None] = "tensorflow.tensor"

    def plain(self, value: Any) -> Any:
        """A tensor or variable without dimensions as a number, any other as a numpy array. One of a graph has no value
        and stays what it is."""
        import tensorflow as tf

        if not isinstance(value, tf.Tensor | tf.Variable) or not hasattr(value, "numpy"):
            return value
        if value.dtype == tf.bfloat16:  # numpy has none
            value = tf.cast(value, tf.float32)
        return value.numpy().item() if value.shape == () and value.dtype != tf.string else value.numpy()

    def pack_as(self, value: Any) -> Any:
        """A variable as the array that it holds: it belongs to a process, and one of a strategy to a group."""
        import tensorflow as tf

        return value.numpy() if isinstance(value, tf.Variable) else value

    def codec(self) -> ArrayCodec:
        from paceline.frameworks import tensorflow_arrays

        return tensorflow_arrays

    def thread_variables(self, num_threads: int) -> dict[str, str]:
        return {"TF_NUM_INTRAOP_THREADS": str(num_threads)}


def variables_of(optimizer: Any) -> list[Any]:
    """Of any Keras': the count of its steps, and what it has for each weight."""
    found = optimizer.variables
    return list(found() if callable(found) else found)  # a method of older ones


def rate_apart(optimizer: Any) -> Any:
    """The learning rate as the variable that callbacks change, if it is not among these: Keras 3 has it there, Keras 2
    has not. None if there is none."""
    try:
        rate = optimizer.learning_rate
    except (AttributeError, ValueError):  # of somebody's own, which has no such thing
        return None
    is_known = any(rate is one for one in variables_of(optimizer))
    return rate if hasattr(rate, "assign") and not is_known else None
