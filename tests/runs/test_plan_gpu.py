"""The plan for one GPU: its bytes are those that the same code allocates on a CPU, and those measured on an H100."""

import gc
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy import command, forked, make_model, toy_recipe, write_recipe

from benchmarks.gpu_models import SHAPES, build_config
from benchmarks.models import build_tokenizer
from practicum.backends.local import (
    device_limits,
    drawing,
    graph,
    loading,
    prepared,
    ranks,
    static,
)
from practicum.backends.local.language_model import Decoding, patch_forwards
from practicum.backends.local.paper import LiveBytes
from practicum.backends.local.static.attention import attend_by_mask
from practicum.costs.workload import GPUS, Gpu
from practicum.errors import ResourceError
from practicum.functional import chunked, products
from practicum.recipe import Recipe, parse_recipe
from practicum.recipe.sections import RolloutConfig
from practicum.runs.assembly import assemble_run
from practicum.runs.plan import plan, planning
from practicum.runs.plan.cluster import parse_gpu
from practicum.training.loop import PhaseTimer, generate_rollouts, score_rollouts, update_student

CARD = GPUS["rtx4090"]
ALPHABET = "abcd" + "".join(map(chr, range(0x4E00, 0x4E00 + 1500)))
H100 = Path(__file__).parents[2] / "results" / "gpu" / "nvidia-h100-80gb-hbm3.json"
SELF = {"type": "privileged", "teacher": {"type": "self", "weights": "frozen"}, "system": "abcd"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        sizes = {"hidden_size": 128, "layers": 2, "heads": 4}
        make_model(folder / name, seed=seed, alphabet=ALPHABET, **sizes)
    return folder


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a GPU's path on the CPU: its limits, the static step, and nothing that only a CPU does."""
    monkeypatch.setattr(device_limits, "ON_CPU", device_limits.size_gpu(CARD.memory))
    monkeypatch.setattr(loading, "choose_decoding", lambda *_: Decoding.MASKED_GRAPH)
    # A flash kernel only allocates its output.
    monkeypatch.setitem(static.ATTENTION, Decoding.MASKED_GRAPH, attend)
    monkeypatch.setattr(ranks, "add_rows_in_place", lambda model: patch_forwards({}))
    monkeypatch.setattr(prepared, "_can_prepack", lambda weight: False)
    monkeypatch.setattr(graph, "MAX_CPU_TOKENS", sys.maxsize)
    monkeypatch.setattr(chunked, "ROWS_IN_CACHE", sys.maxsize)
    monkeypatch.setattr(products, "BLOCK_ROWS", 32)
    monkeypatch.setattr(drawing, "MAX_CACHED_ENTRIES", sys.maxsize)
    build = RolloutConfig.build_sampling_params
    endless = frozenset({-1})
    monkeypatch.setattr(
        RolloutConfig, "build_sampling_params", lambda self, _: build(self, endless)
    )


def attend(queries: torch.Tensor, *places: Any) -> torch.Tensor:
    """Attend with a mask in float32; the flash kernel for bfloat16 only allocates its output."""
    is_flash = queries.dtype == torch.bfloat16
    return queries.clone() if is_flash else attend_by_mask(queries, *places)


def count_bytes(recipe: Recipe, folder: Path) -> dict[str, int]:
    """Return the counted peak of each phase of a second step, and what is held between phases."""
    with LiveBytes(iter(())) as live:
        components = assemble_run(recipe, folder)
        parts, settings = components.parts, components.settings
        peaks: dict[str, int] = {}
        for step in (1, 2):
            work = settings.plan(step)

            def end_phase(name: str) -> None:
                peaks[name] = live.peak
                # A captured step holds no program, but a step that is called again does.
                gc.collect()
                peaks["held"] = live.restart_peak()

            end_phase("")
            held = peaks["held"]
            version = step - 1
            rollouts = generate_rollouts(step, work, parts, settings, parts.sampler, version)
            end_phase("sample")
            datums = score_rollouts(rollouts, work.objective, parts)
            end_phase("score")
            update_student(step, datums, work, parts, settings, PhaseTimer())
            end_phase("update")
            del rollouts, datums
        components.close()
    return {"held": held, **{name: peaks[name] for name in ("sample", "score", "update")}}


CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"student.lora": {"rank": 4}},
    "last layer": {"student.trainable_layers": 1},
    "sampled": {"objective.signal": "sampled"},
    "candidates": {"objective.signal": "topk(4)"},
    "by autograd": {"objective.divergence": "skew_reverse_kl(0.1)"},
    "jsd, layers recomputed": {"objective.divergence": "jsd(0.5)", "backend.graph_mib": 1},
    "micro-batches": {"backend.micro_batch_tokens": 500, "rollout.n": 2},
    "three rows at once": {"backend.sampling_batch": 3},
    "its own teacher": {"teacher": SELF},
    "float32": {"student.dtype": "float32", "teacher.dtype": "float32"},
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.long] * bool(CASES[name])) for name in CASES]
)
def test_planned_bytes_are_those_that_are_allocated(
    models: Path, tmp_path: Path, as_on_gpu: None, case: str
) -> None:
    changes = {
        "student.dtype": "bfloat16",
        "teacher.dtype": "bfloat16",
        "rollout.max_new_tokens": 40,
        "train.prompts_per_step": 24,
    }
    recipe = toy_recipe(models, {**changes, **CASES[case]})
    counted = count_bytes(recipe, tmp_path)
    phases = plan(recipe, gpu=CARD).memory.phases
    shared = phases["sample"].items() & phases["score"].items() & phases["update"].items()
    planned = {name: sum(phases[name].values()) for name in ("sample", "score", "update")}
    planned["held"] = sum(dict(shared).values())
    for name, size in planned.items():
        size -= phases["score"]["CUDA context"]
        assert size == pytest.approx(counted[name], rel=0.05), (name, phases)


