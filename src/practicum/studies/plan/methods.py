"""The same prompts as supervised training, as reinforcement learning and as on-policy distillation, in operations a step."""

from practicum.costs import ModelDims, ReadTokens, TrainableDims, count_read_tokens

GRPO_GROUP = 8
"""Completions of a prompt in the comparison with GRPO (arXiv 2402.03300)."""

WIRE_TOP_K = 64


def methods(
    prompts: list[tuple[int, ...]],
    answer: int,
    n: int,
    shape: ModelDims,
    learning: TrainableDims,
    teacher: ModelDims | None,
) -> list[dict[str, float | str]]:
    """One row a method: operations of generating, scoring and updating for the prompts of one step.

    The teacher reads the student's own prompts; a verifier is free; GRPO has no reference.
    """
    one, group = (_texts(prompts, answer, count) for count in (1, GRPO_GROUP))
    rows = [_row("SFT on given answers", 0, 0, _update(one, shape, learning))]
    if teacher is not None:
        rows.append(
            _row(
                "SFT on the teacher's answers",
                _draw(one, teacher),
                0,
                _update(one, shape, learning),
            )
        )
    rows.append(
        _row(f"GRPO, {GRPO_GROUP} answers", _draw(group, shape), 0, _update(group, shape, learning))
    )
    if teacher is not None:
        for count in dict.fromkeys((1, n)):
            texts, title = (
                _texts(prompts, answer, count),
                f"OPD, {count} answer{'s' if count > 1 else ''}",
            )
            score = _forward(count_read_tokens(texts), texts, teacher)
            rows.append(_row(title, _draw(texts, shape), score, _update(texts, shape, learning)))
    return rows


def break_even(rows: list[dict[str, float | str]]) -> float | None:
    """From how many answers a prompt GRPO takes more operations than distillation with one."""
    total = {str(row["method"]): float(row["flops"]) for row in rows}
    single, group = total.get("OPD, 1 answer"), total[f"GRPO, {GRPO_GROUP} answers"]
    return None if single is None else single / (group / GRPO_GROUP)


def wire_bytes(tokens: int, prompt_tokens: int, teacher: ModelDims) -> dict[str, int]:
    """Bytes of a step if the teacher were in another process, by what it answers with.

    Out: 4 bytes a token id. Back: a float32 for the sampled token; 64 candidates of 4 + 2 bytes; a hidden state or all logits in 16
    bits.
    """
    out = 4 * (tokens + prompt_tokens)
    each = {
        "sampled": 4,
        f"top-{WIRE_TOP_K}": 6 * WIRE_TOP_K,
        "hidden": 2 * teacher.width,
        "full": 2 * teacher.vocabulary,
    }
    return {form: out + size * tokens for form, size in each.items()}


Texts = list[tuple[tuple[int, ...], int]]


def _texts(prompts: list[tuple[int, ...]], answer: int, n: int) -> Texts:
    return [(prompt, answer) for prompt in prompts for _ in range(n)]


def _row(method: str, generate: int, score: int, update: int) -> dict[str, float | str]:
    return {
        "method": method,
        "generate": float(generate),
        "score": float(score),
        "update": float(update),
        "flops": float(generate + score + update),
    }


def _draw(texts: Texts, shape: ModelDims) -> int:
    return _forward(count_read_tokens(texts, shortest=0), texts, shape)


def _forward(read: ReadTokens, texts: Texts, shape: ModelDims) -> int:
    return shape.hidden(read.tokens, read.contexts) + shape.logits(sum(count for _, count in texts))


def _update(texts: Texts, shape: ModelDims, learning: TrainableDims) -> int:
    return learning.update(shape, count_read_tokens(texts), sum(count for _, count in texts))
