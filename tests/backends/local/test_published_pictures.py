"""A picture is read with the sizes, tiles and files of published models as their own processors read it."""

from pathlib import Path

import pytest
import torch
from picture_files import draw_picture, write_url
from vision_checks import ANSWER, compare_with_processor, score
from vision_models import FAMILIES, PUBLISHED, build_vision_model

from practicum.backends.local.loading import add_pictures, load
from practicum.models.config import ModelConfig
from practicum.pictures import is_picture
from practicum.prompts import Message

WIDE, TALL = write_url(draw_picture(0, 640, 480)), write_url(draw_picture(1, 150, 300))
ONE = (Message("user", "<image>how many?", images=(WIDE,)),)
TWO = (Message("user", "is <image>or <image>?", images=(TALL, WIDE)),)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_published_size_is_read_as_by_its_processor(family: str, tmp_path: Path) -> None:
    published = PUBLISHED[family]
    source = build_vision_model(tmp_path, family, published=published)
    loaded = add_pictures(load(ModelConfig(model=str(source))))
    tokens = loaded.renderer.render(ONE)
    assert sum(map(is_picture, tokens)) == published.tokens, published.name
    for prompt, actual in zip((ONE, TWO), score(loaded, (ONE, TWO), ANSWER), strict=True):
        compare_with_processor(loaded, prompt, actual)
