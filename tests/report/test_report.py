"""The report says what the inputs say, and nothing in them can break it."""

import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stages.context import StageError
from stages.evaluation import folder
from stages.reporting.vocabulary import Form, write, write_error
from tests.report.conftest import Page, change_json


def in_interval(metrics: dict[str, float], name: str) -> str:
    share, low, high = (100 * metrics.get(name + end, math.nan) for end in ("", "_low", "_high"))
    return f"{share:.1f}% {low:.1f}–{high:.1f}%"


def give_or_take(metrics: dict[str, float], name: str) -> str:
    share, error = (100 * metrics.get(name + end, math.nan) for end in ("", "_error"))
    return f"{share:.1f}% ± {error:.1f}"


def test_the_policy_table_holds_the_numbers_of_the_evaluations(finished_run: Callable) -> None:
    run = finished_run()
    page, summary, _ = run.report()
    rows = {row[0].split()[0]: row for row in Page(page).rows("numbers")[1:]}
    for policy in ("sft", "iter_001", "iter_002", "iter_003"):
        metrics = run.evaluation(policy)
        by_chances = ("pass_at_2", "majority_vote")
        of_pairs = (
            in_interval(metrics, "win_rate"),
            give_or_take(metrics, "win_rate_sampled"),
            in_interval(metrics, "win_rate_similar_length"),
            f"{metrics.get('reward_gain', 0):.3f} ± {metrics.get('reward_gain_error', 0):.3f}",
        )
        kl = write(metrics["kl_to_reference"], Form.NATS)
        expected = [
            in_interval(metrics, "accuracy"),
            give_or_take(metrics, "accuracy_sampled"),
            *(write(metrics[name], Form.SHARE) for name in by_chances),
            *(["–"] * 4 if policy == "sft" else of_pairs),
            f"{write(metrics['reward_mean'])} ± 0.031",
            write(metrics["reward_std"]),
            kl if policy == "sft" else f"{kl} ± {metrics['kl_to_reference_error']:.3f}",
            write(metrics["entropy"]),
            write(metrics["response_length"]),
            write(metrics["truncation_rate"], Form.SHARE),
        ]
        assert rows[policy][2:] == expected
        line = next(line for line in summary.splitlines() if line.startswith(f"| {policy} "))
        in_short = [expected[i].split()[0] for i in (0, 1, 2, 4, 8, 10, 11, 12)]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == in_short


def test_metrics_are_the_inputs_own_values(finished_run: Callable) -> None:
    run = finished_run()
    run.change_evaluation("sft", accuracy=0.25)
    changed = {"accuracy": 0.75, "reward_mean": -1.5, "kl_to_reference": 0.125, "entropy": 0.375}
    changed |= {"win_rate": 0.875, "win_rate_low": 0.75, "win_rate_high": 0.9375}
    changed |= {"reward_gain": 0.5, "reward_gain_error": 0.0625, "kl_to_reference_error": 0.03125}
    run.change_evaluation("iter_003", **changed)
    _, _, metrics = run.report()
    # Paired: of 256 prompts, so many turned right and so many wrong.
    greedy = [
        folder.read_greedy(run.inputs["evaluations"] / policy / folder.GREEDY)
        for policy in ("sft", "iter_003")
    ]
    gains = [int(b.greedy.correct) - int(a.greedy.correct) for a, b in zip(*greedy, strict=True)]
    assert metrics == {
        "sft_accuracy": 0.25,
        "final_accuracy": 0.75,
        "accuracy_gain": 0.5,
        "accuracy_gain_error": pytest.approx(statistics.stdev(gains) / 16),
        "final_win_rate": 0.875,
        "final_win_rate_low": 0.75,
        "final_win_rate_high": 0.9375,
        "final_reward_mean": -1.5,
        "final_reward_mean_error": 0.0312,
        "reward_gain": 0.5,
        "reward_gain_error": 0.0625,
        "final_kl_to_reference": 0.125,
        "final_kl_to_reference_error": 0.03125,
        "final_entropy": 0.375,
        "num_warnings": 0,
        "reward_pairwise_accuracy": 0.9375,
    }


