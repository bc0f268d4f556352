"""Compare a frozen teacher's scoring with its weights in oneDNN's layout and in torch's: body and head.

    python -m benchmarks layout [--shapes 57m 135m]

The layout is used here on any processor; a run only uses it on AMD processors, where it is faster. Texts are ragged, with a prompt
of 32 tokens and answers of 60 to 140. *Body* is the pass that computes hidden states, *head* the logits of 256 of them into a
buffer, as the loss reads them. Both ways have to give the same states within 1e-4.
"""

from collections.abc import Sequence

import torch

from benchmarks import ceilings, models
from benchmarks.measuring import (
    Session,
    build_parser,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
)
from practicum.backends.local.prepared import MIN_DECODE_STEPS, PrepackedModel
from practicum.objective import Full
from practicum.types import ScoreRequest

LENGTHS = (128, 100, 60, 140, 128, 90, 77, 128)
HEAD_ROWS = 256


def main() -> None:
    """Report one line a shape."""
    parser = build_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", help="models (default 57m and 135m)")
    options = parser.parse_args()
    shapes = options.shapes or (["tiny-teacher"] if options.quick else ["57m", "135m"])
    session = open_session("layout", options, ceilings.measure_briefly())
    for name in shapes:
        _measure(name, session)


def _measure(name: str, session: Session) -> None:
    """Report the line of one shape."""
    shape = models.SHAPES[name]
    model = models.build_language_model(shape)
    sampler = models.build_sampler(model, len(LENGTHS))
    requests = _draw_requests(shape.vocabulary)
    prepacked = PrepackedModel(model, MIN_DECODE_STEPS)

    def score() -> torch.Tensor:
        signals = sampler.score(requests, Full())
        return torch.cat([signal.states for signal in signals if signal.states is not None])

    def score_prepacked() -> torch.Tensor:
        with prepacked.use():
            return score()

    hidden = score()
    torch.testing.assert_close(score_prepacked(), hidden, rtol=1e-4, atol=1e-4)
    rows, head = hidden[:HEAD_ROWS].clone(), model.head().detached()
    room = torch.empty(HEAD_ROWS, shape.vocabulary)
    contenders = {
        "body, torch": build_timer(score),
        "body, layout": build_timer(score_prepacked),
        "head, torch": build_timer(lambda: head.logits(rows, lambda: room)),
        "head, layout": build_timer(lambda: prepacked.head.logits(rows, lambda: room)),
    }
    seconds = interleave(contenders, session.rounds, session.warm_up)
    ratios = {
        part: compute_ratios(seconds[f"{part}, layout"], seconds[f"{part}, torch"])
        for part in ("body", "head")
    }
    rows_shown = [[part, ratio["median"]] for part, ratio in ratios.items()]
    print(format_table([name, "layout / torch"], rows_shown))
    session.report(model=name, tokens=sum(LENGTHS), ratios=ratios)


def _draw_requests(vocabulary: int) -> Sequence[ScoreRequest]:
    generator = torch.Generator().manual_seed(0)
    prompts = models.draw_prompts(len(LENGTHS), vocabulary, 3, 32, 32)
    return [
        ScoreRequest(
            prompt, tuple(torch.randint(2, vocabulary, (length,), generator=generator).tolist())
        )
        for prompt, length in zip(prompts, LENGTHS, strict=True)
    ]
