"""Integers and ids from content: the only source of randomness, the same in every process.

Python's own `hash` differs between processes; these do not. Every random choice of a stage is a
function of what it is about (run seed, iteration, prompt, sample), never of the order in which
choices are made.
"""

import hashlib
import json
from collections.abc import Iterable

SEED_BITS = 63


def stable_hash(*parts: str | int) -> int:
    """A 63-bit integer (it fits an int64 column) that depends on the parts and on nothing else."""
    text = json.dumps(parts, ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - SEED_BITS)


def content_id(text: str) -> str:
    """A short id of a text, stable over runs and machines."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def draw_order(prompt_ids: Iterable[str], seed: int, iteration: str) -> list[str]:
    """The order in which an iteration draws prompts."""
    return sorted(prompt_ids, key=lambda prompt_id: stable_hash(seed, iteration, prompt_id))


def shuffled(count: int, *parts: str | int) -> list[int]:
    """The numbers below `count` in an order that depends on the parts only."""
    return sorted(range(count), key=lambda index: stable_hash(*parts, index))
