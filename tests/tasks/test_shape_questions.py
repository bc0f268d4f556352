"""Questions about shapes: what a picture shows is what its caption and its answer say."""

import json
from pathlib import Path

import pytest
from PIL import Image

from practicum.errors import DataError
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


def test_a_list_is_the_caption_and_a_result_follows_from_it() -> None:
    listed, coded = (open_task(asks=asks, shows="caption") for asks in ("list", "result"))
    results = dict[str, str]()
    for plain, worked in zip(list_prompts(listed), list_prompts(coded), strict=True):
        caption = plain.privileged["caption"]
        assert plain.answer == caption == worked.privileged["caption"]
        assert plain.messages[0].content == f"{caption}. list"
        assert worked.messages[0].content == f"{caption}. result"
        assert worked.response == f"{caption} {worked.answer}"
        assert results.setdefault(caption, worked.answer or "") == worked.answer
        rewards = [
            coded.reward(Rollout.from_text(worked, text))
            for text in (worked.response, f"wrong {worked.answer}", caption, f"{worked.answer}s")
        ]
        assert rewards == [1.0, 1.0, 0.0, 0.0]
    kinds = {f"is {colour} {form}" for colour in COLOURS for form in ("square", "disc")}
    assert {*results.values()} == kinds
    assert results["blue disc, red square"] == "is blue square"


def test_few_pictures_are_refused_and_not_drawn_for_ever() -> None:
    assert len(list_prompts(open_task(asks="list", most=1, train_size=50))) == 90
    with pytest.raises(DataError, match="only 96 of 240 pictures were drawn that differ"):
        open_task(asks="list", most=1)


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