@pytest.mark.long
@pytest.mark.parametrize(
    ("pair", "student"), [(("0.6B", "4B"), {}), (("4B", "8B"), {"lora": {"rank": 16}})]
)
def test_planned_peaks_are_those_measured_on_an_h100(
    tmp_path: Path, pair: tuple[str, str], student: dict[str, Any]
) -> None:
    """The measured process counted no context; see `python -m benchmarks gpu`."""
    tokenizer = build_tokenizer(SHAPES["4B"].vocabulary)
    words = sorted(tokenizer.get_vocab())[1000:]
    draw = random.Random(0)
    prompts = [" ".join(draw.choices(words, k=510)) for _ in range(66)]
    lines = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    for name in pair:
        tokenizer.save_pretrained(tmp_path / name)
        build_config(SHAPES[name]).save_pretrained(tmp_path / name)
    recipe = {
        "name": "step",
        "student": {"model": str(tmp_path / pair[0]), **student},
        "teacher": {"type": "model", "model": str(tmp_path / pair[1]), "dtype": "bfloat16"},
        "task": {"type": "jsonl", "path": str(tmp_path / "rows.jsonl"), "heldout": 2},
        "rollout": {"max_new_tokens": 256},
        "train": {"prompts_per_step": 64},
        "backend": {"sampling_batch": 64},
        "evaluation": {"prompts": 0},
    }
    card = Gpu("H100", 1, 1, 1, 85 * 10**9)
    memory = plan(parse_recipe(recipe, "step"), gpu=card).memory
    figures = json.loads(H100.read_text())["measurements"][f"step {' '.join(pair)}"]["figures"]
    planned = memory.peak - memory.phases["update"]["CUDA context"]
    assert planned == pytest.approx(figures["peak_gib"] * 2**30, rel=0.1)


def test_what_does_not_fit_on_a_card_names_the_keys_that_make_it_fit(models: Path) -> None:
    long = {"rollout.max_new_tokens": 400, "train.prompts_per_step": 32}
    whole = plan(toy_recipe(models, long), gpu=CARD)
    assert whole.fits and whole.change is None and whole.limit == CARD.usable_memory
    tight = plan(toy_recipe(models, long), gpu=CARD, limit=whole.memory.peak - 2**20)
    assert not tight.fits
    assert tight.change == (f"backend.micro_batch_tokens={tight.largest_micro_batch}",)
    # The teacher's weights, which only `swap` takes off the card, are all that is too much.
    teacher = {"hidden_size": 256, "layers": 8, "heads": 4}
    make_model(models / "large", seed=3, alphabet=ALPHABET, **teacher)
    heavy = toy_recipe(
        models, {"teacher.model": str(models / "large"), "train.prompts_per_step": 2}
    )
    fits = plan(heavy, gpu=CARD)
    swapped = plan(heavy, gpu=CARD, limit=fits.memory.peak - fits.run.body.update.each)
    assert swapped.change == ("teacher.residency=swap",)


def test_a_student_on_the_cpu_is_not_planned_for_a_card(models: Path) -> None:
    with pytest.raises(ResourceError, match=r"student.device is cpu; remove it, or --gpu"):
        plan(toy_recipe(models, {"student.device": "cpu"}), gpu=CARD)


def test_a_run_on_a_gpu_is_planned_for_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(name="NVIDIA L4", total_memory=23 * 2**30)
    monkeypatch.setattr(planning, "choose_device", lambda recipe: "cuda")
    monkeypatch.setattr(planning, "read_memory_limit", lambda device: 2**34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    found = plan(toy_recipe(models))
    assert found.run.gpu is not None and found.run.gpu.name == "NVIDIA L4"
    assert found.run.record.dtype == "bfloat16" and found.limit == 2**34
    assert found.run.record.chunk_tokens == 1024 and "CUDA context" in found.memory.phases["score"]


def test_the_command_for_a_card(models: Path, tmp_path: Path) -> None:
    recipe, output = str(write_recipe(models, tmp_path / "mine.yaml")), tmp_path / "out.txt"
    assert forked(command("plan", recipe, "--gpu", "RTX4090"), output=output) == 0
    assert "of 20.1 GiB on one rtx4090: it fits" in output.read_text()
    with pytest.raises(ResourceError, match=r"--gpu 'tpu' is not a known GPU; use one of a100, "):
        parse_gpu("tpu")
