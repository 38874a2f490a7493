"""Uniform numbers as a function of (seed, stream, position, index), and of nothing else.

A keyed hash has no state: the numbers of a request do not depend on its neighbours in the batch, on the order of
the work or on the platform.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import struct

SEED_BITS = 64
_RESOLUTION_BITS = 23
_SCALE = 2.0**-_RESOLUTION_BITS


class Stream(enum.IntEnum):
    """What a number is used for. No two streams share a number."""

    DRAFT = 1  # draws of the draft's proposals
    ACCEPT = 2  # acceptance tests
    DRAW = 3  # corrections, bonuses and plain decoding


def uniforms(seed: int, stream: Stream, position: int, index: int, count: int) -> list[float]:
    """`count` <= 16 independent numbers, uniform on the multiples of 2^-23 in [0, 1).

    These are exact in float32, and the largest stays below 1 when it multiplies a float32 total.
    `position` is the token's place in its sequence; `index` tells apart two rounds that reach that place.
    """
    key = struct.pack("<QBQQ", seed, stream, position, index)
    words = struct.unpack(f"<{count}I", hashlib.blake2b(key, digest_size=4 * count).digest())
    return [(word >> (32 - _RESOLUTION_BITS)) * _SCALE for word in words]


NOISE_PRIME = 2**31 - 1


def noise_keys(seed: int) -> tuple[int, int]:
    """The two keys, below 2^31 - 1, of the noise that graphs make for the law `coupled`."""
    digest = hashlib.blake2b(struct.pack("<Q", seed), digest_size=32, person=b"noise keys").digest()
    left, right = (int.from_bytes(digest[start : start + 16], "little") for start in (0, 16))
    return left % NOISE_PRIME, right % NOISE_PRIME


def sibling_seed(seed: int, index: int) -> int:
    """The seed of sample number `index` of a request; number 0 has the request's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8, person=b"sibling seed").digest()
    return int.from_bytes(digest, "little")


def fresh_seed() -> int:
    """A seed from the operating system, for a request that names none."""
    return secrets.randbits(SEED_BITS)
