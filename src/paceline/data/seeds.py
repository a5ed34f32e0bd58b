"""Seeds that follow from other numbers."""

from hashlib import blake2b


def derived_seed(*parts: int | str) -> int:
    """A seed of 63 bits. Neighbouring parts give unrelated seeds, which adding numbers would not."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1
