"""Which rows go through a model together: as many as fit a budget of tokens, by their lengths.

The answer depends on the lengths and the budget alone. Rows of like length are together, so that
little is wasted where a batch has to be padded to its longest row, and the longest come first: a
budget that is too large for the memory fails at once, not after an hour.
"""

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups of rows, by number, of at most `budget` tokens each; a longer row is alone."""
    groups: list[list[int]] = []
    room = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not groups or lengths[row] > room:
            groups.append([])
            room = budget
        groups[-1].append(row)
        room -= lengths[row]
    return groups
