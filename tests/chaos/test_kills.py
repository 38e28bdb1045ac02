"""Any process may die at any moment: `lockstep run` or `dvc repro` ends with the same bytes.

The seed is printed, and fresh unless LOCKSTEP_CHAOS_SEED gives it: `make test` gives the same one
each time, `make chaos` is the long form with a fresh one. LOCKSTEP_CHAOS_KILLS says how many kills.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.chaos.conftest import copy_to_torment
from tests.chaos.monkey import (
    Monkey,
    differences,
    leftovers,
    number_of_kills,
    pace_of,
    results,
    rounds,
    stage_runs,
    the_seed,
    wait_for_quiet,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

ROUND = 15
"""Kills in one clone; more of them, and nothing would ever get done."""
USUAL = 4
"""Kills for each of the two commands where nobody says how many."""
RUN, REPRO = ("lockstep", "run"), ("dvc", "repro")


def test_whatever_is_killed_the_same_or_the_other_command_ends_with_the_same_bytes(
    fresh_root: Path, peaceful_root: Path, tmp_path: Path
) -> None:
    """After each death `lockstep run` or `dvc repro` goes on, whichever of them was killed."""
    seed = the_seed()
    for number, kills in enumerate(rounds(2 * number_of_kills(USUAL), ROUND)):
        with copy_to_torment(fresh_root, tmp_path / "clone") as clone:
            monkey = Monkey(clone, seed, kills, pace_of(peaceful_root, kills), number=number)
            monkey.torment(*RUN, other=REPRO)
            for command in (RUN, REPRO):
                clone.run(*command)
            clone.run("lockstep", "sync")
            assert_as_if_nothing_had_happened(clone, peaceful_root, monkey)


def assert_as_if_nothing_had_happened(clone: Any, peaceful_root: Path, monkey: Monkey) -> None:
    """The same files, and nothing beside them: no process, no rest, no second run."""
    problems = [f"still runs: {line}" for line in wait_for_quiet(clone)]
    problems += differences(results(clone.root), results(peaceful_root))
    problems += [f"left: {path}" for path in leftovers(clone.root)]
    shown = stage_runs(clone.root)
    expected = {address: curve for address, _, curve in stage_runs(peaceful_root)}
    problems += [f"{address} is {status}" for address, status, _ in shown if status != "FINISHED"]
    addresses = [address for address, _, _ in shown]
    if sorted(addresses) != sorted(expected):
        problems.append(f"runs: {sorted(addresses)}")
    for address, _, curve in shown:
        problems += [f"{address}: {what}" for what in differences(curve, expected.get(address, {}))]
    assert not problems, monkey.story("\n".join(problems))
