"""One rank of an `online` job that samples with vLLM.

test_vllm.py starts all of them. The rank that `keeps_old` names has a vLLM that loads nothing when
it is given weights for the second time; the one that `killed` names is, when it has answered.
"""

import json
import os
import signal
import sys

from stages.engines.generation.vllm_generator import VllmGenerator
from tests.stages.test_online_ranks import main

_take, _generate = VllmGenerator.take, VllmGenerator.generate


def keep_old(generator, weights):
    if generator.policy_hash:
        call = generator._call
        generator._call = lambda name, *given: name == "load_piece" or call(name, *given)
    _take(generator, weights)


def answer_and_die(generator, *asked, **how):
    _generate(generator, *asked, **how)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    if options["rank"] == options.get("keeps_old"):
        VllmGenerator.take = keep_old
    if options["rank"] == options.get("killed"):
        VllmGenerator.generate = answer_and_die
    main(options)
