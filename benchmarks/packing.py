"""Compare a packed pass by the compiled program with transformers' modules: processor time, and the difference of the results.

    python -m benchmarks packing

Random weights; both sides read the same texts and alternate in one process. "score" is a pass without a gradient, "learn" a pass
with its backward pass. The line contains the greatest difference of the hidden states, relative to the greatest state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import ceilings, models
from benchmarks.measuring import (
    build_parser,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    spread,
)
from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.packing import compute_hidden_states
from practicum.types import ScoreRequest


@dataclass(frozen=True, slots=True)
class Case:
    """Texts of a model: their number, and the lengths of prompts and answers; with `shared`, of one prompt."""

    model: str
    texts: int
    prompt: int
    answer: int
    shared: bool = False

    @property
    def name(self) -> str:
        """The name of the case in a line."""
        of = "one prompt" if self.shared else "prompts"
        return f"{self.model}, {self.texts} answers of {self.answer} to {of} of {self.prompt}"


CASES = (
    Case("toy", 6, 45, 128),
    Case("17m", 8, 20, 128),
    Case("17m", 16, 256, 48, shared=True),
    Case("17m", 1, 256, 1792),
    Case("135m", 4, 64, 192),
)
QUICK = (Case("tiny", 2, 8, 16), Case("tiny", 4, 40, 8, shared=True))


def main() -> None:
    """Report one line for each case."""
    options = build_parser(__doc__).parse_args()
    session = open_session("packing", options, ceilings.measure_briefly())
    for case in QUICK if options.quick else CASES:
        shape = models.SHAPES[case.model]
        model = models.build_language_model(shape)
        texts = _draw_texts(case, shape.vocabulary)
        sides = {
            "compiled": replace(model, decoding=Decoding.NATIVE),
            "modules": replace(model, decoding=Decoding.TORCH),
        }
        states = [compute_hidden_states(side, texts).detach() for side in sides.values()]
        error = float((states[0] - states[1]).abs().max() / states[1].abs().max())
        rows, ratios = [], {}
        for work, run in (("score", _score), ("learn", _learn)):
            times = interleave(
                {name: build_timer(_bind(run, side, texts)) for name, side in sides.items()},
                session.rounds,
                session.warm_up,
            )
            ratios[work] = compute_ratios(times["compiled"], times["modules"])
            rows.append([work, *(spread(values)["median"] for values in times.values())])
        print(case.name)
        print(format_table(["pass", *sides], rows))
        session.report(case=case.name, ratios=ratios, seconds=rows, greatest_difference=error)


def _bind(
    run: Callable[[LanguageModel, Sequence[ScoreRequest]], None],
    model: LanguageModel,
    texts: Sequence[ScoreRequest],
) -> Callable[[], None]:
    return lambda: run(model, texts)


def _draw_texts(case: Case, vocabulary: int) -> list[ScoreRequest]:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, vocabulary, (count,), generator=generator).tolist())

    prompts = [draw(case.prompt) for _ in range(1 if case.shared else case.texts)]
    return [
        ScoreRequest(prompts[number % len(prompts)], draw(case.answer))
        for number in range(case.texts)
    ]


@torch.no_grad()
def _score(model: LanguageModel, texts: Sequence[ScoreRequest]) -> None:
    compute_hidden_states(model, texts)


def _learn(model: LanguageModel, texts: Sequence[ScoreRequest]) -> None:
    compute_hidden_states(model, texts).sum().backward()
    for weight in model.model.parameters():
        weight.grad = None


if __name__ == "__main__":
    main()
