"""Compare how a model of pictures is read with what transformers computes from the model's own processor."""

from typing import Any

import torch
from torch import Tensor

from practicum.backends.local.loading import LoadedModel
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.pictures import Pictures
from practicum.pictures import is_picture, load_bytes, open_picture
from practicum.prompts import Message
from practicum.types import ScoreRequest

ANSWER = (8, 9, 10)
"""The tokens that follow a prompt."""


def get_pictures(loaded: LoadedModel) -> Pictures:
    assert loaded.language_model.pictures is not None
    return loaded.language_model.pictures


def run_processor(loaded: LoadedModel, messages: tuple[Message, ...]) -> dict[str, Tensor]:
    """Return what the model's own processor makes of the whole prompt."""
    text = loaded.renderer._chat.write(messages, "~")
    images = [open_picture(load_bytes(image)) for turn in messages for image in turn.images]
    processor: Any = get_pictures(loaded)._processor
    return processor(
        images=images or None, text=[text], add_special_tokens=False, return_tensors="pt"
    )


def score(loaded: LoadedModel, prompts: Any, tokens: tuple[int, ...]) -> list[Tensor]:
    requests = [ScoreRequest(loaded.renderer.render(prompt), tokens) for prompt in prompts]
    states = compute_hidden_states(loaded.language_model, requests)
    return list(loaded.language_model.head().logprobs(states).split(len(tokens)))


def compare_with_processor(
    loaded: LoadedModel, prompt: tuple[Message, ...], actual: Tensor
) -> None:
    """Assert that a prompt has the processor's tokens, and `ANSWER` the model's log-probabilities."""
    model: Any = loaded.language_model.model
    inputs = dict(run_processor(loaded, prompt))
    marked = [
        get_pictures(loaded)._image_id if is_picture(t) else t
        for t in loaded.renderer.render(prompt)
    ]
    assert marked == inputs["input_ids"][0].tolist()
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            more = inputs[name].new_full((1, len(ANSWER)), int(name == "attention_mask"))
            inputs[name] = torch.cat([inputs[name], more], dim=1)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([ANSWER])], dim=1)
    expected = model(**inputs).logits[0, -len(ANSWER) - 1 : -1].log_softmax(-1)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
