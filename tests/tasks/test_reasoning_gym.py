import importlib.util
from pathlib import Path
from typing import Any

import pytest

from practicum.errors import DataError
from practicum.ports import Task, TaskContext
from practicum.tasks.reasoning_gym import Config, build
from practicum.types import Rollout

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("reasoning_gym") is None, reason="the tasks extra is missing"
    ),
]


HOSTILE = [
    "__import__('os').system('touch FILE')",
    "[__import__('os').system('touch FILE')]",
    "[open('FILE', 'w').write('1')]",
    # Search for the pipe that scores go through, by name and by number.
    "[__import__('os').write(fd, b'{\"value\": 1.0}\\n') for fd in range(3, 20)]",
    "[f.f_locals['answers'].write('1') for f in [__import__('sys')._getframe(n) for n in range(9)]]",
]


def task(generator: str, seed: int = 0, **settings: Any) -> Task:
    sizes = {"train_size": 6, "heldout_size": 3, **settings}
    return build(Config(generator=generator, **sizes), TaskContext(seed, Path()))


# ransom_note and word_ladder make other items in processes with another hash seed.
@pytest.mark.parametrize("generator", ["products", "letter_counting", "ransom_note", "word_ladder"])
def test_a_generators_own_answers_are_right(generator: str) -> None:
    made = task(generator)
    prompts = [*made.train_prompts(), *made.heldout_prompts()]
    assert len({prompt.id for prompt in prompts}) == len(prompts) >= 7
    assert not {prompt.messages for prompt in made.train_prompts()} & {
        prompt.messages for prompt in made.heldout_prompts()
    }
    for prompt in prompts:
        assert prompt.domain == generator
        assert prompt.answer is not None
        assert made.reward(Rollout.from_text(prompt, f" {prompt.answer}\n")) == 1.0
        assert made.reward(Rollout.from_text(prompt, "no idea")) in (0.0, 0.01)


@pytest.mark.parametrize("generator", ["countdown", "n_queens", "spiral_matrix"])
def test_a_reply_that_is_a_program_scores_nothing_and_does_nothing(
    generator: str, tmp_path: Path
) -> None:
    made = task(generator, train_size=1, heldout_size=0)
    [prompt] = made.train_prompts()
    file = tmp_path / "F"
    for reply in HOSTILE:
        assert made.reward(Rollout.from_text(prompt, reply.replace("FILE", str(file)))) == 0.0
    assert not file.exists()
    assert (
        prompt.answer is not None and made.reward(Rollout.from_text(prompt, prompt.answer)) == 1.0
    )


def test_items_are_the_same_in_every_process_and_depend_on_the_seed() -> None:
    first, again, other = (
        task("ransom_note", seed=seed, train_size=3, heldout_size=0) for seed in (0, 0, 1)
    )
    assert first.train_prompts() == again.train_prompts()
    assert first.train_prompts() != other.train_prompts()


def test_a_small_world_leaves_out_what_repeats_or_is_held_out(notes: list[str]) -> None:
    config = {"min_digits": 1, "max_digits": 1, "min_terms": 1, "max_terms": 1}
    made = task("products", train_size=40, heldout_size=4, config=config)
    left_out = 40 - len(made.train_prompts())
    assert notes == [f"{left_out} of 40 generated training prompts left out: repeated or held out"]
    with pytest.raises(
        DataError, match="all 2 training prompts of 'products' are also held out; lower"
    ):
        task("products", train_size=2, heldout_size=200, config=config)


def test_nothing_need_be_held_out() -> None:
    assert not task("products", heldout_size=0).heldout_prompts()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generator": "product"}, "no generator named 'product'; did you mean 'products'?"),
        (
            {"generator": "composite"},
            "'composite' would run a model's reply as code .*score_answer.*take another",
        ),
        (
            {"config": {"digits": 1}},
            "the generator 'products' does not take {'digits': 1} .*unexpected keyword",
        ),
        (
            {"config": {"min_terms": -1}},
            "the generator 'products' does not take {'min_terms': -1} .*min_terms",
        ),
        (
            {"config": {"seed": 1}},
            "task.config: seed is not set here but by the recipe's seed; leave it out",
        ),
        ({"config": {"size": 1}}, "task.config: size is not set here but by task.train_size"),
        (
            {"config": {"min_terms": {1}}},
            "task.config: .*write numbers, texts, lists and mappings only",
        ),
    ],
)
def test_what_cannot_be_generated_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        task(**{"generator": "products", **settings})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        DataError,
        match="needs the package reasoning-gym; in the checkout of practicum, run: pip install",
    ):
        task("products")
