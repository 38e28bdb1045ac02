"""The torch generator: continuous batching for the Llama family, padded batches for the rest.

The first answer under new weights is checked against a plain forward pass of the model, unless
somebody else will: an architecture that the decoding gets wrong is an error and not a bad sample.
"""

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.data.batching import collate
from stages.engines.forward.logprobs import response_logprobs
from stages.engines.forward.packed import not_compiled
from stages.engines.generation.decoding import decode
from stages.engines.generation.generator import Completion, Request, Sampling, check_context
from stages.engines.generation.llama.decoder import LlamaDecoder
from stages.engines.generation.llama.weights import hold_once, is_known
from stages.engines.generation.padded import generate as generate_padded
from stages.engines.models.folders import content_hash, load_policy, pad_id
from stages.engines.models.lora import unwrapped

LARGEST_GAP = {torch.float32: 5e-3, torch.bfloat16: 0.25}
"""How far log-probs may be from the plain forward pass's, on average over an answer at temperature
1, by the weights' type."""


class TorchGenerator:
    """Answers with the weights of a folder, or with those of a model that somebody else trains."""

    def __init__(self, device: str, precision: Precision, slots: int) -> None:
        self.policy_hash = ""
        self._device = device
        self._precision = precision
        self._slots = slots
        self._model: Any = None
        self._owned = False
        self._decoder: LlamaDecoder | None = None
        self._checked = False
        self._asleep = False

    def load(self, folder: Path) -> None:
        self.close()
        model = load_policy(folder, self._device, self._precision)
        self._use(model, content_hash(model), owned=True)

    @torch.no_grad()
    def take(
        self, model: Any, policy_hash: str, *, compared: bool = False, owned: bool = False
    ) -> None:
        """Answer with a resident model's weights as they are now: after each change, take again.

        `compared`: somebody will hold the answers' log-probs against the model's own, and a model
        that was checked once need not be checked after each change. `owned`: the model is there to
        answer alone, and is decoded with its own tensors.
        """
        if model is self._model and self._decoder is not None:
            if not self._owned:
                self._decoder.renew()
            self.policy_hash, self._checked = policy_hash, self._checked and compared
        else:
            self.close()
            self._use(model, policy_hash, owned=owned)

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling
    ) -> list[Completion]:
        assert not self._asleep, "wake it first"
        context = getattr(unwrapped(self._model).config, "max_position_embeddings", None)
        check_context(context, requests, max_new_tokens)
        with _on(self._device):
            completions = self._generate(requests, max_new_tokens, sampling)
            if not self._checked:
                self._check(requests[0], completions[0], sampling)
                self._checked = True
        return completions

    def _generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Completion]:
        if self._decoder is not None:
            self._decoder.begin(requests, max_new_tokens, sampling)
            decode(self._decoder, requests, max_new_tokens)
            return self._decoder.completions()
        return [
            completion
            for start in range(0, len(requests), self._slots)
            for completion in generate_padded(
                self._model,
                requests[start : start + self._slots],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
            )
        ]

    def sleep(self) -> None:
        self._asleep = True
        self._decoder = None
        if self._owned:
            self._model.to("cpu")
        _free(self._device)

    def wake(self) -> None:
        if self._owned:
            self._model.to(self._device)
        self._make_decoder()
        self._asleep = False

    def close(self) -> None:
        self._model = self._decoder = None
        _free(self._device)

    def _use(self, model: Any, policy_hash: str, *, owned: bool) -> None:
        self._model, self.policy_hash, self._owned = model, policy_hash, owned
        self._checked = self._asleep = False
        self._make_decoder()

    @torch.no_grad()
    def _make_decoder(self) -> None:
        if not is_known(self._model):
            return
        if self._device.startswith("cuda"):
            from stages.engines.generation.llama.cuda_graphs import (
                GraphDecoder,  # Triton comes with torch for CUDA
            )

            self._decoder = GraphDecoder(self._model, self._slots)
        else:
            self._decoder = LlamaDecoder(self._model, self._slots)
        if self._owned:
            hold_once(self._decoder.weights, self._model)

    def _check(self, request: Request, completion: Completion, sampling: Sampling) -> None:
        batch = collate(
            [request.prompt_ids],
            [completion.ids],
            pad_id(unwrapped(self._model)),
            self._device,
            supports=[completion.support],
        )
        training = self._model.training
        self._model.eval()
        with not_compiled(self._model):
            plain_pass = response_logprobs(self._model, batch, sampling.temperature)
        expected = plain_pass.logprobs[0].tolist()
        self._model.train(training)
        gap = statistics.fmean(
            abs(ours - theirs) for ours, theirs in zip(completion.logprobs, expected, strict=True)
        )
        bound = LARGEST_GAP[unwrapped(self._model).dtype] / min(1.0, sampling.temperature)
        # Log-probs that are not finite are named, sample by sample, by who asked for them.
        if gap > bound:
            raise StageError(
                f"the torch generator's log-probs of the first answer differ by {gap:.3g} per "
                f"token from those of a plain forward pass ({bound:.3g} may be rounding): it does "
                f"not decode models of type {unwrapped(self._model).config.model_type} correctly; "
                "set rollout.engine: vllm"
            )


def _on(device: str) -> AbstractContextManager[Any]:
    """Kernels and graphs go to the current GPU, whatever their tensors say."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


def _free(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
