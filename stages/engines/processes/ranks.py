"""The processes that train one model together, each on its share of every step's rows.

Always true:
- Losses are divided by counts of the whole step, so gradients and metrics are sums over the ranks,
  and all ranks take the same optimizer step: their weights stay equal to the bit.
- All stop at the same step, resume from what rank 0 found, and fail together.
- A rank that dies or hangs is named by the others in bounded time (see heartbeats.py).
- Ranks that only sample are a group of their own, joined to those that learn by a bridge alone.
- Where a sampler spans ranks, they are neighbours, and a group of their own beside that of all.

The same number of ranks gives the same bytes again on the CPU. Another number adds the same
gradients up in another order, which differs by rounding.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stages.context import Context, RankLost, ShareDone, Stopped
from stages.engines.processes.bridge import FOR_EVER, Bridge
from stages.engines.processes.heartbeats import Heartbeats
from stages.engines.processes.meeting import backend_of, open_store
from stages.engines.processes.sampling_group import SamplingGroup

T = TypeVar("T")
BUCKET_ELEMENTS = 25_000_000
"""Size of a gradient bucket, in numbers."""


@contextmanager
def join(ctx: Context) -> Iterator["Ranks"]:
    """What the ranks do together is the block under it; at its end all but rank 0 are done.

    They leave by `ShareDone`. Nobody waits for a rank that leaves by an error: the others learn of
    it and end with that error.
    """
    if ctx.world + ctx.samplers == 1:
        alone = Ranks()
        yield alone
        alone.finish()
        return
    assert ctx.heartbeats is not None
    num_ranks = ctx.world + ctx.samplers
    side = range(ctx.world, num_ranks) if ctx.only_samples else range(ctx.world)
    heartbeats = Heartbeats(ctx.heartbeats, ctx.rank, num_ranks, ctx.collective_seconds, side)
    heartbeats.begin()
    sharing = 1 if ctx.only_samples else ctx.sequence_parallel
    ranks = Ranks(ctx.rank - side.start, len(side), ctx.device, heartbeats, sharing)
    try:
        # Wherever in there a connection breaks: libraries have collectives of their own.
        with ranks.exchanging():
            # The backend's own time limit, which names nobody, only stands behind ours.
            timeout = timedelta(seconds=2 * ctx.collective_seconds + 60)
            with heartbeats.waiting():
                store = open_store(ctx.rank, num_ranks, timeout)
            if ctx.samplers:
                ranks.bridge = Bridge(ctx, heartbeats, store, timeout)
            ranks.connect(dist.PrefixStore(f"from-{side.start}", store), timeout)  # type: ignore[attr-defined]
            if ctx.ranks_per_sampler > 1 and (ctx.only_samples or not ctx.samplers):
                ranks.sampling_group = SamplingGroup(ctx, heartbeats, side.start)
            ctx.ranks = ranks
            yield ranks
            ranks.finish()
            if ranks.bridge is not None:
                # Samplers are done first; one that had left would be taken for lost.
                ranks.bridge.meet("the end")
            ranks.part()
            ranks.close_bridge()
    except Stopped:
        # Asked to stop on its own, between two loops: it says so where the others ask next.
        if dist.is_initialized():
            ranks.agree_to_stop(True, heartbeats.at)
        ranks.close_bridge()
        raise
    except BaseException as error:
        _tell(heartbeats, error)
        raise
    finally:
        ctx.ranks = None
        heartbeats.end()
    if ctx.rank:
        done = "sampled" if ctx.only_samples else "trained"
        raise ShareDone(f"rank {ctx.rank} has {done}; rank 0 writes")


class Ranks:
    """This rank among those of its side: those that learn, or those that only sample.

    Its methods are collectives: all ranks call them, in the same order.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        device: str = "cpu",
        heartbeats: Heartbeats | None = None,
        num_sharing: int = 1,
    ) -> None:
        self.rank, self.world = rank, world
        self._device = torch.device(device)
        self._heartbeats = heartbeats
        self._at_end: list[Callable[[], None]] = []
        self._patient: Any = None
        """A process group of all of them, whose collectives have no time limit."""
        self.num_sharing = num_sharing
        """Neighbours that share rows, each a part of their tokens (forward/ulysses.py)."""
        self.shared: Any = None
        """The process group of these."""
        self.bridge: Bridge | None = None
        """To the ranks that only sample, or from these to those that learn, where there are any."""
        self.sampling_group: SamplingGroup | None = None
        """The neighbours that this rank samples with as one, where a sampler spans ranks."""

    @contextmanager
    def failing_at_once(self) -> Iterator[None]:
        """Inside what an error leaves only once something else has ended, such as a thread.

        The others, which may wait for this rank, learn of the error before that.
        """
        try:
            yield
        except (Stopped, ShareDone):
            raise
        except BaseException as error:
            if self._heartbeats:
                _tell(self._heartbeats, error)
            raise

    def at_end(self, do: Callable[[], None]) -> None:
        """What all ranks do once more together before they part for good."""
        self._at_end.append(do)

    def finish(self) -> None:
        while self._at_end:
            self._at_end.pop(0)()

    def connect(self, store: Any, timeout: timedelta) -> None:
        """`store` is of these ranks alone."""
        if self.world == 1:
            return
        with self._collective():
            backend = backend_of(store, self.rank, self.world, self._device)
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.world,
                timeout=timeout,
                device_id=self._device if backend == "nccl" else None,
            )
            self._patient = dist.new_group(timeout=FOR_EVER, backend="gloo")

    def part(self) -> None:
        """Leave the group, once every rank has all that it needs from the others."""
        if self.world == 1:
            return
        assert self._heartbeats
        with self._heartbeats.waiting(), suppress(RuntimeError):
            self._reduce(torch.zeros(1, device=self._device), dist.ReduceOp.SUM)
        dist.destroy_process_group()

    def close_bridge(self) -> None:
        """Once all ranks of both sides do so: to end NCCL may wait for the others."""
        if self.bridge is not None:
            self.bridge.close()

    def share(self, rows: Any, of: int | None = None) -> Any:
        """This rank's, or another's, rows of all. Rank 0 has some whenever there are any."""
        rank = self.rank if of is None else of
        return rows[rank // self.num_sharing :: self.world // self.num_sharing]

    def agree_to_stop(self, asked: bool, at: str) -> bool:
        """Whether any rank was asked to stop before it came to `at`; they part if so."""
        [stop] = self.agree(at, asked)
        if stop:
            self.part()
        return stop

    def agree(self, at: str, *asked: bool) -> Sequence[bool]:
        """Of each thing that a rank may ask for, whether any has before it came to `at`.

        None goes on before all have come there, whether they ask for something or not.
        """
        if self.world == 1:
            return asked
        assert self._heartbeats
        self._heartbeats.at = at
        # Backends do not wait for others to reduce nothing.
        flags = torch.tensor([0, *(int(one) for one in asked)], device=self._device)
        with self._collective():
            return [bool(one) for one in self._reduce(flags, dist.ReduceOp.MAX)][1:]

    def meet(self, at: str) -> None:
        """Wait until all ranks have come to `at`, for as long as they send heartbeats.

        For ranks that have been at work on their own: other collectives have a time limit.
        """
        if self.world == 1:
            return
        assert self._heartbeats
        self._heartbeats.at = at
        with self.exchanging(), self._heartbeats.waiting(patient=True):
            dist.all_reduce(torch.zeros(1), group=self._patient)

    def same(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return value
        values = [value]
        with self._collective():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def first_does(self, do: Callable[[], T]) -> T:
        """What rank 0 does while the others wait: its result, or its OSError, on every rank."""
        result: T | None = None
        error: OSError | None = None
        if not self.rank:
            try:
                result = do()
            except OSError as own_error:
                error = own_error
        result, failed = self.same((result, error and (error.errno, str(error))))
        if failed:
            raise error or OSError(*failed)
        return result  # type: ignore[return-value]

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace gradients by their sums over the ranks.

        A parameter that has a gradient on some ranks only counts as zero on the others; one that
        has none anywhere keeps none, as AdamW passes over it then.
        """
        if self.world == 1:
            return
        for bucket in _buckets(parameters):
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            has = parts[0].new_tensor([float(p.grad is not None) for p in bucket])
            flat = torch.cat([*(part.reshape(-1) for part in parts), has])
            with self._collective():
                counts = self._reduce(flat, dist.ReduceOp.SUM, last=len(bucket))
            sums = torch.split(flat, [*(p.numel() for p in bucket), len(bucket)])
            for parameter, total, count in zip(bucket, sums, counts, strict=False):
                parameter.grad = total.view_as(parameter) if count else None

    def gather_shares(self, value: Any) -> list[Any]:
        """The value of each share of rows: of ranks that have the same rows, that of the first."""
        return self.gather(value)[:: self.num_sharing]

    def gather(self, value: Any) -> list[Any]:
        """All-gather: each rank's value, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with self._collective():
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around work that meets other ranks all along: a broken connection names its rank.

        One that hangs is found only when the backend's own time limit ends.
        """
        try:
            yield
        except RuntimeError as error:
            if self._heartbeats and (lost := self._heartbeats.find_lost()):
                raise RankLost(lost) from error
            raise

    def _reduce(self, tensor: Tensor, how: Any, last: int = 0) -> list[Any]:
        """Reduce in place; the last numbers of the result, which makes a GPU wait for it."""
        dist.all_reduce(tensor, how)
        return list(tensor[-last:].tolist())

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Around each collective: waiting is watched, and a broken connection names its rank."""
        assert self._heartbeats
        if self._device.type == "cuda":
            # What this rank still computes is not time that it waits for others.
            torch.cuda.synchronize(self._device)
        with self.exchanging(), self._heartbeats.waiting():
            yield


ALONE = Ranks()


def connect_alone(device: str) -> None:
    """A process group of this process, for libraries that need one, where no ranks were joined."""
    if not dist.is_initialized():
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def _tell(heartbeats: Heartbeats, error: BaseException) -> None:
    """Why this rank ends, for the others."""
    if isinstance(error, RankLost):
        heartbeats.write_failure(str(error))
        return
    cause = str(error) or repr(error)
    heartbeats.write_failure(f"rank {heartbeats.rank} failed at {heartbeats.at}: {cause}")


def _buckets(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters that learn, in groups of one type and about BUCKET_ELEMENTS numbers."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_type.setdefault(parameter.dtype, []).append(parameter)
    buckets: list[list[Tensor]] = []
    for group in by_type.values():
        room = 0
        for parameter in group:
            if room <= 0:
                buckets.append([])
                room = BUCKET_ELEMENTS
            buckets[-1].append(parameter)
            room -= parameter.numel()
    return buckets
