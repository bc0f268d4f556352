"""Measure four teachers behind a route, with their weights resident, swapped, on disk or over one base: seconds and peak memory.

    python -m benchmarks residency [--teachers 4] [--rollouts 32] [--tokens 128]

Each residency runs in a separate process. *Score* is the teachers' pass over all rollouts. *Read* is the trainer's use of the
answers, teacher by teacher: the full log-probabilities in chunks, after which the head is released.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.measuring import (
    build_parser,
    clear_peak,
    open_session,
    read_memory,
    run_in_process,
    spread,
)
from practicum import functional as F
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.loading import load, load_shared
from practicum.backends.local.residency import build_scorer
from practicum.backends.local.scratch import build_scratch_model
from practicum.models.config import ScorerConfig, ScratchConfig
from practicum.objective import Full
from practicum.ports import Teacher
from practicum.teachers.route import Config, RouteTeacher
from practicum.teaching.client import ClientTeacher
from practicum.types import Message, Prompt, Rollout, TeacherSignal

WIDTH, LAYERS, HEADS, VOCABULARY = 512, 8, 8, 32000
RANK = 16
PROMPT, CHUNK, BATCH, REPEATS = 32, 256, 8, 3
LETTERS = [
    chr(first + place)
    for first, count in ((0x4E00, 20992), (0xAC00, 11172))
    for place in range(count)
]


def main() -> None:
    """Report one line for each residency."""
    parser = build_parser(__doc__)
    parser.add_argument("--teachers", type=int, help="default 4, with --quick 2")
    parser.add_argument("--rollouts", type=int, help="default 32, with --quick 4")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--measure", nargs=2, metavar=("FOLDER", "RESIDENCY"), help="internal: measure one and stop"
    )
    options = parser.parse_args()
    options.teachers = options.teachers or (2 if options.quick else 4)
    options.rollouts = options.rollouts or (4 if options.quick else 32)
    session = open_session("residency", options)
    if options.measure:
        folder, residency = options.measure
        print(
            json.dumps(
                _measure(
                    Path(folder), residency, options.teachers, options.rollouts, options.tokens
                )
            )
        )
        return
    sizes = [
        "--teachers",
        options.teachers,
        "--rollouts",
        options.rollouts,
        "--tokens",
        options.tokens,
    ]
    with tempfile.TemporaryDirectory() as folder:
        mib = sum(_make(Path(folder) / str(number), number) for number in range(options.teachers))
        _make_adapters(Path(folder), options.teachers)
        for residency in ("resident", "swap", "disk", "shared"):
            session.report(
                residency=residency,
                teachers=options.teachers,
                weights_mib=round(mib, 1),
                rollouts=options.rollouts,
                tokens=options.tokens,
                **run_in_process("benchmarks.residency", "--measure", folder, residency, *sizes),
            )


def _make(folder: Path, seed: int) -> float:
    """Write one teacher; the size of its weights in MiB."""
    scratch = ScratchConfig(
        hidden_size=WIDTH, layers=LAYERS, heads=HEADS, padded_vocabulary=VOCABULARY, seed=seed
    )
    build_scratch_model(folder, scratch, "".join(LETTERS[: VOCABULARY - 7]), [])
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20


def _make_adapters(folder: Path, count: int) -> None:
    """Write adapters over the first teacher, so that as many teachers share one base."""
    for number in range(count):
        base = AutoModelForCausalLM.from_pretrained(folder / "0", dtype=torch.float32)
        adapter = folder / "shared" / str(number)
        torch.manual_seed(number)
        # Random in both factors: an adapter that has learned nothing would change no weight.
        settings = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(base, settings).save_pretrained(str(adapter))


def _measure(
    folder: Path, residency: str, teachers: int, rollouts: int, tokens: int
) -> dict[str, object]:
    """Seconds of the two passes, and MiB above the bare process: at the peak, and held between the steps."""
    before = read_memory("VmRSS")
    start = time.perf_counter()
    teacher = _build_route(folder, residency, teachers)
    load_seconds = time.perf_counter() - start
    items = _make_rollouts(rollouts, tokens, teachers)
    clear_peak()
    score, read = [], []
    for _ in range(REPEATS):
        start = time.perf_counter()
        signals = teacher.score(items, Full())
        score.append(time.perf_counter() - start)
        start = time.perf_counter()
        _read(signals)
        read.append(time.perf_counter() - start)
        del signals
    return {
        "load_seconds": round(load_seconds, 2),
        "score_seconds": spread(score),
        "read_seconds": spread(read),
        "peak_mib": round(read_memory("VmHWM") - before, 1),
        "held_mib": round(read_memory("VmRSS") - before, 1),
    }


def _build_route(folder: Path, residency: str, teachers: int) -> Teacher:
    members: dict[str, Teacher] = {}
    bases: dict[tuple[object, ...], LanguageModel] = {}
    folder = folder / "shared" if residency == "shared" else folder
    for number in range(teachers):
        config = ScorerConfig(model=str(folder / str(number)), residency=residency)  # type: ignore[arg-type]
        loaded = load_shared(config, bases) if residency == "shared" else load(config)
        members[str(number)] = ClientTeacher(
            build_scorer(loaded, config, BATCH, CHUNK), loaded.renderer
        )
    return RouteTeacher(
        members, Config.model_validate({"teachers": dict.fromkeys(members, "none")})
    )


def _make_rollouts(count: int, tokens: int, teachers: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    items = []
    for number in range(count):
        letters = [
            LETTERS[place]
            for place in torch.randint(20000, (PROMPT,), generator=generator).tolist()
        ]
        prompt = Prompt(
            str(number), (Message("user", "".join(letters)),), domain=str(number % teachers)
        )
        nothing = torch.zeros(tokens)
        items.append(
            Rollout(
                prompt=prompt,
                prompt_tokens=(0,),
                tokens=torch.randint(7, VOCABULARY, (tokens,), generator=generator),
                loss_mask=torch.ones(tokens, dtype=torch.bool),
                sampling_logprobs=nothing,
                policy_logprobs=nothing,
                policy_version=0,
                stop_reason="length",
                text="",
            )
        )
    return items


def _read(signals: Sequence[TeacherSignal]) -> None:
    """Read all that was said, teacher by teacher."""
    for name in sorted({signal.name for signal in signals}):
        group = [signal for signal in signals if signal.name == name]
        head = group[0].head
        assert head is not None
        hidden = torch.cat([signal.states for signal in group if signal.states is not None])
        for part in F.chunks(len(hidden), CHUNK):
            head.logprobs(hidden[part])
        head.release()


if __name__ == "__main__":
    main()
