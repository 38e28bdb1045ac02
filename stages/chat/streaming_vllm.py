"""vLLM, watched while it decodes: each token is told when it is drawn.

Requests, weights and log-probs are as for rollouts. Only the way that an answer is waited for is
another: the engine is stepped, instead of asked for what is whole. A chat needs no log-probs that a
trainer could compute again, so what top_p, top_k and min_p cut off may be cut off here.
"""

import uuid
from dataclasses import replace
from typing import Any

from stages.chat.streaming import Tell
from stages.engines.generation.generator import Completion, Request, Sampling
from stages.engines.generation.vllm_generator import VllmGenerator

MEMORY_SHARE = 0.4
"""Of a GPU: two policies may answer side by side."""
LONGEST = 16384
"""Tokens of a dialogue and its answer, for which vLLM keeps room from its start on."""


class StreamingVllm(VllmGenerator):
    """Answers one request at a time."""

    _tell: Tell | None = None
    _sampling = Sampling()

    def stream(
        self, request: Request, *, max_new_tokens: int, sampling: Sampling, tell: Tell
    ) -> Completion:
        """The answer, of which `tell` has heard all tokens when this returns."""
        self._tell, self._sampling = tell, sampling
        whole = replace(sampling, top_p=1.0, top_k=0, min_p=0.0)
        try:
            [answer] = self.generate([request], max_new_tokens=max_new_tokens, sampling=whole)
        finally:
            self._tell = None
        tell(answer.ids)
        return answer

    def _answers(self, prompts: list[Any], params: list[Any]) -> Any:
        if self._tell is None:
            return super()._answers(prompts, params)
        [prompt], [asked] = prompts, params
        if asked.temperature:
            cuts = self._sampling
            asked.top_p, asked.top_k, asked.min_p = cuts.top_p, cuts.top_k, cuts.min_p
        name, engine = uuid.uuid4().hex, self._llm.llm_engine
        engine.add_request(name, prompt, asked)
        try:
            while True:
                for answer in engine.step():
                    self._tell(list(answer.outputs[0].token_ids))
                    if answer.finished:
                        return [answer]
        except BaseException:
            engine.abort_request([name])
            raise
