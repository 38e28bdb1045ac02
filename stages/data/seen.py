"""A set of 128-bit digests in a flat table: about 30 to 50 bytes for each, for millions of rows.

Python's own set takes some 120. Digests are uniform, so their bits are the place in the table.
"""

from array import array

_FULLEST = 0.6


class Seen:
    """Digests that were met before."""

    def __init__(self) -> None:
        self._resize(1 << 10)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, digest: bytes) -> bool:
        low, high = _halves(digest)
        at = self._find(low, high)
        return bool(self._slots[at] or self._slots[at + 1])

    def add(self, digest: bytes) -> bool:
        """Whether it is new."""
        low, high = _halves(digest)
        at = self._find(low, high)
        if self._slots[at] or self._slots[at + 1]:
            return False
        self._slots[at], self._slots[at + 1] = low, high
        self._count += 1
        if self._count > _FULLEST * (self._mask + 1):
            self._grow()
        return True

    def _find(self, low: int, high: int) -> int:
        """Where it is, or where it would be put."""
        slots, mask, slot = self._slots, self._mask, low & self._mask
        while True:
            at = 2 * slot
            there, beside = slots[at], slots[at + 1]
            if (there == low and beside == high) or not (there or beside):
                return at
            slot = (slot + 1) & mask

    def _grow(self) -> None:
        old = self._slots
        self._resize(2 * (self._mask + 1))
        for index in range(0, len(old), 2):
            if old[index] or old[index + 1]:
                at = self._find(old[index], old[index + 1])
                self._slots[at], self._slots[at + 1] = old[index], old[index + 1]

    def _resize(self, num_slots: int) -> None:
        self._mask = num_slots - 1
        self._slots = array("Q", bytes(16 * num_slots))


def _halves(digest: bytes) -> tuple[int, int]:
    """Never both zero, which marks an empty slot."""
    low, high = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
    return low, high or 1
