"""How a worker's memory is kept. Frameworks take and free what a step needs at each step anew."""

_PIECE_BYTES = 31 << 20
"""The C library learns from pieces of less than 32 MiB."""


def keep_freed_memory() -> None:
    """Let the C library (glibc) keep up to twice this piece for the next step. It gives back to the kernel what is free
    beyond twice the largest piece that was ever freed, and for a model whose tensors are small, it does so at every
    step: thousands of page faults, a tenth of the time. That one piece of this size was freed changes it."""
    bytes(_PIECE_BYTES)
