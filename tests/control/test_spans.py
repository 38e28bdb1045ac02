"""What a stage took, from when its jobs had their nodes: computed, lost and waited for."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.ledger.costs import Amount, Cost, clipped, cost_of
from pipelines.ledger.spans import AGAIN, End, Fate, Job, Kind, Span, Start, spans_of

DONE = Start(begin=1000, seconds=3600, end=End.DONE, start_up=60, saved=3500)


def job(*starts: Start, **changes: float) -> Job:
    return Job(gpus=8, cores=16, starts=starts, **changes)


def bill(*attempts: list[Job], fate: Fate = Fate.COMPLETED) -> Cost:
    return cost_of([span for spans in spans_of(attempts, fate) for span in spans])


def hours(gpus: float, cores: float | None = None) -> Amount:
    """Of one job: 8 GPUs and 16 cores an hour."""
    return Amount(gpus / 8, gpus, 2 * gpus if cores is None else cores)


def test_an_undisturbed_job_computed_all_the_time_that_it_had_its_nodes() -> None:
    cost = bill([job(DONE, waits_since=100.0)])
    assert (cost.computed, cost.lost) == (Amount(1.0, 8.0, 16.0), Amount())
    assert cost.waited.hours == pytest.approx(900 / 3600)
    assert cost.waited_again == Amount()


def test_a_job_that_saved_before_it_was_put_back_loses_only_its_second_beginning() -> None:
    first = Start(begin=1000, seconds=1800, end=End.STOPPED, start_up=90, saved=900)
    second = Start(begin=4600, seconds=1800, end=End.DONE, start_up=90)
    cost = bill([job(first, second, waits_since=1000.0)])
    assert cost.held == hours(8)
    assert cost.lost == cost.reasons[AGAIN] == hours(90 / 3600 * 8)
    assert cost.waited == cost.waited_again == hours(4)


def test_a_job_that_was_killed_loses_what_it_did_since_it_saved() -> None:
    first = Start(begin=0, seconds=1800, end=End.REQUEUED, start_up=90, saved=1440)
    cost = bill([job(first, replace(DONE, start_up=0.0))])
    assert cost.reasons == {"requeued": hours(0.1 * 8)}
    never_saved = bill([job(replace(first, saved=None), replace(DONE, start_up=0.0))])
    assert never_saved.reasons == {"requeued": hours(4)}


def test_a_second_start_that_never_came_to_its_stage_was_only_starting() -> None:
    first = replace(DONE, end=End.STOPPED)
    stopped = Start(begin=9000, seconds=900, end=End.STOPPED)
    assert bill([job(first, stopped)], fate=Fate.GOES_ON).reasons == {AGAIN: hours(2)}
    assert bill([job(stopped)], fate=Fate.GOES_ON).lost == Amount()


def test_what_an_entry_without_outputs_took_is_lost_until_a_later_attempt_completes_it() -> None:
    failed = [job(Start(begin=0, seconds=3600, end=End.FAILED, start_up=60, saved=2700))]
    assert bill(failed, fate=Fate.FAILED).reasons == {"failed": hours(8)}
    again = bill(failed, [job(replace(DONE, start_up=360.0))])
    assert again.reasons == {"failed": hours(2), AGAIN: hours(0.8)}
    saved_and_left = [job(replace(DONE, end=End.STOPPED))]
    assert bill(saved_and_left, fate=Fate.CANCELLED).reasons == {"cancelled": hours(8)}


def test_nothing_is_lost_of_a_job_that_runs() -> None:
    runs = replace(DONE, end=End.RUNS, start_up=None, saved=None)
    assert bill([job(runs)], fate=Fate.GOES_ON).lost == Amount()


def test_each_job_of_an_array_counts() -> None:
    killed = Start(begin=0, seconds=1800, end=End.KILLED, saved=0.0)
    cost = bill([job(DONE), job(DONE), job(killed)], fate=Fate.GOES_ON)
    assert (cost.computed, cost.lost) == (Amount(2.0, 16.0, 32.0), hours(4))


def test_a_job_that_waits_counts_up_to_now_and_one_that_left_the_queue_until_then() -> None:
    assert bill([job(waits_since=0.0, waits_until=1800.0)], fate=Fate.GOES_ON).waited == hours(4)
    assert bill([job(waits_since=0.0)], fate=Fate.CANCELLED) == Cost()


def test_clocks_that_were_set_take_nothing_away() -> None:
    """A node an hour behind the one that submitted, and a job back before it had stopped."""
    first = replace(DONE, begin=-3600.0, end=End.STOPPED)
    second = replace(DONE, begin=-1800.0, start_up=0.0, saved=99_999.0, end=End.KILLED)
    cost = bill([job(first, second, waits_since=0.0)])
    assert cost.waited == Amount()
    assert (cost.computed, cost.lost) == (hours(16), Amount())
    assert bill([job(replace(DONE, seconds=-5.0))]) == Cost()


STARTS = st.builds(
    Start,
    begin=st.floats(0, 1e6),
    seconds=st.floats(0, 1e5),
    end=st.sampled_from([End.DONE, End.STOPPED, End.KILLED, End.FAILED, End.REQUEUED]),
    start_up=st.none() | st.floats(0, 2e5),
    saved=st.none() | st.floats(0, 2e5),
)


@given(st.lists(STARTS, max_size=4), st.sampled_from(Fate), st.lists(st.floats(0, 1e6)))
def test_all_time_is_computed_or_lost_and_no_border_changes_the_sum(
    starts: list[Start], fate: Fate, borders: list[float]
) -> None:
    (spans,) = spans_of([[job(*starts)]], fate)
    assert all(span.seconds >= 0 for span in spans)
    whole = cost_of(spans)
    held = sum(start.seconds for start in starts) / 3600
    assert whole.held.hours == pytest.approx(held, abs=1e-6)
    assert whole.held.gpu_hours == pytest.approx(8 * held, abs=1e-5)
    times = [float("-inf"), *sorted(borders), float("inf")]
    parts = [cost_of(clipped(spans, since, until)) for since, until in pairwise(times)]
    assert sum(parts, Cost()).lost.hours == pytest.approx(whole.lost.hours, abs=1e-6)


def test_what_is_clipped_is_what_lies_within() -> None:
    span = Span(Kind.COMPUTED, 0.0, 100.0, 1, 1)
    assert clipped([span], 90.0, 200.0) == [replace(span, begin=90.0)]
    assert clipped([span], 100.0, 200.0) == []
