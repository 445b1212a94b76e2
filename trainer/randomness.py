"""Random numbers that are a function of (seed, purpose, epoch, sample), and of nothing before.

SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014)
as a counter-based generator: word `i` under key `k` is `mix(k + (i + 1) * GAMMA)`. No state is
carried, so a resumed run, another batch size or another reader draws the same numbers for a clip,
and no version of numpy or torch changes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def mix(words: Words) -> Words:
    """Return SplitMix64's finaliser of each word: a bijection in which every bit matters."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def stream(seed: int, purpose: str, epoch: int = 0) -> np.uint64:
    """Return the key of one stream of random numbers, e.g. `stream(seed, "mask", epoch)`."""
    text = f"{seed & _MASK}/{purpose}/{epoch}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))


def sample_keys(ids: Iterable[str]) -> Words:
    """Return a 64-bit key for each sample id, (n,): the first 8 bytes of its BLAKE2b."""
    digests = b"".join(hashlib.blake2b(i.encode(), digest_size=8).digest() for i in ids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def words(key: np.uint64, samples: Words, count: int) -> Words:
    """Return `count` random words for each sample key, (n, count)."""
    steps = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return mix(mix(samples ^ key)[:, None] + steps[None, :] * _GAMMA)


def uniform(key: np.uint64, samples: Words, count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for each sample key, (n, count), of 53 random bits."""
    return (words(key, samples, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def order(key: np.uint64, samples: Words) -> NDArray[np.int64]:
    """Return a random permutation of the samples, (n,): their places, sorted by keyed hash.

    A sample's hash does not depend on which others are there, so the order of a subset is the
    order of the whole with the others left out.
    """
    return np.argsort(words(key, samples, 1)[:, 0], kind="stable").astype(np.int64)
