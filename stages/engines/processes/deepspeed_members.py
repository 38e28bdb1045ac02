"""What is used of DeepSpeed that its documentation does not promise, and a check that it is there.

A stage looks at the version and at these members when it starts, and refuses a DeepSpeed that it
has not been tested with. A test compares the table with the code: nothing else of it is used.
"""

import re
from collections.abc import Mapping
from typing import Any

from stages.context import StageError

TESTED_FROM, TESTED_BELOW = (0, 19, 8), (0, 20, 0)
MEMBERS: Mapping[str, tuple[str, ...]] = {
    "comm": ("cdb",),
    "groups": ("_WORLD_GROUP", "_release_process_group_references"),
    "ops": ("__compatible_ops__",),
    "engine class": ("_do_optimizer_sanity_check",),
    "parameter partitioning": ("_zero_init_param",),
    "zero3 module": ("combine_grad_norm_groups",),
    "engine": (
        "_backward_prologue",
        "_running_engine_step",
        "allreduce_gradients",
        "module_forward_post_hook",
        "module_forward_pre_hook",
        "optimizer",
    ),
    "optimizer": (
        "clear_backward_seen_flag",
        "finalize_gradient_accumulation_boundary",
        "optimizer",
        "step",
        "zero_grad",
    ),
    "optimizer of zero1 and zero2": (
        "bit16_groups",
        "scaled_global_norm",
        "single_partition_of_fp32_groups",
        "update_lp_params",
    ),
    "optimizer of zero3": (
        "_get_norm_groups",
        "_reassign_or_swap_out_partitioned_parameters",
        "fp32_partitioned_groups_flat",
        "get_param_id",
        "grad_position",
        "parameter_offload",
        "persistent_parameters",
    ),
    "parameter offload": (
        "backward_hooks",
        "forward_hooks",
        "fwd_pre_hook",
        "get_param_coordinator",
    ),
    "parameter of zero1 and zero2": ("_hp_mapping",),
    "parameter of zero3": ("all_gather", "ds_persist", "ds_tensor", "partition"),
}
"""By the object that has them."""


def check_version(version: str) -> None:
    """StageError for a DeepSpeed that nothing was tested with."""
    number = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not TESTED_FROM <= number < TESTED_BELOW:
        raise StageError(f"DeepSpeed {version} is installed, {_advice()}")


def check_members(version: str, objects: Mapping[str, Any]) -> None:
    """StageError where one of these, by their names in `MEMBERS`, lacks what is used of it."""
    for name, thing in objects.items():
        for member in MEMBERS[name]:
            if not hasattr(thing, member):
                raise StageError(
                    f"DeepSpeed {version} is installed, whose {name} has no {member}, {_advice()}"
                )


def _advice() -> str:
    lowest, above = (".".join(map(str, number)) for number in (TESTED_FROM, TESTED_BELOW))
    return (
        f"but sharding and sequence_parallel were tested with {lowest} up to below {above}: "
        "install lockstep-rlhf[deepspeed] in the job's Python, or set sharding to fsdp, which "
        "needs torch alone, and sequence_parallel to 1"
    )
