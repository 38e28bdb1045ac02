"""Packages that only some environments need; extras of pyproject.toml have them."""

from importlib.util import find_spec


def require(package: str, extra: str) -> None:
    """ImportError where a package is not installed."""
    if find_spec(package) is None:
        raise ImportError(
            f"{package} is not installed: pip install -c constraints.txt -e '.[{extra}]'"
        )
