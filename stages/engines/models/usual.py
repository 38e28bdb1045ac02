"""What transformers works out at the first model that it loads, worked out by importing this.

No stage imports it: it is for a process that is forked for stages.
"""

from contextlib import suppress

with suppress(ImportError):  # of a version that does without
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    # How old names of weights become new ones: hundreds of patterns, compiled once a process.
    get_checkpoint_conversion_mapping("llama")
