"""Inside vLLM's workers: what they hold is, bit by bit, what a model folder, or the learner, holds.

vLLM renames nothing that is compared here, but it fuses projections (q, k and v; gate and up), cuts
matrices over the GPUs of a tensor-parallel group and pads vocabularies; on a CPU it keeps matrices
in a packed form. So each tensor in memory is compared with what it has to be: the tensors of the
files, or of the learner, one at a time, cut for this worker, put together and cast. A tensor whose
form is not known here is an error, never passed over.

Weights of a learner come in pieces (weight_pieces.py), once to be loaded, by the functions that
vLLM's own weight-transfer engines call, and once more to be compared: what is compared has gone
the whole way, after everything was loaded.

And what they do is over when the stage is: an engine in a process of its own must not outlive it.
"""

import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.context import StageError
from stages.engines.generation.weight_pieces import Layout, Where, opened, received, wait_for
from stages.engines.models.tensor_files import stored_tensors
from stages.engines.models.weights import STEM, compare_tensor, is_computed, same_bits

QKV, ROWS, COLUMNS, VOCABULARY = (
    {"QKVParallelLinear"},
    {"ColumnParallelLinear", "MergedColumnParallelLinear"},
    {"RowParallelLinear"},
    {"VocabParallelEmbedding", "ParallelLMHead"},
)
"""How a layer is cut over the workers, by the names of vLLM's classes."""
FUSED = {"QKVParallelLinear", "MergedColumnParallelLinear"}
WHOLE = {"ReplicatedLinear", "RMSNorm", "GemmaRMSNorm", "LayerNorm"}
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class Checked:
    """Added by vLLM to its worker class (`worker_extension_cls`), and called by name."""

    def end_with(self, stage: int) -> None:
        """End the engine when the stage's process is gone, however that ended.

        This may be the engine's process, or a worker that it has started.
        """
        gone, parent = os.pidfd_open(stage), os.getppid()

        def watch() -> None:
            select.select([gone], [], [])
            if parent != stage:
                with suppress(ProcessLookupError):
                    os.kill(parent, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, name="end-with-stage", daemon=True).start()

    def differs_from_files(self, folder: str) -> str:
        """What is wrong with the weights of this worker; empty if nothing is."""
        comparison = Comparison(self._model(), folder, "the file")
        try:
            for name, stored in stored_tensors(Path(folder), STEM).items():
                comparison.add(name, stored.whole())
            comparison.end()
        except StageError as error:
            return str(error)
        return ""

    def with_own(self, method: str, arguments: list[list[Any]]) -> Any:
        """Call a method with the arguments that are for this worker, of those for each."""
        return getattr(self, method)(*arguments[self.rank])  # type: ignore[attr-defined]

    def open_buffer(self, where: Where) -> None:
        self._buffer = opened(where, torch.device(self.device).index or 0)  # type: ignore[attr-defined]

    def close_buffer(self) -> None:
        self._buffer = torch.empty(0)

    def begin_load(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with torch.device(self.device):  # type: ignore[attr-defined]
            initialize_layerwise_reload(self._model())

    def load_piece(self, layout: Layout) -> None:
        # Copies: vLLM keeps what comes until it has all that it makes a tensor of.
        copies = ((name, tensor.clone()) for name, tensor in received(self._buffer, layout))
        with torch.device(self.device):  # type: ignore[attr-defined]
            self._model().load_weights(copies)
        wait_for(self._buffer)

    def end_load(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with torch.device(self.device):  # type: ignore[attr-defined]
            finalize_layerwise_reload(self._model(), self.model_config)  # type: ignore[attr-defined]

    def begin_comparison(self) -> None:
        self._comparison = Comparison(self._model(), "the policy", "the learner")

    def compare_piece(self, layout: Layout) -> str:
        """What is wrong with weights of this worker that the piece is the last to tell of."""
        try:
            for name, tensor in received(self._buffer, layout):
                self._comparison.add(name, tensor)
        except StageError as error:
            return str(error)
        wait_for(self._buffer)
        return ""

    def end_comparison(self) -> str:
        try:
            self._comparison.end()
        except StageError as error:
            return str(error)
        del self._comparison
        return ""

    def _model(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]


class Comparison:
    """Of all parameters of a model in vLLM with tensors that come one by one, in any order.

    A tensor is looked at at once, or, where vLLM fuses it with others, copied until these are
    there.
    """

    def __init__(self, model: Any, origin: str, holder: str) -> None:
        """Errors say that the tensors are of `origin`, which `holder` holds."""
        self._model, self._origin, self._holder = model, origin, holder
        self._parameters = dict(model.named_parameters())
        self._sources = {name: _sources(model, name) for name in self._parameters}
        self._fused_into = {
            source: name for name, sources in self._sources.items() for source in sources
        }
        self._parts: dict[str, Tensor] = {}
        self._left = set(self._parameters)
        self._unknown: list[str] = []

    def add(self, source: str, tensor: Tensor) -> None:
        name = self._fused_into.get(source)
        if name is not None:
            self._add_part(name, source, tensor)
        elif source == HEAD and getattr(self._model.config, "tie_word_embeddings", False):
            self._compare_tied(tensor)
        elif not is_computed(self._model, source):
            self._unknown.append(source)

    def end(self) -> None:
        for name in sorted(self._left):
            absent = next(each for each in self._sources[name] if each not in self._parts)
            raise StageError(
                f"{self._origin} has no tensor {absent}, so {name} of vLLM cannot be checked: save "
                "the whole model again, or set rollout.engine: torch"
            )
        if self._unknown:
            raise StageError(
                f"{self._origin} has a tensor {min(self._unknown)} that vLLM has no place for "
                f"({len(self._unknown)} such): config.json describes another model than the "
                "weights are of"
            )

    def _add_part(self, name: str, source: str, tensor: Tensor) -> None:
        sources = self._sources[name]
        if len(sources) == 1:
            self._compare(name, [tensor])
            return
        self._parts[source] = tensor.clone()
        if all(each in self._parts for each in sources):
            self._compare(name, [self._parts.pop(each) for each in sources])

    def _compare(self, name: str, parts: list[Tensor]) -> None:
        module, kind = _owner(self._model, name)
        if len(parts) == 1 and type(module).__name__ in FUSED and module.tp_size > 1:
            raise StageError(
                f"{self._origin} stores {name} fused, and how vLLM cuts it over GPUs cannot be "
                "checked: set tensor_parallel: 1, or rollout.engine: torch"
            )
        expected = torch.cat([_cut(part, module, i, kind) for i, part in enumerate(parts)])
        held = self._parameters[name].data
        if held.numel() == 0:
            # A product may have lost the sign of a zero.
            held, expected = _unpacked(module, expected.shape[-1]) + 0.0, expected + 0.0
        if type(module).__name__ in VOCABULARY:
            held = held[: len(expected)]  # the rest is padding
        compare_tensor(self._origin, name, held, expected, self._holder)
        self._left.discard(name)

    def _compare_tied(self, head: Tensor) -> None:
        """With what vLLM answers with, which has to be the embedding's weights, too."""
        name = next(each for each in self._parameters if each.endswith(EMBEDDING))
        module, kind = _owner(self._model, name)
        expected = _cut(head, module, 0, kind)
        held = self._parameters[name].data[: len(expected)]
        if not same_bits(held, expected):
            raise StageError(
                f"{self._origin}: {HEAD} and {name} differ, but config.json ties them: vLLM would "
                "answer with the embedding for both"
            )


def _owner(model: Any, name: str) -> tuple[Any, str]:
    """The module of a parameter, and what the parameter is to it."""
    module_name, _, kind = name.rpartition(".")
    return model.get_submodule(module_name), kind


def _sources(model: Any, name: str) -> list[str]:
    """The tensors, as a model's files name them, that a parameter of vLLM is made of."""
    module_name, _, kind = name.rpartition(".")
    parent, _, leaf = module_name.rpartition(".")
    fused = getattr(model, "packed_modules_mapping", {}).get(leaf, [leaf])
    return [f"{parent}.{source}.{kind}".removeprefix(".") for source in fused]


def _cut(tensor: Tensor, module: Any, index: int, kind: str) -> Tensor:
    """This worker's share of a whole tensor, the `index`-th that the layer is made of."""
    layer = type(module).__name__
    if layer in VOCABULARY:
        shard = module.shard_indices
        rows = slice(shard.org_vocab_start_index, shard.org_vocab_end_index)
        return tensor[rows]
    if layer in WHOLE or (layer in COLUMNS and kind == "bias"):
        return tensor
    # Several workers have the same keys and values where there are fewer of them than workers.
    shared: int = module.num_kv_head_replicas if layer in QKV and index else 1
    if layer not in QKV | ROWS | COLUMNS:
        raise StageError(
            f"vLLM holds a {layer}, which cannot be compared with the files: set "
            "rollout.engine: torch"
        )
    cuts = tensor.chunk(module.tp_size // shared, dim=1 if layer in COLUMNS else 0)
    share: Tensor = cuts[module.tp_rank // shared]
    return share


def _unpacked(module: Any, width: int) -> Tensor:
    """A matrix that only a packed form is left of: its product with the identity.

    Each number comes out as itself plus zeros.
    """
    rows = torch.eye(width, dtype=module.weight.dtype)
    return torch.as_tensor(module.cpu_linear(rows, module.weight, None)).T.contiguous()
