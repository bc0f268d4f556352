"""The table of checks.

A new check is a function from the evidence to an outcome, and one entry here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from practicum.runs.check_outcome import CheckOutcome
from practicum.studies.doctor import (
    behaviour,
    bits,
    data,
    grades,
    plan,
    setup,
    signal,
    teachability,
)
from practicum.studies.doctor.evidence import Evidence

Role = Literal["setup", "teacher", "start", "change", "note"]
"""The part of a check in the verdict.

setup: a failure is BROKEN-SETUP. teacher: NO-GO, NO-GAP or INCONCLUSIVE. start: a failure is
COLD-START-FIRST. change: a failure is CHANGE-FIRST. note: no influence, for information only. A
warning never decides.
"""

PROPOSED = "proposed here"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its function, its limits for pass, warn and fail, and the evidence behind them.

    `anchor` is a published figure with its arXiv number; `limits_from` names the source of the
    limits.
    """

    id: str
    name: str
    role: Role
    run: Callable[[Evidence], CheckOutcome]
    limits: str
    anchor: str
    limits_from: str = PROPOSED


CHECKS = (
    Check(
        "P1",
        "tokenizer",
        "setup",
        setup.check_vocabulary,
        "the same tokens under the ids that both have, at most 1 % of either's probability on others, "
        "or a translated teacher that can read 99 % of the tokens / more, or fewer / different tokens "
        "under one id",
        "losses on token probabilities need one vocabulary; Qwen3 has four tokens more than Qwen2.5",
        "by definition",
    ),
    Check(
        "P2",
        "stop event",
        "setup",
        setup.check_stop_event,
        "log-probability of any stop token at least -3 nats from the student's / other ids, but "
        "both stop / the student's stop token, or all of them, below 1e-4",
        "a base student under an instruct teacher: stop token at 1.4e-11, truncation to 1.0; as "
        "one event -1.2 nats, truncation to 0.10 (public audit of Qwen3 pairs)",
    ),
    Check(
        "P3",
        "template",
        "change",
        setup.check_template,
        "one template, excess of KL on special tokens below 5 % / else / -",
        "masking special tokens moved an average from 36.4 to 40.7 (2603.25562); a template moved "
        "all benchmarks (2604.13016)",
    ),
    Check(
        "P4",
        "engine parity",
        "setup",
        setup.check_parity,
        "factor up to 1.02 / 1.05 / more",
        "NeMo-RL suspects a bug above 1.05",
        "NeMo-RL's documentation for 1.05; 1.02 proposed here",
    ),
    Check(
        "P5",
        "overlap",
        "start",
        signal.check_overlap,
        "share of the 16 most likely at least 0.70, with mass 0.95 / 0.50, or less mass / less than "
        "0.50",
        "a run that worked went from 0.72 to 0.91, with mass 0.97 to 0.99 in weak runs too "
        "(2604.13016); in one replication the overlap fell while the score rose",
        "0.72 is the only published start; the limits are proposed here",
    ),
    Check(
        "P6",
        "distance",
        "start",
        signal.check_distance,
        "reverse KL up to 0.5 nats per token, at most 1 % of tokens with log T below -10 / up to 3 "
        "nats / more",
        "a bound on a token's loss touched 0.3 % of tokens (public audit of Qwen3 pairs)",
        "proposed here, after a few toy runs (see the log)",
    ),
    Check(
        "P7",
        "depth",
        "change",
        signal.check_depth,
        "agreement at the end at least 0.8 of the agreement at the beginning / less / -",
        "the teacher's advantage fell from +0.37 at 1K tokens to +0.02 at 16K (2604.13016)",
    ),
    Check(
        "P8",
        "loops",
        "change",
        behaviour.check_loops,
        "none / below 30 % / 30 % or more of the answers",
        "0 in healthy runs, 0.3 to 0.6 after collapse (2604.08527); the trap rate, above 60 % in "
        "2606.09471, is only recorded",
    ),
    Check(
        "P9",
        "length",
        "change",
        behaviour.check_length,
        "up to 0.9 cut off, fewer than half end at once, at most half of the teacher's cut off / only the "
        "student's are cut off / else",
        "healthy runs cut off 0.23 to 0.5 of their answers, collapsed ones 0.9 to 1.0 (2604.08527)",
        "2604.08527 for the 0.9; the half is proposed here",
    ),
    Check(
        "P10",
        "capability gap",
        "teacher",
        teachability.check_gap,
        "the interval is above 0 / contains 0: inconclusive / is below 0, or within 0.03 of it, "
        "or KL below 0.001 nats",
        "students recovered 5 to 16 % of the gap to teachers that differ only in size, and 17 to 59 % "
        "for teachers with more training (2604.13016)",
    ),
    Check(
        "P11",
        "informativeness",
        "teacher",
        teachability.check_informativeness,
        "the interval of the AUROC is above 0.5 / contains 0.5: inconclusive / is below 0.5",
        "0.73 for a teacher that failed and 0.75 for one that did not (2604.13016), so a good one "
        "proves little",
    ),
    Check(
        "P12",
        "pass rates",
        "change",
        teachability.check_pass_rates,
        "30 % of the prompts or more are solved sometimes / fewer / none, if only the reward teaches, or one "
        "answer per prompt where answers are compared",
        "weighting by p(1 - p) gave up to +8.2 (2603.11178)",
    ),
    Check(
        "P13",
        "noise",
        "change",
        signal.check_noise,
        "sampled tokens per step times KL / 2 at least 100 / less / -",
        "for small gaps the signal to noise of one sampled token is KL / 2, by expansion",
    ),
    Check(
        "P15",
        "variety",
        "note",
        behaviour.check_variety,
        "recorded",
        "distillation can raise pass@1 and lower pass@32 (2604.10688)",
        "no limit",
    ),
    Check(
        "P16",
        "horizon",
        "note",
        behaviour.check_horizon,
        "256 tokens or more / less / -",
        "short outputs barely benefit over supervised learning (2604.00626)",
    ),
    Check(
        "P17",
        "memory",
        "change",
        plan.check_memory,
        "up to 70 % / 95 % / more of the machine",
        "counted on paper, phase by phase: see docs/plan.md",
    ),
    Check(
        "P18",
        "data",
        "change",
        data.check_data,
        "no row / up to 5 % / more",
        "held-out questions that are trained on measure nothing",
    ),
    Check(
        "P19",
        "settings",
        "change",
        plan.check_settings,
        "temperature 0.7 to 1.3, a rate up to 3 times the rate in the table of settings, and one step changes "
        "a layer's output by less than its size / else / temperature below 0.3 or above 2, a rate over 8 times "
        "or under 1/200 of the table's, one step changes a layer's output by 3 times its size, or all steps "
        "by less than 3 %",
        "the loss is at temperature 1; rates of the 135M model: python -m benchmarks settings; from "
        "scratch, steps of Adam must shrink with a layer's width (2203.03466)",
    ),
    Check(
        "P20",
        "scorers",
        "note",
        grades.check_scorers,
        "the interval of the AUROC is above 0.5, and nothing else moves a judge's grade by 0.1 of "
        "its scale / it is moved / prefers wrong answers",
        "judges in words favour answers by position and by length (2306.05685)",
    ),
    Check(
        "P21",
        "fewer bits",
        "change",
        bits.check_bits,
        "KL up to 0.01 nats per token / 0.1 / more",
        "a student in NVFP4 recovered almost all of its rounding loss by learning from itself in full "
        "precision (2601.20088); no figure is published for a rounded teacher",
    ),
)
"""Every check, in the order of the page and of doctor.json."""
