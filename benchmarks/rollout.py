"""Measure rollouts: tokens per second against `generate` of transformers, the cost of a decode step, the share of busy slots.

    python -m benchmarks rollout [--model 17m 135m toy] [--lengths fixed geometric]

Random weights. Geometric lengths follow from a random set of stop tokens (mean 64, at most 256; 40 prompts of 16 to 48 tokens in 8
slots). Both sides have the same prompts, stop tokens and settings, and alternate in one process. Each side draws the same answers
in every round, so rounds only differ by the machine.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import ceilings, models
from benchmarks.measuring import (
    Session,
    build_parser,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    scale_reading,
    spread,
)
from practicum.types import SampleRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Case:
    """One workload: how many prompts in how many slots, how long an answer may be, and the mean where lengths differ."""

    model: str
    lengths: str
    prompts: int
    slots: int
    new_tokens: int
    mean: int = 0

    @property
    def stops(self) -> frozenset[int]:
        """The stop tokens; none where all answers have the same length."""
        return (
            models.draw_stops(models.SHAPES[self.model].vocabulary, self.mean)
            if self.mean
            else frozenset()
        )


CASES = (
    Case("17m", "fixed", 8, 8, 96),
    Case("17m", "fixed", 32, 32, 96),
    Case("17m", "fixed", 64, 64, 64),
    Case("17m", "geometric", 40, 8, 256, 64),
    Case("135m", "fixed", 8, 8, 48),
    Case("toy", "fixed", 8, 8, 96),
)
STEP = ("milliseconds", "occupancy", "occupancy_bound")
QUICK = (Case("17m", "fixed", 8, 8, 12), Case("17m", "geometric", 16, 8, 32, 8))


@dataclass(slots=True)
class Contender:
    """One side: its model, and of each rollout its lengths, its decode steps and, where known, the seconds of drawing."""

    model: object
    case: Case
    lengths: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    drawing: list[float] = field(default_factory=list)


def main() -> None:
    """Report one line for each workload."""
    parser = build_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=sorted(models.SHAPES), help="only these")
    parser.add_argument("--lengths", nargs="+", choices=("fixed", "geometric"), help="only these")
    options = parser.parse_args()
    session = open_session("rollout", options, ceilings.measure_briefly())
    for case in QUICK if options.quick else CASES:
        conditions = (
            not options.model or case.model in options.model,
            not options.lengths or case.lengths in options.lengths,
        )
        if all(conditions):
            measure(session, case)


def measure(session: Session, case: Case) -> dict[str, float]:
    """Time both sides of one workload; how many times as fast as `generate` this library is."""
    shape = models.SHAPES[case.model]
    prompts = models.draw_prompts(case.prompts, shape.vocabulary)
    library, generate = (
        Contender(make(shape), case)
        for make in (models.build_language_model, models.build_causal_lm)
    )
    error = check(library, prompts)
    times = interleave(
        {
            "ours": build_timer(lambda: _sample_ours(library, prompts)),
            "generate": build_timer(lambda: _generate(generate, prompts)),
        },
        session.rounds,
        session.warm_up,
    )
    counts = {
        name: [sum(lengths) for lengths in side.lengths[-session.rounds :]]
        for name, side in _name_sides(library, generate)
    }
    speed = {
        name: [n / t for n, t in zip(counts[name], times[name], strict=True)] for name in times
    }
    figures = _measure_steps(case, library, generate, times, session)
    floor = _compute_floor(shape, case.slots, dict(session.ceilings))
    drawing = [
        part / total
        for part, total in zip(library.drawing[-session.rounds :], times["ours"], strict=True)
    ]
    rows = [
        [name, spread(speed[name])["median"], *(figures[name][key]["median"] for key in STEP)]
        for name in times
    ]
    print(
        f"{case.model}, {case.lengths} lengths, {case.prompts} prompts in {case.slots} slots, at most {case.new_tokens}"
    )
    print(format_table(["contender", "tokens/s", "ms a step", "slots at work", "at best"], rows))
    ratio = compute_ratios(speed["ours"], speed["generate"])
    session.report(
        _build_readings(case, speed, figures, floor, drawing),
        device="cpu",
        model=case.model,
        lengths=case.lengths,
        prompts=case.prompts,
        slots=case.slots,
        new_tokens=case.new_tokens,
        mean=case.mean,
        tokens_per_second={name: spread(values) for name, values in speed.items()},
        of_generate=ratio,
        steps=figures,
        floor_milliseconds=floor * 1000,
        drawing=spread(drawing),
        logprob_error=error,
        decoding=models.name_decoding(library.model),
        mean_length=sum(map(sum, library.lengths)) / sum(map(len, library.lengths)),
        longest=max(map(max, library.lengths)),
    )
    return ratio


def _name_sides(library: Contender, generate: Contender) -> list[tuple[str, Contender]]:
    return [("ours", library), ("generate", generate)]


def _sample_ours(side: Contender, prompts: list[tuple[int, ...]]) -> None:
    case = side.case
    client = models.build_sampler(side.model, case.slots)
    requests = [SampleRequest(prompt, number) for number, prompt in enumerate(prompts)]
    with models.metered() as meter:
        samples = client.sample(requests, SamplingParams(case.new_tokens, stop_ids=case.stops))
    side.lengths.append([len(sample.tokens) for sample in samples])
    side.steps.append(meter.steps)
    side.drawing.append(meter.seconds)
    side.before.append(meter.before)


@torch.no_grad()
def _generate(side: Contender, prompts: list[tuple[int, ...]]) -> None:
    """HF's `generate` in batches as large as there are slots, all of them waiting for their longest."""
    case = side.case
    assert isinstance(side.model, PreTrainedModel)
    torch.manual_seed(0)
    lengths = []
    for start in range(0, len(prompts), case.slots):
        ids, mask = _pad_left(prompts[start : start + case.slots], side.model.device)
        settings = {"eos_token_id": sorted(case.stops)} if case.stops else {}
        made = side.model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=case.new_tokens,
            pad_token_id=0,
            **settings,
        )
        lengths += _count_lengths(made[:, ids.shape[1] :], case.stops)
    side.lengths.append(lengths)
    side.steps.append(models.count_batch_steps(lengths, case.slots))