def test_the_training_table_has_each_iterations_numbers(finished_run: Callable) -> None:
    run = finished_run()
    path = run.inputs["iterations"] / "iter_002" / "policy_update.json"
    change_json(path, explained_variance=0.123, brand_new_metric=4.5)
    page, _, _ = run.report()
    rows = Page(page).rows("numbers training")
    explained = next(row for row in rows if row[0].startswith("Explained variance"))
    assert explained[2] == "0.123"
    assert next(row for row in rows if row[0] == "Brand new metric")[1:] == ["–", "4.500", "–"]


def test_errors_stand_beside_what_they_belong_to(finished_run: Callable) -> None:
    run = finished_run()
    path = run.inputs["iterations"] / "iter_002" / "score.json"
    change_json(path, **{"reward_mean/right": 0.5, "reward_mean_error/right": 0.0125})
    page, summary, metrics = run.report()
    table = Page(page).rows("numbers training")
    rows = {re.split(" Mean | Of ", row[0])[0].strip(): row for row in table}
    assert rows["Reward"][1:] == ["0 ± 0.028", "0.400 ± 0.028", "0.800 ± 0.028"]
    assert rows["Reward: right"][2] == "0.500 ± 0.013"
    assert not [name for name in rows if "error" in name.lower()]
    gain = f"+1.352 ± {metrics['reward_gain_error']:.3f}"
    assert gain in page, "the card has the error of the difference, prompt by prompt"
    assert page.count("One standard error over prompts: ") == 1
    assert "iter_003: reward ± 0.031, KL ± 0.006, wins " in summary


def test_a_number_without_an_error_stands_alone() -> None:
    assert write_error(1.0, None) == write_error(None, 1.0) == write_error(0.0, 0.0) == ""
    assert write_error(1234.6, 12.3) == "± 12"
    assert write_error(0.0005, 0.0001) == "± 1.0e-04"


def test_grpo_has_no_critic_rows(finished_run: Callable) -> None:
    page, _, _ = finished_run(rl={"algorithm": "grpo"}).report()
    assert "Groups without signal" in page
    assert "Value loss" not in page


@pytest.mark.parametrize(
    ("right_before", "right_after", "headline"),
    [
        (100, 180, "It learned"),
        (180, 100, "It got worse"),
        (100, 102, "No clear change"),
        # Of five prompts that changed sides all do so the same way in one case of sixteen.
        (100, 105, "No clear change"),
        (100, 106, "It learned"),
    ],
)
def test_the_headline_follows_the_prompts_that_changed_sides_unless_chance_may_have_done_it(
    finished_run: Callable, right_before: int, right_after: int, headline: str
) -> None:
    run = finished_run()
    for policy, right in (("sft", right_before), ("iter_003", right_after)):
        run.change_samples(policy, lambda i, _, right=right: {"correct": i < right})
    page, summary, _ = run.report()
    assert re.search(f"<h1[^>]*>{headline}", page)
    assert summary.startswith(f"# {headline}")


def test_a_better_earlier_policy_is_pointed_out(finished_run: Callable) -> None:
    run = finished_run()
    run.change_evaluation("iter_002", accuracy=0.99)
    page, summary, metrics = run.report()
    assert "iter_002 is more accurate (99.0%) than iter_003" in Page(page).text
    assert "iter_002 is more accurate" in summary
    assert metrics["final_accuracy"] < 0.99


def test_markup_in_a_response_is_shown_and_not_run(finished_run: Callable) -> None:
    run = finished_run()
    attack = '<script>alert(1)</script><img src=x onerror="alert(2)"> & "quoted" </td></table>'
    texts = {"prompt": attack, "answer": attack, "response": attack}
    # The largest change of reward, so that it is among the rows that are shown.
    run.change_sample("sft", 0, **texts, reward=-99.0, correct=False)
    run.change_sample("iter_003", 0, **texts, reward=99.0, correct=True)
    page, _, _ = run.report()
    parsed = Page(page)
    assert not {"script", "img", "iframe", "object"} & {tag for tag, _ in parsed.tags}
    assert not [name for _, attributes in parsed.tags for name in attributes if name[:2] == "on"]
    assert parsed.text.count(attack) == 4


