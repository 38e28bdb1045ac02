"""The report warns of training that went wrong without failing, near its top and in plain words."""

import re
from collections.abc import Callable

from tests.report.conftest import change_json


def box(page: str) -> str:
    """The text of the box, as one line."""
    found = re.search(r'<section class="warnings".*?</section>', page, re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", found[0])) if found else ""


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_run_that_goes_well_has_no_box(finished_run: Callable) -> None:
    page, summary, metrics = finished_run().report()
    assert box(page) == ""
    assert "Warning" not in summary
    assert metrics["num_warnings"] == 0


def test_a_warning_says_who_what_against_what_and_what_to_try(finished_run: Callable) -> None:
    run = finished_run()
    run.change_evaluation("iter_003", entropy=0.01, kl_to_reference=1.25)
    page, summary, metrics = run.report()
    for text in (box(page), flat(summary)):
        assert "Entropy collapse" in text
        assert re.search(r"ntropy of iter_003 is 0.01, less than 0.2 of sft's 0.412", text)
        assert "policy_update.entropy_coef" in text
        assert "KL blow-up" in text
        assert "KL of iter_003 to the reference is 1.25 nats per token, above 0.5" in text
    assert "2 warnings" in box(page)
    assert metrics["num_warnings"] == 2
    assert page.index('class="warnings"') < page.index("<main>")


def test_thresholds_decide_and_null_switches_off(finished_run: Callable) -> None:
    run = finished_run(warn={"kl": None, "kl_growth": None})
    run.change_evaluation("iter_003", kl_to_reference=1.25)
    assert box(run.report()[0]) == ""
    assert "KL blow-up" in box(run.with_params(warn={"kl": 1.2}).report()[0])


def test_what_one_policy_hands_down_to_the_next_is_said_once(finished_run: Callable) -> None:
    run = finished_run()
    for policy in ("iter_002", "iter_003"):
        run.change_evaluation(policy, truncation_rate=0.5)
    page, summary, metrics = run.report()
    assert "iter_002, iter_003" in box(page)
    assert "(iter_002, iter_003)" in flat(summary)
    assert box(page).count("are cut off") == 1
    assert metrics["num_warnings"] == 1


def test_groups_without_signal_are_warned_of(finished_run: Callable) -> None:
    run = finished_run(rl={"algorithm": "grpo"})
    update = run.inputs["iterations"] / "iter_002" / "policy_update.json"
    change_json(update, zero_variance_share=0.96)
    assert "96% of the prompts that iter_002 learnt from" in box(run.report()[0])


def test_a_branch_is_not_judged_by_its_sibling(finished_run: Callable) -> None:
    """By the order of names, `odd` would have grown past three times iter_002."""
    iterations = {
        "iter_001": {"policy": "sft"},
        "iter_002": {"policy": "iter_001"},
        "odd": {"policy": "iter_001"},
    }
    run = finished_run(rl={"iterations": iterations})
    for policy, kl in {"iter_001": 0.1, "iter_002": 0.01, "odd": 0.25}.items():
        run.change_evaluation(policy, kl_to_reference=kl)
    assert box(run.report()[0]) == ""


def test_numbers_that_are_none_are_not_judged(finished_run: Callable) -> None:
    run = finished_run()
    run.change_evaluation("sft", entropy=float("nan"))
    run.change_evaluation("iter_003", kl_to_reference=float("inf"))
    assert box(run.report()[0]) == ""


def test_a_reward_near_chance_and_an_sft_that_is_never_right_are_warned_of(
    finished_run: Callable,
) -> None:
    run = finished_run()
    change_json(run.inputs["reward"] / "quality.json", pairwise_accuracy=0.52)
    run.change_evaluation("sft", accuracy=0.0, accuracy_sampled=0.0)
    page, summary, metrics = run.report()
    for text in (box(page), flat(summary)):
        assert re.search("the reward source ranks 52% of the held-out pairs right", text, re.I)
        assert "0.0% of sft's samples are right" in text
    assert metrics["num_warnings"] == 2


def test_a_wrong_answer_with_the_highest_reward_is_remarked_on(finished_run: Callable) -> None:
    run = finished_run()
    rows = run.samples("iter_003")
    wrong = next(i for i, row in enumerate(rows) if row["correct"] is False)
    run.change_sample("iter_003", wrong, reward=max(row["reward"] for row in rows) + 0.5)
    assert "Wrong rewarded most iter_003" in box(run.report()[0])
