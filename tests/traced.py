"""Traces as a harness would record them, made by hand: every number in them is different."""

import json
from pathlib import Path
from typing import Any

from practicum.text import Renderer
from practicum.types import Message


def node(
    parent: int | None, role: str, text: str, ids: list[int], sampled: int = 0
) -> dict[str, Any]:
    """Return a message where the model wrote the last `sampled` tokens, each with a different log-probability."""
    return {
        "parent": parent,
        "message": {"role": role, "content": text},
        "sampled": bool(sampled),
        "token_ids": ids,
        "mask": [False] * (len(ids) - sampled) + [True] * sampled,
        "logprobs": [-0.1 * (place + 1) for place in range(sampled)],
        "timestamp": 0.0,
    }


def trace(nodes: list[dict[str, Any]], task: str = "a", **fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "id": "t",
        "verifiers": {"version": "0.4.0"},
        "task": {"type": "Task", "data": {"idx": 0, "id": task, "prompt": "x"}},
        "agent": {"config": {}, "trainable": True},
        "nodes": nodes,
        "rewards": {
            "right": {"score": 0.5, "weight": 2.0},
            "form": {"score": 1.0, "weight": 0.25},
            "late": None,
        },
        "stop_condition": "agent_completed",
        **fields,
    }


def talk(renderer: Renderer, question: str = "abc", **fields: Any) -> dict[str, Any]:
    """Return two turns of the model with a tool's result between them; the template's tokens belong to the previous turn."""
    prompt = list(renderer.render((Message("user", question),)))
    nodes = [
        node(None, "user", question, prompt[:-1]),
        node(0, "assistant", "ab", [prompt[-1], 5, 6, 7], 3),
        node(1, "tool", "result", [8, 9]),
        node(2, "assistant", "c", [3, 4, 6], 2),
        node(3, "user", "thanks", [9, 9]),
    ]
    return trace(nodes, **fields)


def write(path: Path, *traces: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in traces))
    return path