def test_control_characters_cannot_reach_the_terminal(finished_run: Callable) -> None:
    run = finished_run()
    steering = "\x1b[2Jgone\x00\u202e\n# heading"
    run.change_sample("iter_003", 0, response=steering, reward=99.0, correct=True)
    run.change_sample("sft", 0, reward=-99.0, correct=False)
    page, summary, _ = run.report()
    for text in (page, summary):
        assert "␛[2Jgone␀\N{REPLACEMENT CHARACTER}" in text
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    assert "\n# heading" not in summary


def test_the_page_refers_to_nothing_outside_itself(finished_run: Callable) -> None:
    page, _, _ = finished_run().report()
    parsed = Page(page)
    for tag, attributes in parsed.tags:
        for name in ("src", "href", "srcset", "action", "data", "xlink:href", "poster"):
            target = attributes.get(name) or "#"
            assert target.startswith("#") or target == "data:,", (tag, target)
        for value in attributes.values():
            assert all(url.startswith("#") for url in re.findall(r"url\((.*?)\)", value or ""))
    assert "url(" not in parsed.style
    assert "@import" not in parsed.style
    assert not re.search(r"https?://|//[a-z]+\.", page)


def test_same_inputs_give_the_same_bytes_wherever_they_lie(finished_run: Callable) -> None:
    run = finished_run()
    first = run.report("first")
    assert run.report("elsewhere/second") == first
    assert str(run.root) not in first[0] + first[1]


def test_an_earlier_reports_hash_does_not_change_the_page(finished_run: Callable) -> None:
    run = finished_run()
    before = run.report()[0]
    own = next(node for node in run.graph if node["stage"] == "report")
    own["outs"] = {"artifacts/report": "0123456789abcdef0123456789abcdef.dir"}
    assert run.report()[0] == before


def test_the_order_of_the_graphs_nodes_does_not_change_the_page(finished_run: Callable) -> None:
    run = finished_run()
    before = run.report()[0]
    run.graph.reverse()
    assert run.report()[0] == before


def test_leftovers_of_removed_iterations_are_ignored(finished_run: Callable) -> None:
    run = finished_run()
    full = run.report()
    short = run.with_params(rl={"iterations": {"iter_001": {"policy": "sft"}}})
    short.graph[:] = [n for n in short.graph if not n["stage"].endswith(("@iter_002", "@iter_003"))]
    for broken in ("iter_002", "iter_003"):
        (run.inputs["evaluation_metrics"] / f"{broken}.json").write_text("not JSON")
    page, summary, metrics = short.report()
    assert "iter_003" in full[0]
    shown = [row[0].split()[0] for row in Page(page).rows("numbers")[1:]]
    assert shown == ["sft", "iter_001"]
    assert "iter_002" not in summary
    assert metrics["final_accuracy"] < full[2]["final_accuracy"]


@pytest.mark.parametrize(
    "missing",
    [
        "metrics/iterations/iter_002/score.json",
        "metrics/evaluations/sft.json",
        "artifacts/evaluations/iter_003/samples.parquet",
        "artifacts/rewards/reward_model/quality.json",
        "metrics/prepare.json",
    ],
)
def test_a_missing_file_is_named_with_what_to_do(finished_run: Callable, missing: str) -> None:
    run = finished_run()
    (run.root / missing).unlink()
    with pytest.raises(StageError, match=f"{re.escape(missing)} is missing: run `dvc repro`"):
        run.report()


def test_policies_evaluated_on_different_prompts_are_refused(finished_run: Callable) -> None:
    run = finished_run()
    run.change_sample("sft", 3, prompt_id="other")
    with pytest.raises(StageError, match="different prompts"):
        run.report()


def test_default_params_have_no_differences(finished_run: Callable) -> None:
    assert "every param has its default" in finished_run().report()[0]


