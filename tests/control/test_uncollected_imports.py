"""What is imported in one go is neither searched for garbage meanwhile nor afterwards."""

import gc

import pytest

from pipelines.base.imports import uncollected


def test_an_import_that_fails_leaves_the_search_for_garbage_on() -> None:
    made: list[object] = []

    def imported() -> None:
        assert not gc.isenabled()
        made.append([])
        raise ModuleNotFoundError

    try:
        with pytest.raises(ModuleNotFoundError), uncollected():
            imported()
        assert gc.isenabled()
        assert not any(one is made[0] for one in gc.get_objects())
    finally:
        gc.unfreeze()
