"""Questions about coloured squares and discs on a small canvas: count them, find the left one, list them, or combine them."""

import io
import json
import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from practicum.core.randomness import seed_of
from practicum.errors import DataError, suggest_install
from practicum.grading.verifiers import compare_exactly, contains
from practicum.pictures import IMAGE, encode_bytes
from practicum.ports import Task, TaskConfig, TaskContext
from practicum.rows import PromptSet
from practicum.rows.pictures import TEACHER_IMAGES
from practicum.types import Message, Prompt

CELLS, PIXELS = 4, 8
"""The cells of the canvas on each side, and their pixels: each cell may have one shape."""

COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
FORMS = ("square", "disc")
MOST = 3
"""The largest number of shapes."""

TRIES = 20
"""The number of draws per picture, since some show what others do."""

Shape = tuple[str, str, int]
"""A colour, a form, and the number of a cell, row by row."""

Shown = Literal["picture", "caption", "blank", "either"]


class Config(TaskConfig):
    """The numbers of questions, and what replaces the picture.

    Each question has the privileged fields `caption`, which lists the shapes in words, and `teacher_images`,
    the picture of another question.
    """

    type: Literal["shapes"] = "shapes"
    shows: Shown = Field(
        default="picture",
        description="what a question shows: its picture, the caption in its place, an empty canvas, or `either`, "
        "which draws picture or caption for each question",
    )
    heldout_shows: Shown | None = Field(
        default=None, description="what a held-out question shows; none: as `shows`"
    )
    asks: Literal["any", "list", "result"] = Field(
        default="any",
        description="a count or the left shape; all shapes in alphabetical order, as then also in the caption; or "
        "these, `is`, and the first one's colour with the last one's form: `blue disc, red square is blue square`",
    )
    most: int = Field(default=MOST, ge=1, le=MOST, description="the largest number of shapes")
    train_size: int = Field(default=512, ge=1, description="questions to train on")
    heldout_size: int = Field(default=64, ge=0, description="other questions, to evaluate on")


def build(config: Config, context: TaskContext) -> Task:
    """Draw distinct pictures with a question about each, the held-out ones first."""
    draw = random.Random(seed_of(context.seed, "shapes"))
    count = config.heldout_size + config.train_size
    # Lists and results leave out the places, so pictures with the same caption may differ.
    name = describe_scene if config.asks == "any" else repr
    scenes = dict[str, list[Shape]]()
    for _ in range(TRIES * count):
        scene = _draw_scene(config.most, draw)
        scenes.setdefault(name(scene), scene)
        if len(scenes) == count:
            break
    else:
        raise DataError(
            f"task: only {len(scenes)} of {count} pictures were drawn that differ; set a smaller "
            "train_size, or a larger most"
        )
    pictures = list(scenes.values())
    heldout = config.heldout_shows or config.shows
    prompts = [
        _build_prompt(
            name(scene),
            config.asks,
            heldout if number < config.heldout_size else config.shows,
            scene,
            pictures[number - 1],
            draw,
        )
        for number, scene in enumerate(pictures)
    ]
    return PromptSet(
        train=prompts[config.heldout_size :],
        heldout=prompts[: config.heldout_size],
        verify=contains if config.asks == "result" else compare_exactly,
    )


def describe_scene(scene: Sequence[Shape]) -> str:
    """Return the shapes in words, row by row, with their columns from 1: `red square 2, blue disc 1`."""
    return ", ".join(f"{colour} {form} {cell % CELLS + 1}" for colour, form, cell in scene)


def list_shapes(scene: Sequence[Shape]) -> str:
    """Return the shapes without their places, in alphabetical order: `blue disc, red square`."""
    return ", ".join(sorted(f"{colour} {form}" for colour, form, _ in scene))


def draw_canvas(scene: Sequence[Shape]) -> str:
    """Return the picture of a scene as a `data:` URL."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise DataError(
            f"the task shapes draws pictures with the package pillow; {suggest_install('pictures')}"
        ) from error
    canvas = Image.new("RGB", (CELLS * PIXELS, CELLS * PIXELS), "white")
    pen = ImageDraw.Draw(canvas)
    for colour, form, cell in scene:
        x, y = cell % CELLS * PIXELS + 1, cell // CELLS * PIXELS + 1
        box = (x, y, x + PIXELS - 3, y + PIXELS - 3)
        (pen.rectangle if form == "square" else pen.ellipse)(box, fill=COLOURS[colour])
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return encode_bytes(file.getvalue())


def _draw_scene(most: int, draw: random.Random) -> list[Shape]:
    cells = sorted(draw.sample(range(CELLS * CELLS), draw.randint(1, most)))
    return [(draw.choice(list(COLOURS)), draw.choice(FORMS), cell) for cell in cells]


def _build_prompt(
    name: str,
    asks: str,
    shows: Shown,
    scene: Sequence[Shape],
    neighbour: Sequence[Shape],
    draw: random.Random,
) -> Prompt:
    caption, picture = list_shapes(scene), draw_canvas(scene)
    question, answer, response = asks, caption, None
    if asks == "any":
        caption = describe_scene(scene)
        question, answer = _ask(scene, draw)
    elif asks == "result":
        answer = f"is {combine_shapes(scene)}"
        response = f"{caption} {answer}"
    if shows == "either":
        shows = draw.choice(["picture", "caption"])
    text, images = f"{IMAGE}{question}", (picture,)
    if shows == "caption":
        text, images = f"{caption}. {question}", ()
    elif shows == "blank":
        images = (draw_canvas([]),)
    return Prompt(
        f"{question} {name}",
        (Message("user", text, images=images),),
        answer=answer,
        response=response,
        domain=question.split()[0],
        privileged={
            "caption": caption,
            "question": question,
            TEACHER_IMAGES: json.dumps([draw_canvas(neighbour)]),
        },
    )


def _ask(scene: Sequence[Shape], draw: random.Random) -> tuple[str, str]:
    """Return a question about a scene, and its answer."""
    columns = [cell % CELLS for _, _, cell in scene]
    if columns.count(min(columns)) == 1 and draw.random() < 0.5:
        colour, form, _ = scene[columns.index(min(columns))]
        return "left?", f"{colour} {form}"
    kind = draw.choice([*COLOURS, *FORMS])
    return f"count {kind}?", f"{sum(kind in shape for shape in scene)} {kind}"


def combine_shapes(scene: Sequence[Shape]) -> str:
    """Return the first shape's colour with the last one's form, in alphabetical order."""
    words = list_shapes(scene).split()
    return f"{words[0]} {words[-1]}"
