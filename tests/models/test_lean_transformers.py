"""What transformers is spared while it is imported, it does not miss."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from transformers.utils import import_utils

from stages.engines.models.lean_transformers import Distributions, listed_once

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


def test_a_package_is_found_in_the_distributions_that_a_listing_finds() -> None:
    listed, found = metadata.packages_distributions(), Distributions()
    for package in ("torch", "accelerate", "yaml", "sklearn", "flash_attn", "not_installed"):
        assert set(found.get(package, [])) >= set(listed.get(package, [])), package
        assert bool(found.get(package, [])) == bool(listed.get(package)), package


def test_the_distributions_are_not_listed_while_transformers_is_imported() -> None:
    code = (
        "from importlib import metadata\n"
        "metadata.packages_distributions = lambda: exit('listed')\n"
        "from stages.engines.models import lean_transformers\n"
        "from transformers.utils import is_accelerate_available\n"
        "assert is_accelerate_available()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_vllm_asks_of_transformers_as_it_starts_on_a_gpu_is_there() -> None:
    """It imports a model with images, whatever the model that it loads."""
    code = (
        "from stages.engines.models import lean_transformers\n"
        "from transformers.image_utils import PILImageResampling\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flash_attention_is_known_by_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two distributions have a package of that name; transformers asks which one is installed."""
    folder = tmp_path / "flash_attn_4-4.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0\n")
    (folder / "top_level.txt").write_text("flash_attn\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Distributions, "listed", staticmethod(metadata.packages_distributions))
    assert Distributions().get("flash_attn") == ["flash-attn-4"]