def test_params_that_differ_are_listed_with_their_defaults(finished_run: Callable) -> None:
    run = finished_run(
        seed=3,
        rl={"algorithm": "grpo", "iterations": {"first": {"policy": "sft"}}},
        policy_update={"normalise_by_std": False},
    )
    page, _, _ = run.report()
    assert Page(page).rows("params") == [
        ["Param", "Default", "This run"],
        ["seed", "17", "3"],
        ["rl.algorithm", "ppo", "grpo"],
        ["rl.iterations.first.policy", "not there", "sft"],
        ["policy_update.normalise_by_std", "true", "false"],
        ["rl.iterations.iter_001.policy", "sft", "not there"],
        ["rl.iterations.iter_002.policy", "iter_001", "not there"],
        ["rl.iterations.iter_003.policy", "iter_002", "not there"],
    ]


def test_samples_show_improvements_regressions_and_what_is_still_wrong(
    finished_run: Callable,
) -> None:
    page, summary, _ = finished_run(report={"samples": 8}).report()
    rows = Page(page).rows("samples")
    assert [row[0] for row in rows if len(row) == 1] == ["Improved", "Regressed", "Still wrong"]
    assert sum(len(row) == 4 for row in rows[1:]) == 8
    assert len(re.findall("expected:", summary)) == 3


def test_more_samples_than_prompts_shows_each_prompt_once(finished_run: Callable) -> None:
    page, _, _ = finished_run(report={"samples": 1000}).report()
    assert sum(len(row) == 4 for row in Page(page).rows("samples")[1:]) == 256


def test_a_reward_source_without_pairs_to_rank_is_no_error(finished_run: Callable) -> None:
    run = finished_run()
    change_json(run.inputs["reward"] / "quality.json", pairwise_accuracy=None)
    page, summary, metrics = run.report()
    assert "reward_pairwise_accuracy" not in metrics
    assert "no held-out pair to rank" in page
    assert "None" not in summary


def test_the_summary_fits_a_terminal(finished_run: Callable) -> None:
    run = finished_run()
    long = "word " * 200
    for policy in ("sft", "iter_003"):
        texts = {"prompt": long, "answer": long, "response": long}
        run.change_sample(policy, 0, **texts, reward=99.0, correct=True)
    _, summary, _ = run.report()
    assert max(map(len, summary.splitlines())) <= 92
    assert len(summary.splitlines()) <= 40
    assert "artifacts/report/index.html" in summary


def test_the_report_starts_without_torch() -> None:
    code = "import sys, stages.report; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_distance_that_is_rounding_is_nothing() -> None:
    assert [write(value, Form.NATS) for value in (2.8e-10, -3e-7, 0.0)] == ["0"] * 3
    assert write(0.0004, Form.NATS) == "4.0e-04"
    assert write(2.8e-10) == "2.8e-10", "of other numbers nobody knows"


def test_training_is_told_in_an_order_and_in_words_that_explain_themselves(
    finished_run: Callable,
) -> None:
    run = finished_run()
    update = run.inputs["iterations"] / "iter_001/policy_update.json"
    change_json(update, num_prompts=256, critic_grad_norm=1.0)
    # Sorted by name, as stages write them.
    update.write_text(json.dumps(json.loads(update.read_text()), sort_keys=True))
    change_json(run.inputs["iterations"] / "iter_001/score.json", **{"reward_mean/judged": 0.5})
    page, _, _ = run.report()
    rows = [" ".join(row[0].split()) for row in Page(page).rows("numbers training")]
    text = " | ".join(rows)
    assert "no training step has seen" not in text
    assert "Prompts Prompts whose responses were learnt from." in text
    assert "Reward: judged Of judged alone." in text
    places = {
        label: next(i for i, row in enumerate(rows) if row.startswith(label))
        for label in (
            "Gradient norm",
            "Critic’s gradient norm",
            "Log-prob gap, mean",
            "Log-prob gap, largest",
        )
    }
    assert places["Gradient norm"] < places["Critic’s gradient norm"]
    assert places["Log-prob gap, mean"] < places["Log-prob gap, largest"]


def test_no_table_has_two_columns_of_one_name(finished_run: Callable) -> None:
    page, _, _ = finished_run().report()
    for table in re.findall(r"<thead>.*?</thead>", page, re.DOTALL):
        names = re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)
        assert len(names) == len(set(names))
