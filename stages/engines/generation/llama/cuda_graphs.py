"""Decode steps on a GPU: Triton kernels, recorded once as CUDA graphs and replayed.

A step of so many slots is one graph: embedding, layers, head, draw, log-prob, entropy and the notes
about what has ended. It reads and writes tensors that stay where they are, so the host only says
"again"; a copy of the slots' state, made every few steps, tells it later what has ended.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from stages.engines.generation.decoding import Look
from stages.engines.generation.llama import kernels
from stages.engines.generation.llama.decoder import LlamaDecoder
from stages.engines.generation.llama.slots import REQUEST


class KernelDecoder(LlamaDecoder):
    """Steps made of kernels, each started by the host; Triton's interpreter runs them on a CPU."""

    steps_a_look = 4
    looks_late = 1
    ops = kernels

    def rows_for(self, num_slots: int) -> int:
        """8, 16, and from there powers of two and halfway between them."""
        rows = 8
        while rows < num_slots:
            power = 1 << (rows.bit_length() - 1)
            rows = rows * 3 // 2 if rows == power and rows > 8 else 2 * power
        return min(rows, self.slots)

    def advance(self, num_rows: int, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step(num_rows)

    def look(self) -> Look:
        return self.board.state[:, REQUEST].clone().tolist

    def _step(self, num_rows: int) -> None:
        logits = self.logits(num_rows)
        if self.sampling.cuts:
            self.board.record(logits)
        else:
            kernels.draw_and_record(logits, self.board)


class GraphDecoder(KernelDecoder):
    """The same steps as graphs, one for each of a few numbers of slots."""

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor | None]] = {}
        self._stream = _side_stream(self.device)
        self._pool: Any = None

    def forget_steps(self) -> None:
        self._graphs.clear()
        self._pool = None

    def advance(self, num_rows: int, num_steps: int) -> None:
        key = (num_rows, self.sampling.cuts)
        if key not in self._graphs:
            self._graphs[key] = self._recorded(num_rows)
        graph, logits = self._graphs[key]
        for _ in range(num_steps):
            graph.replay()
            if logits is not None:
                self.board.record(logits)

    def look(self) -> Look:
        seen = torch.empty(self.slots, dtype=torch.int64, pin_memory=True)
        seen.copy_(self.board.state[:, REQUEST], non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def read() -> list[int]:
            copied.synchronize()
            shown: list[int] = seen.tolist()
            return shown

        return read

    def _recorded(self, num_rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        """A step as a graph; with its logits, where cuts have to be made outside of it."""
        # The first time, kernels are compiled and libraries made ready, which no graph can hold.
        # Slots that look free are left alone by it.
        before = self.board.state.clone()
        self.board.state[:, REQUEST] = -1
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            kernels.draw_and_record(self.logits(num_rows), self.board)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of the GPU meanwhile, such as one that trains, is not our concern.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            logits = self.logits(num_rows)
            if not self.sampling.cuts:
                kernels.draw_and_record(logits, self.board)
        self._pool = graph.pool()
        self.board.state.copy_(before)
        return graph, logits if self.sampling.cuts else None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Where graphs are recorded: one for all, as cuBLAS keeps memory for each that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
