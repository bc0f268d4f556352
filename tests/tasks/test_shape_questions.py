"""Questions about shapes: what a picture shows is what its caption and its answer say."""

import json
from pathlib import Path

import pytest
from PIL import Image

from practicum.pictures import load_bytes, open_picture
from practicum.ports import Task, TaskContext
from practicum.prompts import Prompt
from practicum.tasks.shapes import CELLS, COLOURS, PIXELS, Config, build
from practicum.types import Rollout


def open_task(seed: int = 0, **settings: object) -> Task:
    config = Config.model_validate({"train_size": 200, "heldout_size": 40, **settings})
    return build(config, TaskContext(seed, Path()))


def read_scene(picture: Image.Image) -> list[str]:
    """Return the shapes in a picture in words, row by row."""
    words = []
    for cell in range(CELLS * CELLS):
        left, top = cell % CELLS * PIXELS, cell // CELLS * PIXELS
        colour = picture.getpixel((left + PIXELS // 2, top + PIXELS // 2))
        # A disc leaves the corner of its box white.
        corner = picture.getpixel((left + 1, top + 1))
        for name, value in COLOURS.items():
            if colour == value:
                form = "square" if corner == value else "disc"
                words.append(f"{name} {form} {cell % CELLS + 1}")
    return words


def answer(caption: str, question: str) -> str:
    """Return the answer to a question from a caption."""
    shapes = [words.split() for words in caption.split(", ")]
    if question == "left?":
        return " ".join(min(shapes, key=lambda shape: int(shape[2]))[:2])
    kind = question.removeprefix("count ").removesuffix("?")
    return f"{sum(kind in shape for shape in shapes)} {kind}"


def list_prompts(task: Task) -> list[Prompt]:
    return [*task.train_prompts(), *task.heldout_prompts()]


@pytest.mark.parametrize("seed", range(3))
def test_picture_caption_and_answer_agree(seed: int) -> None:
    prompts = list_prompts(open_task(seed))
    assert len({prompt.privileged["caption"] for prompt in prompts}) == len(prompts) == 240
    for prompt in prompts:
        caption, question = prompt.privileged["caption"], prompt.privileged["question"]
        picture = open_picture(load_bytes(prompt.messages[0].images[0]))
        assert ", ".join(read_scene(picture)) == caption
        assert answer(caption, question) == prompt.answer
        [other] = json.loads(prompt.privileged["teacher_images"])
        assert ", ".join(read_scene(open_picture(load_bytes(other)))) != caption


def test_left_is_asked_only_of_one_leftmost_shape() -> None:
    for prompt in list_prompts(open_task()):
        if prompt.domain == "left?":
            columns = [words[-1] for words in prompt.privileged["caption"].split(", ")]
            assert columns.count(min(columns)) == 1


def test_a_sum_is_of_the_counts_before_it() -> None:
    task = open_task(asks="sum")
    for prompt in list_prompts(task):
        caption, question = prompt.privileged["caption"], prompt.privileged["question"]
        kinds = question.removeprefix("add ").removesuffix("?").split()
        counts = [answer(caption, f"count {kind}?") for kind in kinds]
        total = sum(int(count.split()[0]) for count in counts)
        assert len(set(kinds)) == 2
        assert prompt.response == f"{', '.join(counts)} so {total}"
        rewards = [
            task.reward(Rollout.from_text(prompt, text))
            for text in (prompt.response, f"so {total}", str(total), f"so {total}0", "so 9")
        ]
        assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_training_reads_captions_and_held_out_questions_show_pictures() -> None:
    task = open_task(shows="caption", heldout_shows="picture")
    assert {len(prompt.messages[0].images) for prompt in task.train_prompts()} == {0}
    assert {len(prompt.messages[0].images) for prompt in task.heldout_prompts()} == {1}
    shown = [len(prompt.messages[0].images) for prompt in list_prompts(open_task(shows="either"))]
    assert 80 < sum(shown) < 160


def test_a_caption_or_an_empty_canvas_replaces_the_picture() -> None:
    seen, told, blank = (
        list_prompts(open_task(shows=shows)) for shows in ("picture", "caption", "blank")
    )
    for picture, caption, empty in zip(seen, told, blank, strict=True):
        assert picture.answer == caption.answer == empty.answer
        assert caption.messages[0].images == ()
        assert caption.messages[0].content.startswith(picture.privileged["caption"])
        assert not read_scene(open_picture(load_bytes(empty.messages[0].images[0])))
