"""What is known of a framework: the values it makes and what its process needs. One subclass for each, in one file.

    when                                        on which side     what is asked
    workers are started                         driver, worker    thread_variables, interface_variables, may_be_forked
    a process was forked                        worker            reseed
    a call is sent to workers                   driver, worker    settings, adopt
    a function begins in a worker               worker            putting_back
    a value is reported, recorded or drawn      both              plain
    anything is pickled for the other side      both              pack_as
    a state is saved, loaded                    worker, driver    codec
    random numbers are to come again            worker            rng_state, set_rng_state, seed

How workers become a group of a framework is not here: that is a backend.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class Framework:
    """A framework of which nothing is known but its name. Subclasses say what differs.

    Making one imports nothing: a method imports its framework itself when it cannot do without. Such an import also
    waits for another thread that is in the middle of it.
    """

    name: ClassVar[str]
    """The package that users import, and the extra that installs it."""
    packages: ClassVar[tuple[str, ...]]
    """The top-level packages in which the classes of its values are defined."""
    may_be_forked: ClassVar[bool] = True
    """Whether a process that has imported it, and done nothing more, may be forked. Otherwise the nursery leaves the
    import to the workers."""
    array_tag: ClassVar[str | None] = None
    """What a checkpoint calls its arrays. It stays as it is for good: checkpoints outlive versions."""
    value_tags: ClassVar[tuple[str, ...]] = ()
    """And its small values."""

    def plain(self, value: Any) -> Any:
        """A value of this framework for those who do not have it: a number, or a numpy array. One that has no plain
        form stays what it is."""
        return value

    def pack_as(self, value: Any) -> Any:
        """What travels in place of this value: the receiver may have neither the process group nor the GPU. Most values
        travel as they are, and are returned."""
        return value

    def codec(self) -> "ArrayCodec | None":
        """How its values go into a checkpoint; None if there are none to keep. Imports the framework."""
        return None

    def thread_variables(self, num_threads: int) -> Mapping[str, str]:
        """Environment variables by which a worker uses that many cores. What the user has set wins."""
        return {}

    def interface_variables(self, interface: str) -> Mapping[str, str]:
        """Environment variables by which workers talk over this network interface. What the user has set wins."""
        return {}

    def reseed(self) -> None:
        """In a process just forked from one that has the framework: draw new seeds, as a fresh process would."""

    def settings(self) -> Mapping[str, Any]:
        """What a script may have set for the whole process, where that differs from the default. Asked of a framework
        that is imported, or is being imported."""
        return {}

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Set this process to what `settings` returned in another; what is not named there goes back to its default."""

    def putting_back(self) -> Callable[[], None] | None:
        """What to call when the user's function has ended, so that the next one finds no more of it than this one has
        found. Asked when it begins, also if nobody has imported the framework yet."""
        return None

    def seed(self, seed: int) -> None:
        """Seed the global generator of the CPU; `seed` has up to 63 bits. Those of other devices are left alone, since
        loading data, for which orders are drawn and given back, does not use them."""

    def rng_state(self) -> Any:
        """The global generator of the CPU as a value that a checkpoint holds; None if there is no such generator."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` returned; a tuple may have become a list since."""


@dataclass(frozen=True)
class Block:
    """One array on its way into a file: its entry in the header, and how to copy it into its place. `dtype` is one of
    the names in the safetensors layout; what has none there goes as "U8"."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    alignment: int
    copy_into: Callable[[memoryview], None]


class Stored(Protocol):
    """One array in a file, as the header describes it."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def num_bytes(self) -> int: ...


class ArrayCodec(Protocol):
    """Values of one framework in a checkpoint, and back, bit for bit. Decoding runs no code of the file's author.

    A module with these functions is one: it may import its framework at its top, since it is imported only when a value
    of the framework is saved or loaded.
    """

    def is_array(self, value: Any, /) -> bool:
        """Whether a value of this framework is kept as raw bytes, and not inside the tree."""

    def problem(self, value: Any, /) -> str | None:
        """Why a checkpoint cannot hold this value, with the remedy; None if it can, or if general advice will do."""

    def identity(self, array: Any, /) -> tuple[object, ...] | None:
        """Equal for arrays that are the same memory seen in the same way, as tied weights are: they are kept once. None
        where memory says nothing, as without elements."""

    def block_of(self, array: Any, /) -> tuple[Block, dict[str, Any]]:
        """The array as a block, and what its node must say beyond the file's header."""

    def array_of(self, extra: dict[str, Any], stored: Stored, fill: Callable[[memoryview], None], /) -> Any:
        """The array of a block, on the CPU; `fill` reads its bytes into the memory that is handed over. ValueError for
        one that does not fit together."""

    def value_node(self, value: Any, /) -> tuple[str, dict[str, Any]] | None:
        """A small value as one of the framework's tags and plain fields; None for what it does not know."""

    def value_of(self, tag: str, fields: dict[str, Any], /) -> Any:
        """The value back."""
