"""What transformers is spared while it is imported, it does not miss."""

from pathlib import Path

from transformers.utils import import_utils

from stages.engines.models.lean_transformers import listed_once

MODELS = Path(import_utils.__file__).parents[1] / "models"


def test_the_classes_of_all_models_are_listed_once_and_are_those_of_each_path() -> None:
    read = import_utils.create_import_structure_from_path
    by_file = str(MODELS / "__init__.py")
    read(MODELS)  # as `import transformers` does
    with listed_once(import_utils):
        before = read.cache_info()
        listed = import_utils.create_import_structure_from_path(by_file)
        of_one = import_utils.create_import_structure_from_path(str(MODELS / "llama/__init__.py"))
        after = read.cache_info()
    assert import_utils.create_import_structure_from_path is read
    assert listed == read.__wrapped__(by_file)
    assert "modeling_llama" in str(of_one)
    assert after.misses - before.misses <= 2, "all folders were read again"
