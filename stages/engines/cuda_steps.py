"""Decode steps on a GPU: Triton kernels, recorded once as CUDA graphs and replayed.

A step of so many slots is one graph: embedding, layers, head, draw, log-prob, entropy and the notes
about what has ended. It reads and writes tensors that stay where they are, so the host only
says "again"; a copy of the slots' state, made every few steps, tells it later what has ended.
"""

from typing import Any

import torch
from torch import Tensor

from stages.engines import kernels
from stages.engines.decoding import Look
from stages.engines.llama_decoder import LlamaDecoder
from stages.engines.slots import REQUEST


class GraphDecoder(LlamaDecoder):
    """A decoder whose steps are graphs, one for each of a few numbers of slots."""

    steps_a_look = 4
    looks_late = 1
    ops = kernels

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def forget_steps(self) -> None:
        self._graphs.clear()
        self._pool = None

    def rows_for(self, num_slots: int) -> int:
        """Powers of two, and halfway between them."""
        rows = 8
        while rows < num_slots:
            rows = rows * 3 // 2 if rows & (rows - 1) == 0 and rows >= 16 else _next_power(rows)
        return min(rows, self.slots)

    def advance(self, num_rows: int, num_steps: int) -> None:
        cuts = self.sampling.cuts
        if (num_rows, cuts) not in self._graphs:
            self._graphs[num_rows, cuts] = self._captured(num_rows, cuts)
        graph, logits = self._graphs[num_rows, cuts]
        for _ in range(num_steps):
            graph.replay()
            if cuts:
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

    def _captured(self, num_rows: int, cuts: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The step as a graph; the board is left as it was."""
        before = self.board.state.clone()
        # Nothing is decoded while kernels are compiled and libraries made ready.
        self.board.state[:, REQUEST] = -1
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(num_rows, cuts)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # What other threads ask of the GPU meanwhile, such as one that trains, is not our concern.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(num_rows, cuts)
        self._pool = graph.pool()
        self.board.state.copy_(before)
        return graph, logits

    def _step(self, num_rows: int, cuts: bool) -> Tensor:
        logits = self.logits(num_rows)
        if not cuts:
            kernels.draw_and_record(logits, self.board)
        return logits


def _next_power(rows: int) -> int:
    return 1 << rows.bit_length()