def _pad_left(prompts: list[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([(0,) * (width - len(prompt)) + (1,) * len(prompt) for prompt in prompts])
    return ids.to(device), mask.to(device)


def _count_lengths(answers: Tensor, stops: frozenset[int]) -> list[int]:
    """The tokens of each answer up to and with its stop token."""
    lengths = []
    for answer in answers.tolist():
        at = next((place for place, token in enumerate(answer) if token in stops), len(answer) - 1)
        lengths.append(at + 1)
    return lengths


@torch.no_grad()
def check(side: Contender, prompts: list[tuple[int, ...]]) -> float:
    """The greatest difference of the reported log-probabilities from the whole model's own, over a few short answers."""
    shape = models.SHAPES[side.case.model]
    model = models.build_causal_lm(shape)
    requests = [SampleRequest(prompt, number) for number, prompt in enumerate(prompts[:4])]
    samples = models.build_sampler(side.model, 4).sample(
        requests, SamplingParams(8, stop_ids=side.case.stops)
    )
    worst = 0.0
    for request, sample in zip(requests, samples, strict=True):
        ids = torch.tensor([[*request.prompt_tokens, *sample.tokens.tolist()]])
        logprobs = torch.log_softmax(
            model(input_ids=ids).logits[0, len(request.prompt_tokens) - 1 : -1], dim=-1
        )
        expected = logprobs.cpu().gather(-1, sample.tokens[:, None])[:, 0]
        worst = max(worst, (expected - sample.policy_logprobs).abs().max().item())
    if worst > 1e-3:
        raise SystemExit(f"the sampler's log-probabilities differ from the model's by {worst:.2g}")
    return worst


def _measure_steps(
    case: Case,
    library: Contender,
    generate: Contender,
    times: dict[str, list[float]],
    session: Session,
) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds a decode step, with and without what comes before, the share of slots at work and the greatest possible."""
    figures = {}
    for name, side in _name_sides(library, generate):
        rounds = list(
            zip(
                side.lengths[-session.rounds :],
                side.steps[-session.rounds :],
                times[name],
                strict=True,
            )
        )
        figures[name] = {
            "milliseconds": spread([1000 * seconds / count for _, count, seconds in rounds]),
            "occupancy": spread(
                [sum(lengths) / (case.slots * count) for lengths, count, _ in rounds]
            ),
            "occupancy_bound": spread(
                [models.compute_refill_bound(lengths, case.slots) for lengths, _, _ in rounds]
            ),
        }
        if side.before:
            ready = zip(rounds, side.before[-session.rounds :], strict=True)
            figures[name]["decode"] = spread(
                [1000 * (seconds - before) / count for (_, count, seconds), before in ready]
            )
    return figures


def _compute_floor(shape: models.ModelDims, rows: int, limits: dict[str, float]) -> float:
    """Return the minimum seconds to read all weights, or to compute the products of these rows."""
    numbers = shape.body + shape.head
    return ceilings.compute_floor(2.0 * rows * numbers, 4.0 * numbers, limits)


def _build_readings(
    case: Case,
    speed: dict[str, list[float]],
    figures: dict[str, dict[str, dict[str, float]]],
    floor: float,
    drawing: list[float],
) -> dict[str, dict[str, float]]:
    """Return the readings of this workload that the goals ask for."""
    ratio = compute_ratios(speed["ours"], speed["generate"])
    if case.model == "17m" and case.lengths == "geometric":
        return {"rollout.mixed": ratio, "rollout.occupancy": figures["ours"]["occupancy"]}
    readings = {}
    if case.model == "17m":
        readings[f"rollout.draw.{case.slots}"] = spread(drawing)
    if case.model in ("17m", "135m") and case.slots == 8:
        readings[f"rollout.floor.{case.model}"] = scale_reading(
            figures["ours"]["decode"], 0.001 / floor
        )
    if case.model == "17m" and case.slots == 8:
        readings["rollout.fixed"] = ratio
    return readings


if __name__ == "__main__":
    main()
