"""What ranks and other processes of these tests import, once, in the process they are forked from.

Some of it stages only import once they know their model or their sharding: without this, each rank
would pay for that anew, and for DeepSpeed as much as for torch.
"""

import gc
import importlib
import os
from importlib.util import find_spec

from stages.contracts.catalog import STAGES
from stages.engines.models.lean_transformers import hidden

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

USED = (
    "torch._dynamo",
    *(stage.module for stage in STAGES.values()),
    "stages.engines.models.readers",
    "stages.engines.models.unread",
    "stages.engines.models.usual",
    "stages.engines.training.zero",
    "transformers.models.llama.modeling_llama",
    "tests.stages.test_online",
    "tests.stages.test_spread",
    # The first of them is pyarrow's, which looks for it when it makes its first table.
    *(name for name in ("pandas", "peft", "deepspeed") if find_spec(name)),
)

with hidden(("mlflow",)):  # as the stages import DeepSpeed
    for name in USED:
        importlib.import_module(name)
if find_spec("deepspeed"):
    importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
# What is never collected is never copied: a fork costs what it changes.
gc.collect()
gc.freeze()
