"""transformers' model classes, imported without what they would pull in and never use here.

transformers imports optional packages when they are installed: scikit-learn alone (it comes with
MLflow) costs every stage more than a second at start-up, for an assisted-decoding method that no
stage calls. While transformers is being imported, such packages look as if they were not there.
And it lists the classes of its models by reading all their files, twice; here, once. It lists the
files of all installed distributions, to know what a package comes from; here, it asks by name.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

OPTIONAL = ("sklearn", "scipy", "pandas", "torchvision", "librosa", "kernels")


@contextmanager
def hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Packages that have not been imported look as if they were not there."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            if sys.modules.get(name, ...) is None:
                del sys.modules[name]


@contextmanager
def listed_once(import_utils: Any) -> Iterator[None]:
    """`transformers.models` lists the classes that `transformers` has listed, under another path.

    Two and a half thousand files: half a second, and on a shared disk more.
    """
    classes_in = import_utils.create_import_structure_from_path
    models = Path(import_utils.__file__).parents[1] / "models"

    def remembered(path: Any) -> Any:
        return classes_in(models if Path(path) == models / "__init__.py" else path)

    import_utils.create_import_structure_from_path = remembered
    try:
        yield
    finally:
        import_utils.create_import_structure_from_path = classes_in


class Distributions(dict[str, list[str]]):
    """Packages, and the distributions that they come from: found when one is asked for.

    To list them all takes half a second. Those of flash_attn do differ from their package in name.
    """

    listed = staticmethod(cache(metadata.packages_distributions))

    def get(self, package: str, default: Any = None) -> Any:
        """The names of the distributions."""
        name = package.replace("_", "-")
        try:
            same = None if name.startswith("flash-attn") else metadata.distribution(name)
        except metadata.PackageNotFoundError:
            same = None
        return [same.name] if same else self.listed().get(package, default)


@contextmanager
def found_by_name() -> Iterator[None]:
    """`transformers` finds distributions as they are asked for."""
    listed = metadata.packages_distributions
    metadata.packages_distributions = Distributions
    try:
        yield
    finally:
        metadata.packages_distributions = listed


with hidden(OPTIONAL), found_by_name():
    from transformers.utils import import_utils

with hidden(OPTIONAL), listed_once(import_utils):
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSIFIERS,
    )
    from transformers.models.auto.modeling_auto import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )
    from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

__all__ = [
    "CLASSIFIERS",
    "AutoConfig",
    "AutoModelForCausalLM",
    "AutoModelForSequenceClassification",
    "hidden",
]
