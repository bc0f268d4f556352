"""Assembly: a run that cannot be put together is refused in one line."""

from pathlib import Path

import pytest
from toy import toy_recipe

from practicum.errors import CapabilityError
from practicum.runs.assembly import assemble_on_paper


def test_a_backend_that_cannot_be_planned_is_refused(models: Path, tmp_path: Path) -> None:
    recipe = toy_recipe(models, {"backend": {"type": "backends.child"}})
    with pytest.raises(CapabilityError, match=r"^plan: backend 'backends\.child' has no .*"):
        assemble_on_paper(recipe, tmp_path, answer_tokens=4)
