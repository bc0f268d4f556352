"""Speculative decoding with real models: texts follow the target for any drafter, and a reproduction stores its measurements."""

import json
from collections import Counter

import pytest
import torch
import yaml

from laboratory import reproduce
from laboratory.measures.drafter import (
    DraftCounts,
    DraftText,
    generate_speculatively,
    measure_drafting,
)
from practicum.backends.local.loading import load
from practicum.backends.local.sampler import LocalSampler
from practicum.errors import RecipeError
from practicum.models.config import ModelConfig
from practicum.types import SampleRequest, SamplingParams
from tests.laboratory.test_reproductions import SMALL
from tests.toy import make_model, toy_run

COUNT = 1000


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return an untrained drafter, and a target that was trained a little."""
    home = tmp_path_factory.mktemp("models")
    folders = [
        make_model(home / f"steps-{steps}", hidden_size=16, seed=steps, pretrain=steps)
        for steps in (0, 12)
    ]
    return [load(ModelConfig(model=str(folder))) for folder in folders]


def decoded(drafter, target, count, params, gamma=3):
    """Return texts after one prompt by speculative decoding, and their cost."""
    texts = [DraftText((5, 6, 7), (5, 6, 7), seed) for seed in range(count)]
    draft, check = (LocalSampler(model.language_model) for model in (drafter, target))
    with torch.no_grad():
        spent = generate_speculatively(draft, check, texts, params, gamma)
    return [tuple(text.tokens) for text in texts], spent


def exact(model, params, text=()):
    """Return the probability of every text that the model writes after the prompt."""
    if text and (len(text) == params.max_new_tokens or params.should_stop(text)):
        return {text: 1.0}
    language_model = model.language_model
    ids = torch.tensor([[5, 6, 7, *text]])
    with torch.no_grad():
        hidden = language_model.body(ids, torch.ones_like(ids, dtype=torch.bool))[0, -1]
        chances = (
            language_model.head().logprobs(hidden).div(params.temperature).softmax(dim=-1).tolist()
        )
    ends = [(exact(model, params, (*text, token)), chance) for token, chance in enumerate(chances)]
    return {end: chance * rest for found, chance in ends for end, rest in found.items()}


def likelihood(texts, chances):
    """Return the p-value of chi-squared over texts that are expected at least 20 times, and one class for the rest."""
    counts, total = Counter(texts), len(texts)
    often = [text for text, chance in chances.items() if chance * total >= 20]
    expected = [chances[text] * total for text in often]
    seen = [counts[text] for text in often]
    pairs = zip([*seen, total - sum(seen)], [*expected, total - sum(expected)], strict=True)
    squares = sum((one - other) ** 2 / other for one, other in pairs)
    return torch.special.gammaincc(torch.tensor(len(often) / 2), torch.tensor(squares / 2)).item()


@pytest.mark.long
def test_texts_are_distributed_as_the_targets_and_not_as_the_drafters(models):
    drafter, target = models
    params = SamplingParams(2, temperature=0.7, stop_ids=target.renderer.stop_ids)
    chances = exact(target, params)
    texts, spent = decoded(drafter, target, COUNT, params)
    assert 0.1 < spent.accepted / spent.examined < 0.9, "drafts are kept and rejected"
    assert likelihood(texts, chances) > 0.01
    own = LocalSampler(drafter.language_model).sample(
        [SampleRequest((5, 6, 7), seed) for seed in range(COUNT)], params
    )
    assert likelihood([tuple(sample.tokens.tolist()) for sample in own], chances) < 1e-6, (
        "the test tells the two apart"
    )


def test_a_drafter_that_is_the_target_is_never_rejected_and_greedy_drafts_are_kept_or_not(models):
    drafter, target = models
    params = SamplingParams(8)
    texts, spent = decoded(target, target, 16, params)
    assert {len(text) for text in texts} == {8}
    assert spent == DraftCounts(examined=16 * 6, accepted=16 * 6, generated=16 * 8, calls=16 * 2), (
        "3 drafted and one more, twice"
    )
    greedy = SamplingParams(8, temperature=0.0)
    (text,), _ = decoded(drafter, target, 1, greedy)
    (own,) = LocalSampler(target.language_model).sample([SampleRequest((5, 6, 7), 0)], greedy)
    assert text == tuple(own.tokens.tolist())


def test_the_same_seeds_write_the_same_texts_whatever_shares_their_batch(models):
    params = SamplingParams(4, stop_ids=models[1].renderer.stop_ids)
    whole, _ = decoded(models[0], models[1], 12, params)
    few, _ = decoded(models[0], models[1], 5, params)
    assert whole[:5] == few


TEACHER = {
    "type": "model",
    "model": {"hidden_size": 16, "layers": 1, "heads": 2, "seed": 2, "pretrain": {"steps": 5}},
}


def finished(models, out, teacher):
    """Return the folder of a run that learns total variation for two steps."""
    make_model(models / "student")
    changes = {
        "teacher": teacher,
        "objective.divergence": "tvd",
        "train.steps": 2,
        "evaluation": {"prompts": 8, "samples": 2, "temperature": 1.0},
    }
    return toy_run(models, out, changes).folder


@pytest.mark.long
def test_a_run_is_measured_once(tmp_path):
    folder = finished(tmp_path / "models", tmp_path / "out", TEACHER)
    found = measure_drafting(folder, 2)
    assert 0 < found["acceptance"] < 1
    assert 1 <= found["tokens_per_call"] <= 3
    assert 0 < found["expected_acceptance"] < 1
    known = folder / "drafter-2.json"
    known.write_text(json.dumps({**found, "acceptance": 0.25}))
    assert measure_drafting(folder, 2) == {**found, "acceptance": 0.25}
    known.unlink()
    assert measure_drafting(folder, 2) == found, "the same seed drafts the same"


@pytest.mark.long
def test_a_drafter_needs_one_model_to_draft_for(tmp_path):
    other = {**TEACHER, "model": {**TEACHER["model"], "seed": 3}}
    pool = {"type": "pool", "kind": "geometric", "teachers": {"one": TEACHER, "other": other}}
    folder = finished(tmp_path / "models", tmp_path / "out", pool)
    with pytest.raises(
        RecipeError, match=r"drafts are for one model .*write teacher: \{type: model\}"
    ):
        measure_drafting(folder, 2)


@pytest.mark.slow
def test_a_reproduction_aims_at_acceptance(tmp_path):
    file = tmp_path / "drafter.yaml"
    arms = {
        "before": {
            "about": "one",
            "set": {"optimizer": {"learning_rate": 1e-12}},
            "learning_rates": [1e-12],
        },
        "tvd": {"about": "two", "set": {"objective": {"divergence": "tvd"}}},
    }
    test = {"better": "tvd", "than": "before", "measure": "acceptance"}
    claims = [{**SMALL["claims"][0], "tests": [test]}]
    measure = {"type": "drafter", "gamma": 2}
    file.write_text(
        yaml.safe_dump(
            {**SMALL, "measure": measure, "aim": "acceptance", "arms": arms, "claims": claims}
        )
    )
    found = reproduce(file, full=True, out=tmp_path / "out")
    tried = {row["learning_rate"]: row["acceptance"] for row in found.results.tried}
    assert found.results.chosen["tvd"]["learning_rate"] == max(tried, key=tried.__getitem__)
    assert {"acceptance", "tokens_per_call", "expected_acceptance"} <= found.results.readings[
        "before"
    ].keys()
    assert "acceptance at the end" in (found.folder / "plot.svg").read_text()
    assert (
        reproduce(file, full=True, out=tmp_path / "out", resume=True).results.readings
        == found.results.readings
    )
