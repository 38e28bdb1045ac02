"""The hash of the tools that a prompt offers.

prepare leaves it in the row's `extra`, as `tools`, so that an environment can tell whether the
prompt was rendered with the tools that it has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stages.data.artifacts import canonical_json, without_nulls
from stages.data.seeds import content_id


def tools_hash(tools: Sequence[Mapping[str, Any]]) -> str:
    """The same for the same tools; what is null in them is as good as left out, as in the data."""
    return content_id(canonical_json(without_nulls(list(tools))))
