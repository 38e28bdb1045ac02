"""One rank of an `online` job that samples with vLLM.

test_vllm.py starts all of them. The rank that `keeps_old` names has a vLLM that loads nothing when
it is given weights for the second time.
"""

import json
import sys

from stages.engines.generation.vllm_generator import VllmGenerator
from tests.stages.test_online_ranks import main

_take = VllmGenerator.take


def keep_old(generator, weights):
    if generator.policy_hash:
        call = generator._call
        generator._call = lambda name, *given: name == "load_piece" or call(name, *given)
    _take(generator, weights)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if options["rank"] == options.get("keeps_old"):
        VllmGenerator.take = keep_old
    main(options)
