"""The FLOPs of a step by supervised, reinforcement and on-policy training."""

from practicum.costs import ModelDims, ReadTokens, TrainableDims, count_read_tokens

GRPO_GROUP = 8
"""Completions of a prompt in the comparison with GRPO (arXiv 2402.03300)."""

WIRE_TOP_K = 64

Texts = list[tuple[tuple[int, ...], int]]
"""Texts as prompt tokens and number of completion tokens."""


def compare_methods(
    prompts: list[tuple[int, ...]],
    answer: int,
    n: int,
    shape: ModelDims,
    learning: TrainableDims,
    teacher: ModelDims | None,
) -> list[dict[str, float | str]]:
    """Return one row a method: FLOPs of generating, scoring and updating for the prompts of a step.

    `answer` is the length of a completion in tokens, `n` the number of completions per prompt. The teacher reads the
    student's own prompts; a verifier is free; GRPO has no reference.
    """
    single, group = (_repeat_prompts(prompts, answer, count) for count in (1, GRPO_GROUP))
    update = _count_update(single, shape, learning)
    rows = [_build_row("SFT on given answers", 0, 0, update)]
    if teacher is not None:
        generate = _count_generation(single, teacher)
        rows.append(_build_row("SFT on the teacher's answers", generate, 0, update))
    generate, update = _count_generation(group, shape), _count_update(group, shape, learning)
    rows.append(_build_row(f"GRPO, {GRPO_GROUP} answers", generate, 0, update))
    if teacher is not None:
        for count in dict.fromkeys((1, n)):
            texts = _repeat_prompts(prompts, answer, count)
            rows.append(
                _build_row(
                    f"OPD, {count} answer{'s' if count > 1 else ''}",
                    _count_generation(texts, shape),
                    _count_forward(count_read_tokens(texts), texts, teacher),
                    _count_update(texts, shape, learning),
                )
            )
    return rows


def find_break_even(rows: list[dict[str, float | str]]) -> float | None:
    """Return the completions per prompt from which GRPO costs more than distillation with one.

    None without a teacher.
    """
    total = {str(row["method"]): float(row["flops"]) for row in rows}
    single, group = total.get("OPD, 1 answer"), total[f"GRPO, {GRPO_GROUP} answers"]
    return None if single is None else single / (group / GRPO_GROUP)


def count_wire_bytes(tokens: int, prompt_tokens: int, teacher: ModelDims) -> dict[str, int]:
    """Return the bytes per step if the teacher were in another process, by the form of its signal.

    Sent: 4 bytes per token id. Returned: a float32 for the sampled token; 64 candidates of 4 + 2 bytes; a
    hidden state or all logits in 16 bits.
    """
    token_bytes = {
        "sampled": 4,
        f"top-{WIRE_TOP_K}": 6 * WIRE_TOP_K,
        "hidden": 2 * teacher.width,
        "full": 2 * teacher.vocabulary,
    }
    out = 4 * (tokens + prompt_tokens)
    return {form: out + size * tokens for form, size in token_bytes.items()}


def _repeat_prompts(prompts: list[tuple[int, ...]], answer: int, n: int) -> Texts:
    return [(prompt, answer) for prompt in prompts for _ in range(n)]


def _build_row(method: str, generate: int, score: int, update: int) -> dict[str, float | str]:
    flops = generate + score + update
    columns = {"generate": generate, "score": score, "update": update, "flops": flops}
    return {"method": method, **{name: float(number) for name, number in columns.items()}}


def _count_generation(texts: Texts, shape: ModelDims) -> int:
    # In generation one prefill serves all completions of a prompt, however short the prompt is.
    return _count_forward(count_read_tokens(texts, decoded=True), texts, shape)


def _count_forward(read: ReadTokens, texts: Texts, shape: ModelDims) -> int:
    return shape.count_hidden_flops(read.tokens, read.contexts) + shape.count_head_flops(
        sum(count for _, count in texts)
    )


def _count_update(texts: Texts, shape: ModelDims, learning: TrainableDims) -> int:
    return learning.count_update_flops(
        shape, count_read_tokens(texts), sum(count for _, count in texts)
    )
