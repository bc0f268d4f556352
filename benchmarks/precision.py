"""Measure a quantized teacher: seconds of its body and the effect of rounding on the gradient, on SmolLM2-135M.

    python -m benchmarks precision [--tokens 512]

*float32* is the baseline, *bfloat16* is a teacher with `dtype: bfloat16`, and *int8* rounds the weights of every linear map to
eight bits per row and its inputs to eight bits per call. The error is measured in the gradient of reverse KL in the logits of a
student half a logit from the teacher, and as the forward KL from the float32 teacher, in nats per token.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import ceilings
from benchmarks.measuring import (
    build_parser,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    round_digits,
    spread,
)
from practicum import functional as F
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import load
from practicum.backends.local.packing import compute_hidden_states
from practicum.models.config import ScorerConfig
from practicum.types import ScoreRequest

MODEL, DISTANCE = "smollm2-135m-instruct", 0.5
TEXT = (
    "The sea covers most of the surface of the Earth. Rivers run into it, and winds move over it. A child will say that it is "
    "blue; a sailor will say that it is never the same. Seven times eight is fifty-six, and the capital of France is Paris. "
)


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--tokens", type=int, help="of the text (default 512, with --quick 64)")
    options = parser.parse_args()
    count = options.tokens or (64 if options.quick else 512)
    session = open_session("precision", options, ceilings.measure_briefly())
    full = load(ScorerConfig(model=MODEL, device="cpu"))
    rounded = load(ScorerConfig(model=MODEL, device="cpu", dtype="bfloat16")).language_model
    eighth = load(ScorerConfig(model=MODEL, device="cpu")).language_model
    _round_to_int8(eighth)
    tokens = tuple((full.renderer.encode(TEXT) * (1 + count // 40))[: count + 8])
    text = [ScoreRequest(tokens[:8], tokens[8:])]
    models = {"float32": full.language_model, "bfloat16": rounded, "int8": eighth}
    works = {name: _prepare_pass(model, text) for name, model in models.items()}
    errors = _measure_errors({name: work() for name, work in works.items()}, full.language_model)
    times = interleave(
        {name: build_timer(work) for name, work in works.items()}, session.rounds, session.warm_up
    )
    rows = [
        [
            name,
            spread(values)["median"],
            compute_ratios(values, times["float32"])["median"],
            *errors[name].values(),
        ]
        for name, values in times.items()
    ]
    print(format_table(["teacher", "s", "/ float32", "error of the gradient", "KL"], rows))
    session.report(
        {},
        model=MODEL,
        tokens=count,
        seconds={name: spread(values) for name, values in times.items()},
        of_float32={
            name: compute_ratios(values, times["float32"]) for name, values in times.items()
        },
        errors=errors,
    )


def _prepare_pass(model: LanguageModel, text: list[ScoreRequest]) -> Callable[[], Tensor]:
    @torch.no_grad()
    def run_pass() -> Tensor:
        return compute_hidden_states(model, text).float()

    return run_pass


@torch.no_grad()
def _measure_errors(states: dict[str, Tensor], model: LanguageModel) -> dict[str, dict[str, float]]:
    head = model.head().detached()
    exact = head.logprobs(states["float32"])
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0))
    student = torch.log_softmax(exact + DISTANCE * noise, dim=-1)

    def compute_gradient(teacher: Tensor) -> Tensor:
        ratio = student - teacher
        return student.exp() * (ratio - (student.exp() * ratio).sum(dim=-1, keepdim=True))

    errors = {}
    for name, hidden in states.items():
        teacher = head.logprobs(hidden)
        error = (compute_gradient(teacher) - compute_gradient(exact)).norm() / compute_gradient(
            exact
        ).norm()
        divergence = F.forward_kl(teacher, exact).mean()
        errors[name] = {
            "gradient": round_digits(error.item()),
            "forward_kl": round_digits(divergence.item()),
        }
    return errors


def _round_to_int8(model: LanguageModel) -> None:
    torch.backends.quantized.engine = "onednn"
    for layer in model.model.base_model.modules():
        if type(layer) is torch.nn.Linear:
            weight = layer.weight.detach()
            scales = weight.abs().amax(dim=1).clamp_min(1e-9) / 127
            zeros = torch.zeros(len(scales), dtype=torch.int64)
            packed = torch.ops.quantized.linear_prepack(
                torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8), layer.bias
            )
            layer.__dict__["forward"] = lambda rows, packed=packed: (
                torch.ops.quantized.linear_dynamic(rows, packed)
            )


if __name__ == "__main__":
    main()
