"""Measure how costs grow: the loss with tokens and vocabulary, a step with its tokens or their share, decoding with prompts.

    python -m benchmarks scaling [--quick]

Each cost is fitted as a power of its size over four sizes, by a straight line through the logarithms; the four sizes alternate.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import ceilings, models
from benchmarks.loss_kernels import Size, build_kernel, make_inputs
from benchmarks.measuring import (
    Session,
    build_parser,
    compute_ratios,
    fit_exponent,
    format_table,
    interleave,
    open_session,
    read_memory,
    round_digits,
    spread,
)
from practicum.objective import Full, Objective
from practicum.ports import AdamParams
from practicum.training.loop import assemble
from practicum.types import Prompt, Rollout, SampleRequest, SamplingParams, ScoreRequest

FULL = {
    "loss.tokens": (256, 512, 1024, 2048),
    "loss.vocabulary": (8192, 16384, 32768, 65536),
    "step.tokens": (512, 1024, 2048, 4096),
    "rollout.prompts": (32, 64, 128, 256),
}
QUICK = {
    "loss.tokens": (128, 256),
    "loss.vocabulary": (1024, 2048),
    "step.tokens": (256, 512),
    "rollout.prompts": (16, 32),
}
SLOTS, MEAN, LONGEST, ANSWER = 8, 16, 64, 64
SHARE, WHOLE = 0.25, 128
"""The part of an answer that is written and learned from, and the length of the whole one."""


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    session = open_session("scaling", parser.parse_args(), ceilings.measure_briefly())
    sizes = QUICK if session.quick else FULL
    shape = models.SHAPES["tiny" if session.quick else "toy"]
    makers: dict[str, Callable[[int], Callable[[], float]]] = {
        "loss.tokens": lambda tokens: _prepare_loss(
            Size(tokens, sizes["loss.vocabulary"][-1] // 2)
        ),
        "loss.vocabulary": lambda vocabulary: _prepare_loss(
            Size(sizes["loss.tokens"][1], vocabulary)
        ),
        "step.tokens": _prepare_steps(shape, "tiny-teacher" if session.quick else "toy-teacher"),
        "rollout.prompts": prepare_decoding(shape),
    }
    fits = {what: _fit(session, sizes[what], make) for what, make in makers.items()}
    rows = [[what, *fit["seconds"], fit["exponent"]["median"]] for what, fit in fits.items()]
    heads = [f"size {number}" for number in range(1, len(sizes["loss.tokens"]) + 1)]
    print(format_table(["seconds of", *heads, "exponent"], rows))
    prefix = _measure_prefix(session, shape, "tiny-teacher" if session.quick else "toy-teacher")
    print(f"a step on the first {SHARE:.0%} of each answer / on all of it: {prefix['median']:.3g}")
    session.report(
        {
            **{f"scaling.{what}": fit["exponent"] for what, fit in fits.items()},
            "scaling.prefix": prefix,
        },
        fits=fits,
        peak_mib=round(read_memory("VmHWM")),
    )


def _fit(
    session: Session, sizes: Sequence[int], make: Callable[[int], Callable[[], float]]
) -> dict:
    """Median seconds of each size, and the exponent of each round."""
    times = interleave({str(size): make(size) for size in sizes}, session.rounds, session.warm_up)
    exponents = [
        fit_exponent(sizes, [times[str(size)][number] for size in sizes])
        for number in range(session.rounds)
    ]
    return {
        "sizes": list(sizes),
        "seconds": [spread(times[str(size)])["median"] for size in sizes],
        "exponent": {**spread(exponents), "spread": round_digits(max(exponents) - min(exponents))},
    }


def _prepare_loss(size: Size) -> Callable[[], float]:
    run, inputs = build_kernel("reverse_kl"), make_inputs(size)
    return _build_timer(lambda: run(inputs))


def _build_timer(work: Callable[[], object], share: float = 1.0) -> Callable[[], float]:
    """The work as something that returns its processor seconds, divided by `share`."""

    def run_timed() -> float:
        start = time.process_time()
        work()
        return (time.process_time() - start) / share

    return run_timed


def _prepare_steps(shape: models.ModelDims, teacher: str) -> Callable[[int], Callable[[], float]]:
    """Prepare scores, gradient and AdamW on a number of answer tokens, with equal lengths."""
    trainer = models.build_trainer(models.build_language_model(shape), SLOTS)
    scorer = models.build_sampler(models.build_language_model(models.SHAPES[teacher], 1), SLOTS)

    def make(tokens: int) -> Callable[[], float]:
        items = [make_rollout(shape, number) for number in range(tokens // ANSWER)]
        requests = [ScoreRequest(item.prompt_tokens, tuple(item.tokens.tolist())) for item in items]

        def step() -> None:
            trainer.forward_backward(
                assemble(items, scorer.score(requests, Full())), Objective(), 0
            )
            trainer.optim_step(AdamParams(1e-6))

        return _build_timer(step)

    return make


def _measure_prefix(session: Session, shape: models.ModelDims, teacher: str) -> dict[str, float]:
    """Seconds of a whole step on the beginnings of answers over those on whole answers."""
    trainer = models.build_trainer(models.build_language_model(shape), SLOTS)
    scorer = models.build_sampler(models.build_language_model(models.SHAPES[teacher], 1), SLOTS)
    prompts = models.draw_prompts(SLOTS, shape.vocabulary)

    def step(new_tokens: int) -> None:
        requests = [SampleRequest(prompt, seed) for seed, prompt in enumerate(prompts)]
        samples = trainer.build_sampling_client().sample(requests, SamplingParams(new_tokens))
        items = [
            _build_rollout(prompt, sample.tokens)
            for prompt, sample in zip(prompts, samples, strict=True)
        ]
        score_requests = [
            ScoreRequest(item.prompt_tokens, tuple(item.tokens.tolist())) for item in items
        ]
        trainer.forward_backward(
            assemble(items, scorer.score(score_requests, Full())), Objective(), 0
        )
        trainer.optim_step(AdamParams(1e-6))

    lengths = {"part": int(SHARE * WHOLE), "whole": WHOLE}
    contenders = {
        name: _build_timer(lambda length=length: step(length)) for name, length in lengths.items()
    }
    times = interleave(contenders, session.rounds, session.warm_up)
    return compute_ratios(times["part"], times["whole"])


def make_rollout(shape: models.ModelDims, number: int) -> Rollout:
    """Return a random completion of `ANSWER` tokens to a random prompt of 32."""
    (prompt,) = models.draw_prompts(1, shape.vocabulary, number, 32, 32)
    (answer,) = models.draw_prompts(1, shape.vocabulary, 10**6 + number, ANSWER, ANSWER)
    return _build_rollout(prompt, torch.tensor(answer))


def _build_rollout(prompt: tuple[int, ...], tokens: Tensor) -> Rollout:
    return Rollout(
        prompt=Prompt(" ".join(map(str, prompt)), ()),
        prompt_tokens=prompt,
        tokens=tokens,
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        sampling_logprobs=torch.zeros(len(tokens)),
        policy_logprobs=torch.zeros(len(tokens)),
        policy_version=0,
        stop_reason="length",
        text="",
    )


def prepare_decoding(shape: models.ModelDims) -> Callable[[int], Callable[[], float]]:
    """Prepare the seconds per token of answers of mixed lengths to a number of prompts, in few slots."""
    client = models.build_sampler(models.build_language_model(shape), SLOTS)
    params = SamplingParams(LONGEST, stop_ids=models.draw_stops(shape.vocabulary, MEAN))

    def make(count: int) -> Callable[[], float]:
        requests = [
            SampleRequest(prompt, seed)
            for seed, prompt in enumerate(models.draw_prompts(count, shape.vocabulary))
        ]
        tokens = sum(len(sample.tokens) for sample in client.sample(requests, params))
        return _build_timer(lambda: client.sample(requests, params), tokens)

    return make


if __name__ == "__main__":
    main()
