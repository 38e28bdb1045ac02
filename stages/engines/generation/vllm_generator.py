"""A generator over vLLM, for models that are large for one GPU, or spread over several.

Token ids go in and come out; nothing is turned into text. Each request carries its own seed, and
log-probs are *processed*: of the distribution that the token was drawn from, temperature included.
New weights replace the old ones in place, from a folder or through memory, and after each load
every tensor in the workers is compared with where it is from (vllm_worker.py). Nothing that was
cached under earlier weights, or by an earlier call, is ever used: an answer depends on the weights
and on the requests of its call.

What differs from the torch generator:
- The same seed draws other tokens: the seed is hashed into one for vLLM's own random numbers.
- vLLM tells no entropies. A completion's is estimated by minus the sum of its log-probs, which is
  right on average, of sampled completions.
- vLLM tells no supports, without which a trainer could not compute the same log-probs: top_p,
  top_k and min_p are refused.
- The log-probs of a greedy answer are those at temperature 1, whatever the temperature.
- On a GPU, only in a deterministic job is all asked of vLLM that it has for answers to repeat bit
  by bit: batch invariance, and no step that is scheduled before the one before it has ended.

Whether its engine is in this process, vllm_process.py says.

Over the GPUs of several ranks, the first of them has the generator. The others give their share of
the weights when it takes and compares them (processes/sampling_group.py), and are not needed
otherwise, but for the first of each further node, which has the workers there (vllm_start.py).
"""

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from stages.context import StageError
from stages.contracts.precision import Precision
from stages.data.seeds import stable_hash
from stages.engines.generation.generator import (
    Completion,
    GeneratorSettings,
    Request,
    Sampling,
    check_context,
)
from stages.engines.generation.vllm_process import (
    ENGINE_APART,
    forget_group,
    set_variables,
    starting,
)
from stages.engines.generation.vllm_start import engine_options, refuse_adapter_over_nodes
from stages.engines.generation.weight_pieces import Call, Through, compare, load
from stages.engines.models.folders import (
    content_hash,
    folder_hash,
    load_policy,
    stored_end_ids,
    weights_folder,
)
from stages.engines.models.lora import is_adapter_folder

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""A lower temperature vLLM would silently raise."""
NOT_OF_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "use_cache", "_name_or_path")
"""Keys of config.json that change no answer."""


class VllmGenerator:
    """vLLM with the weights of a folder, or with those that it is given.

    A process has one at a time: what vLLM keeps for the whole process goes when one is closed.
    """

    policy_hash: str
    _num_open = 0

    def __init__(self, folder: Path, settings: GeneratorSettings, *, empty: bool = False) -> None:
        """An empty one is to `take` weights of the model in the folder before it answers."""
        device, precision = settings.device, settings.precision
        self._group = settings.group
        gpu = torch.device(device).index or 0
        may_be_elsewhere = settings.tensor_parallel == 1 and os.environ.get(ENGINE_APART) != "0"
        if gpu and self._group is None and not may_be_elsewhere:
            raise StageError(
                f"vLLM takes the first GPU that it sees, not {device}, unless its engine has a "
                "process and that GPU for itself: set tensor_parallel: 1 and not "
                f"{ENGINE_APART}=0, or give each process its own GPUs by CUDA_VISIBLE_DEVICES, or "
                "set rollout.engine: torch"
            )
        self._gpus = self._group.gpus if self._group else [gpu] if gpu else []
        self._device = device
        self._precision, self._num_workers = precision, settings.tensor_parallel
        self._on_gpu = device.startswith("cuda")
        self._settings = settings
        self._llm: Any = None
        self._asleep = False
        self._empty = empty
        if empty:
            self.policy_hash = ""
            self._start(weights_folder(folder))
            return
        refuse_adapter_over_nodes(folder, self._group)
        with _plain(folder, precision) as (plain, policy_hash):
            self._start(plain)
            try:
                self._check(plain)
            except BaseException:
                self._stop()
                raise
        self.policy_hash = policy_hash

    def load(self, folder: Path) -> None:
        self.wake()
        # Whatever fails from here on, nobody takes what is loaded for the old weights.
        self.policy_hash = ""
        with _plain(folder, self._precision) as (plain, policy_hash):
            if _config(plain) == self._config:
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(plain)})
            else:
                self._stop()
                self._start(plain)
            self._forget()
            self._check(plain)
        self._ends = stored_end_ids(folder)
        self.policy_hash = policy_hash

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load weights that come one by one; each is good until the next is asked for.

        Whoever gives them compares them, and says of which policy they are.
        """
        self.wake()
        self.policy_hash = ""
        load(weights, self._call_in_step, self._through, self._device)
        self._forget()

    def compare(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """StageError if what was taken is not, bit by bit, these weights."""
        compare(weights, self._call_in_step, self._through, self._device)

    def generate(
        self, requests: Sequence[Request], *, max_new_tokens: int, sampling: Sampling
    ) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if not LEAST_TEMPERATURE <= sampling.temperature <= MOST_TEMPERATURE:
            raise StageError(
                f"vLLM samples at temperatures from {LEAST_TEMPERATURE} to {MOST_TEMPERATURE}, and "
                f"rollout.temperature is {sampling.temperature}: change it, or set "
                "rollout.engine: torch"
            )
        if sampling.cuts:
            raise StageError(
                "vLLM does not tell which tokens rollout.top_p, top_k and min_p left to draw from: "
                "set rollout.engine: torch, or these to 1, 0 and 0"
            )
        check_context(self._llm.llm_engine.model_config.max_model_len, requests, max_new_tokens)
        common = {
            "stop_token_ids": sorted(self._ends | set(sampling.stop_ids)),
            # The end tokens are the ones above and no others.
            "ignore_eos": True,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
        }
        params = [
            SamplingParams(
                max_tokens=request.limit(max_new_tokens), **_drawing(request, sampling), **common
            )
            for request in requests
        ]
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        # What an earlier call left there would change rounding, and it depends on who called.
        self._forget()
        try:
            answers = self._answers(prompts, params)
        except RuntimeError as error:
            if "Unsupported" not in str(error):
                raise
            # Such as a head size that its attention on this device does not have.
            raise StageError(
                f"vLLM does not run this model here: {error}; set rollout.engine: torch"
            ) from error
        return [_completion(answer.outputs[0]) for answer in answers]

    def _answers(self, prompts: list[Any], params: list[Any]) -> Any:
        if not self._apart:
            return self._llm.generate(prompts, params, use_tqdm=False)
        # An engine in another process begins with the first requests that come. It is to have all
        # of them: what is computed together, and so rounding, must not depend on how fast they are.
        self._llm.sleep(level=0)
        self._llm.enqueue(prompts, params, use_tqdm=False)
        self._llm.wake_up(["scheduling"])
        return self._llm.wait_for_completion(use_tqdm=False)

    def sleep(self) -> None:
        """Weights of a folder wait in the host's memory; those that were given are given again.

        On a CPU, where nothing would be freed, nothing.
        """
        if self._on_gpu and not self._asleep:
            self._llm.sleep(level=2 if self._empty else 1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        if self._llm is not None:
            self._stop()

    def _stop(self) -> None:
        under_way = sys.exception()
        try:
            if self._asleep and self._is_here:
                # What this process has in its cache would be missing to wake.
                torch.cuda.empty_cache()
                self.wake()
        except Exception:
            # A GPU that is too full to wake on is what may just have failed somebody else.
            if under_way is None:
                raise
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        llm, self._llm, self._asleep = self._llm, None, False
        VllmGenerator._num_open -= 1
        # Worker processes, if there are any, end here rather than with this process.
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _start(self, folder: Path) -> None:
        if VllmGenerator._num_open:
            raise StageError("a process can have one vLLM at a time: close the one that is open")
        self._apart = apart = set_variables(
            on_gpu=self._on_gpu, num_workers=self._num_workers, elsewhere=bool(self._gpus)
        )
        from vllm import LLM

        waiting = self._group.opening() if self._group is not None else nullcontext()
        try:
            with starting(self._gpus, workers=apart or self._num_workers > 1), waiting:
                options = engine_options(folder, self._settings, empty=self._empty)
                self._llm = LLM(str(folder), **options)
        except RuntimeError as error:
            if not apart:
                raise
            raise StageError(
                f"vLLM's engine, a process of its own, did not start for the model in {folder} "
                f"({error}; its output is in the log): lower generator_memory in the profile "
                "if others use the GPU, too, or set rollout.engine: torch"
            ) from error
        except (ValueError, NotImplementedError, AssertionError) as error:
            if not apart:
                forget_group()
            raise StageError(
                f"vLLM does not run the model in {folder}: {error}; set rollout.engine: torch"
            ) from error
        VllmGenerator._num_open += 1
        # Other processes give back what they hold as they end, asleep or not.
        self._is_here = not apart and self._num_workers == 1
        self._through = Through.THIS_PROCESS
        if self._group is not None:
            self._through = Through.between_processes(self._device)
        elif self._num_workers > 1:
            self._through = Through.HOST
        elif apart:
            self._through = Through.between_processes(self._device)
        if self._group is not None:
            self._call("with_own", "end_with", [[process] for process in self._group.leaders])
        elif apart:
            self._llm.collective_rpc("end_with", args=(os.getpid(),))
        self._config = _config(folder)
        self._ends = stored_end_ids(folder)

    def _forget(self) -> None:
        """Drop what is cached of prompts: it was computed with earlier weights, or elsewhere."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, though no request is running")

    def _check(self, folder: Path) -> None:
        self._call("differs_from_files", str(folder))

    @property
    def _call_in_step(self) -> Call:
        """A method of every worker, which all ranks of the group call, if there is one."""
        if self._group is None:
            return self._call
        return self._group.call_by(lambda *call: self._wrong("with_own", *call))

    def _call(self, method: str, *arguments: Any) -> None:
        for wrong in filter(None, self._wrong(method, *arguments)):
            raise StageError(wrong)

    def _wrong(self, method: str, *arguments: Any) -> list[str]:
        """Call a method of every worker, which may say what is wrong with its weights."""
        of_workers = self._llm.collective_rpc(method, args=arguments)
        return [f"in vLLM, after loading: {wrong}" if wrong else "" for wrong in of_workers]


def _drawing(request: Request, sampling: Sampling) -> dict[str, Any]:
    if request.seed is None:
        return {"temperature": 0.0}
    return {"temperature": sampling.temperature, "seed": stable_hash("vllm", request.seed)}


def _completion(output: Any) -> Completion:
    flat = output.logprobs
    # Of each position the first entry is the token that was taken.
    logprobs = [flat.logprobs[start] for start in flat.start_indices]
    return Completion(
        ids=list(output.token_ids),
        logprobs=logprobs,
        entropy=-sum(logprobs),
        finish_reason=output.finish_reason,
    )


@contextmanager
def _plain(folder: Path, precision: Precision) -> Iterator[tuple[Path, str]]:
    """A folder of whole weights, an adapter merged into a copy, and their content hash."""
    if not is_adapter_folder(folder):
        yield folder, folder_hash(folder, precision)
        return
    with TemporaryDirectory() as merged:
        policy = load_policy(folder)
        policy.save_pretrained(merged)
        yield Path(merged), content_hash(policy, precision)


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
