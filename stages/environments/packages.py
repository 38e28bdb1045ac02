"""Packages that only some environments need: the extra `tools` has them."""

from importlib.util import find_spec


def require(package: str, name: str) -> None:
    """ImportError where a package is not installed; `name` is what pip calls it."""
    if find_spec(package) is None:
        raise ImportError(f"{name} is not installed: pip install 'lockstep-rlhf[tools]'")
