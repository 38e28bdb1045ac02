"""Same inputs, same bytes, also on a GPU: torch takes only algorithms that repeat.

What has no such algorithm on CUDA raises with its name instead of passing silently. On the CPU
nothing changes: there torch repeats anyway. This is execution, not identity, so no stage imports
it; the worker calls it.
"""

import os
import sys
from typing import Any


def before_import() -> None:
    """What the libraries read when they start: cuBLAS repeats only with a workspace of its own."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def after_import() -> None:
    """torch's own switches, where the stage has imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory shows reads of what was never written, and costs a pass over all of it;
    # it makes no algorithm repeat.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Whether float32 is cut to TF32 is not left to a library's default.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
