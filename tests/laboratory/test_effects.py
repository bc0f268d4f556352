"""Quick forms of reproductions as tests of their effects: the bounds are wide, and a violation means that the effect is lost."""

from pathlib import Path

import pytest
import yaml

from laboratory import Results, load_reproduction, reproduce
from laboratory.study import FOLDER

pytestmark = pytest.mark.long


def mean(results: Results, arm: str, measure: str = "accuracy") -> float:
    values = results.get_values(arm, measure)
    assert len(values) == len(results.seeds)
    return sum(values.values()) / len(values)


def only(name: str, arms: list[str], steps: int, folder: Path) -> Path:
    """Write a reproduction with only some of its arms, with this many steps in its quick form."""
    data = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    spec = load_reproduction(name).spec
    data["arms"] = {arm: data["arms"][arm] for arm in arms}
    first, second = arms[:2]
    data["claims"] = [
        {
            "claim": "",
            "paper": "1011.0686",
            "theirs": "",
            "tests": [{"better": first, "than": second}],
        },
    ]
    data["quick"] = {"seeds": spec.quick.seeds, "sweep": False, "set": {"train": {"steps": steps}}}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.mark.slow
def test_the_whole_vocabulary_has_several_times_the_signal_of_the_sampled_token(tmp_path):
    data = yaml.safe_load((FOLDER / "signal.yaml").read_text())
    # Pretraining the teacher took most of the time; a fourth of the steps is enough.
    data["teacher"] = {"model": {"pretrain": {"steps": 300}}}
    data["measure"]["quick_batches"] = 12
    data["quick"] = {"seeds": 1}
    del data["arms"]["topk_2"]
    file = tmp_path / "signal.yaml"
    file.write_text(yaml.safe_dump(data))
    results = reproduce(file, out=tmp_path).results
    assert mean(results, "full", "signal_to_noise") >= 3 * mean(
        results, "sampled", "signal_to_noise"
    )
    assert mean(results, "topk_4", "cosine") >= 0.9


@pytest.mark.slow
def test_prompts_of_both_skills_bring_the_old_one_back_and_keep_the_new(tmp_path):
    results = reproduce("forgetting", out=tmp_path).results
    assert mean(results, "opd_both", "accuracy/reverse") >= 0.9
    assert mean(results, "opd_both", "accuracy/sort") >= 0.9
    assert mean(results, "opd_old_prompts", "accuracy/sort") < mean(
        results, "opd_both", "accuracy/sort"
    )


@pytest.mark.slow
def test_where_mistakes_can_be_mended_the_students_own_states_teach_faster(tmp_path):
    results = reproduce(only("horizon", ["opd", "expert"], 200, tmp_path), out=tmp_path).results
    assert len(results.seeds) == 3
    assert mean(results, "opd") - mean(results, "expert") >= 0.05


@pytest.mark.slow
def test_a_reward_for_the_whole_answer_costs_more_with_every_letter(tmp_path):
    results = reproduce(
        only("search_cost", ["opd_4", "rl_4", "rl_2"], 300, tmp_path), out=tmp_path
    ).results
    assert mean(results, "opd_4") >= 0.5, "a teacher finds four letters"
    assert mean(results, "rl_4") <= 0.05, "a reward finds nothing in as many steps"
    until = results.get_spending_until("rl_2", 0.25, "flops")
    for seed, whole in results.get_total_spending("rl_4", "flops").items():
        two = until[seed]
        assert two is not None, "a reward finds two letters"
        assert whole >= 3 * two
