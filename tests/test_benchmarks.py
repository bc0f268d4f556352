"""The benchmarks count correctly, report missing parts, and their page shows the recorded results."""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import networkx
import pytest
from pydantic import BaseModel

from benchmarks import __main__ as dispatcher
from benchmarks import (
    alarms,
    ceilings,
    credit,
    digests,
    end_to_end,
    goals,
    gpu,
    gpu_models,
    gpu_parts,
    gpu_profile,
    gpu_trl,
    measuring,
    models,
    page,
    papers,
    peers,
    rollout,
    wheels,
)
from benchmarks.structure import (
    build_import_graph,
    count_statements,
    count_structural_types,
    find_longest_chain,
)
from practicum.core.plugins import list_plugins
from practicum.errors import PracticumError
from practicum.objective import SIGNALS
from practicum.recipe import build_control, load_recipe
from practicum.rollouts.annotating import NOTE_KINDS
from practicum.rollouts.source import SOURCES

READING = {"median": 1.2, "least": 1.1, "greatest": 1.3, "spread": 0.1, "count": 5}


def test_spread_is_the_median_with_its_ends():
    assert measuring.spread([3.0, 1.0, 2.0]) == {
        "median": 2.0,
        "least": 1.0,
        "greatest": 3.0,
        "spread": 1.0,
        "count": 3,
    }


def test_ratios_are_of_the_same_round():
    found = measuring.compute_ratios([2.0, 6.0, 8.0], [1.0, 2.0, 2.0])
    assert (found["median"], found["least"], found["greatest"], found["count"]) == (
        3.0,
        2.0,
        4.0,
        3,
    )


@pytest.mark.parametrize(("power", "factor"), [(1.0, 3.0), (2.0, 0.5), (0.0, 7.0), (-1.0, 1.0)])
def test_exponent_finds_the_power(power: float, factor: float):
    sizes = [1, 2, 4, 8]
    assert measuring.fit_exponent(sizes, [factor * size**power for size in sizes]) == pytest.approx(
        power, abs=1e-12
    )


def test_rounds_are_interleaved_there_and_back():
    calls: list[str] = []

    def contender(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    kept = measuring.interleave(
        {name: lambda name=name: contender(name) for name in "ABC"}, rounds=2, warm_up=1
    )
    assert "".join(calls) == "ABCCBAABC"
    assert kept == {"A": [6.0, 7.0], "B": [5.0, 8.0], "C": [4.0, 9.0]}


def test_a_recorded_command_names_no_folder_of_this_machine():
    given = [
        "--peer",
        "trl",
        "--peer-python",
        "/some/where",
        "--record",
        "--peer-python=/else/where",
        "--quick",
    ]
    assert measuring.strip_local_options(given) == ["--peer", "trl", "--quick"]


def test_scaled_changes_the_unit_and_not_the_spread():
    assert measuring.scale_reading(READING, 10) == {
        **READING,
        "median": 12.0,
        "least": 11.0,
        "greatest": 13.0,
    }


@pytest.mark.parametrize(
    ("median", "least", "greatest", "spread", "said"),
    [
        (1.2, 1.1, 1.3, 0.1, "pass"),
        (1.4, 1.3, 1.5, 0.1, "pass in its best round only"),
        (1.5, 1.4, 1.6, 0.1, "fail"),
        (1.3, 1.0, 1.6, 0.5, "pass, but void: the rounds differ by 50%"),
        (0.5, 0.1, 1.3, 2.4, "pass"),
    ],
)
def test_verdicts(median: float, least: float, greatest: float, spread: float, said: str):
    reading = {"median": median, "least": least, "greatest": greatest, "spread": spread, "count": 5}
    assert goals.judge_goal(goals.Goal("x", "", "most", 1.35), reading) == said


def test_a_goal_between_two_bounds():
    goal = goals.Goal("x", "", "between", 0.95, 1.05)
    assert [goal.accepts(value) for value in (0.9, 0.95, 1.0, 1.05, 1.1)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert goal.bound == "0.95 to 1.05"


def test_a_floor_is_the_slower_of_arithmetic_and_reading():
    limits = {"gflops": 50.0, "read_gb": 10.0}
    assert ceilings.compute_floor(1e9, 1e6, limits) == pytest.approx(0.02)
    assert ceilings.compute_floor(1e6, 1e9, limits) == pytest.approx(0.1)


def test_slots_cannot_be_busier_than_the_longest_answer_allows():
    assert models.compute_refill_bound([4, 4, 4, 4], 2) == 1.0
    assert models.compute_refill_bound([8, 1, 1], 2) == 10 / 16
    assert models.count_batch_steps([8, 1, 1, 2], 2) == 10


def test_stop_tokens_are_few_and_none_is_padding():
    stops = models.draw_stops(4096, 64)
    assert len(stops) == 64 and min(stops) > 1 and max(stops) < 4096


@pytest.mark.parametrize("name", ["tiny", "toy"])
def test_shapes_count_their_parameters(name: str):
    shape = models.SHAPES[name]
    assert (
        sum(weight.numel() for weight in models.build_causal_lm(shape).parameters())
        == shape.body + shape.head
    )


def test_words_are_read_as_their_tokens():
    assert models.build_tokenizer(32)(models.render_words([2, 31, 7]))["input_ids"] == [2, 31, 7]


def test_answers_end_with_their_stop_token():
    torch = pytest.importorskip("torch")
    answers = torch.tensor([[5, 9, 0, 0], [5, 5, 5, 5]])
    assert rollout._count_lengths(answers, frozenset({9})) == [2, 4]


def test_a_missing_peer_is_named_with_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    peers._read_version.cache_clear()
    monkeypatch.setitem(peers.PACKAGES, "trl", ("no_such_module", "trl>=1.16,<1.17"))
    assert peers.find_installed(["trl"], sys.executable) == []
    peers._read_version.cache_clear()
    assert capsys.readouterr().out == (
        "trl is not installed, so it is left out: pip install -e '.[peers]' (or 'trl>=1.16,<1.17'), or name another "
        "environment with --peer-python PATH\n"
    )


def test_a_python_that_is_not_there_is_an_error():
    with pytest.raises(SystemExit, match="--peer-python /no/such/python: No such file"):
        peers.find_installed(["trl"], "/no/such/python")


def test_every_benchmark_is_listed_with_a_line():
    listed = dispatcher.describe_benchmarks()
    for name in dispatcher.list_benchmarks():
        assert f"  {name} " in listed and len(dispatcher.read_headline(name)) > 20
    assert "Example: `python -m benchmarks" in listed


def test_an_unknown_name_says_which_there_are():
    ended = _run("rolout")
    assert (
        ended.returncode == 1
        and "no benchmark is named 'rolout'; there are ceilings, loss" in ended.stderr
    )


def test_a_whole_log_ratio_alone_is_a_gradient(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["credit", "--quick"])
    credit.main()
    lines = capsys.readouterr().out.splitlines()
    errors = {line.split()[0]: float(line.split()[-1]) for line in lines[2:5]}
    assert errors["whole"] < 1e-9 and min(errors["even"], errors["surprise"]) > 0.4
    assert "a merged row sums to 0." in lines[-1]


def _pair(seed: int, here: float, trl: float) -> end_to_end.Pair:
    before, both = {"reverse_kl": 2.0, "accuracy": 0.1}, {"accuracy": 0.9}
    return end_to_end.Pair(
        "mixed", seed, before, {"reverse_kl": here, **both}, {"reverse_kl": trl, **both}
    )


def test_two_libraries_agree_if_the_seeds_do_not_tell_them_apart():
    near = [_pair(0, 0.20, 0.22), _pair(1, 0.31, 0.28), _pair(2, 0.25, 0.26)]
    far = [_pair(0, 0.20, 0.30), _pair(1, 0.31, 0.42), _pair(2, 0.25, 0.34)]
    assert [row[-1] for row in end_to_end.list_rows(near)] == ["yes", "yes"]
    assert end_to_end.list_rows(far)[0] == [
        *("mixed", "reverse kl", "2.000", "0.253", "0.353"),
        *("-0.100", "[-0.125, -0.075]", "no"),
    ]


def test_the_recorded_runs_agree_with_those_of_trl():
    record = json.loads(end_to_end.RECORD.read_text(encoding="utf-8"))
    pairs = [end_to_end.Pair(**pair) for pair in record["pairs"]]
    assert record["steps"] >= 100
    for mode in end_to_end.MODES:
        assert sum(pair.mode == mode for pair in pairs) >= 5
    assert {row[-1] for row in end_to_end.list_rows(pairs)} == {"yes"}


@pytest.mark.slow
def test_a_student_of_this_library_is_compared_with_one_of_trl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("trl")
    monkeypatch.setattr(sys, "argv", ["end_to_end", "--quick", "--modes", "on-policy"])
    end_to_end.main()
    assert "reverse kl" in capsys.readouterr().out


@pytest.mark.long
def test_the_cheapest_one_runs():
    ended = _run("ceilings", "--quick")
    line = json.loads(ended.stdout.splitlines()[-1])
    assert line["benchmark"] == "ceilings" and line["gflops"]["1024x1024x1024"]["median"] > 0


@pytest.mark.long
def test_a_tiny_run_has_the_digests_that_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["digests", "--quick"])
    digests.main()
    line = json.loads(capsys.readouterr().out)
    assert line["run"] == "plain" and len(line["checkpoint"]) == 64 and line["gradient_norm"] > 0
    path = tmp_path / "before.txt"
    monkeypatch.setattr(sys, "argv", ["digests", "--quick", "--against", str(path)])
    path.write_text(json.dumps(line) + "\n")
    digests.main()
    path.write_text(json.dumps(line | {"checkpoint": "0" * 64}) + "\n")
    with pytest.raises(SystemExit) as ended:
        digests.main()
    assert ended.value.code == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["plain", "checkpoint", "0" * 12, line["checkpoint"][:12]]


def _list_types(section: object) -> set[str]:
    """Return the types of a section of a recipe and of all sections inside it."""
    if isinstance(section, BaseModel):
        fields = dict(section)
        return {str(fields.get("type"))}.union(*map(_list_types, fields.values()))
    entries = section.values() if isinstance(section, dict) else section
    return (
        set().union(*map(_list_types, entries))
        if isinstance(entries, Iterable) and not isinstance(entries, str)
        else set()
    )


@pytest.mark.long
def test_every_part_has_a_tiny_run():
    """Check that the digests of runs cover all sources, signals, scorers, notes and kinds of teachers."""
    found: dict[str, set[str]] = {}
    for name in digests.list_runs(None):
        recipes = digests.build_recipes(name)
        for recipe in recipes:
            sections = {
                "source": recipe.rollout.source,
                "signal": [term.signal for term in recipe.objective.losses],
                "scorers": recipe.scorers,
                "notes": recipe.notes,
                "teachers": [recipe.teacher, recipe.reference],
            }
            for axis, section in sections.items():
                found.setdefault(axis, set()).update(_list_types(section))
    expected = {
        "source": set(list_plugins(SOURCES)),
        "signal": set(list_plugins(SIGNALS)),
        "scorers": set(list_plugins("scorers")),
        "notes": set(list_plugins(NOTE_KINDS)),
        "teachers": set(list_plugins("teachers")),
    }
    missing = {axis: kinds - found[axis] for axis, kinds in expected.items()}
    assert not any(missing.values()), missing


def test_digests_of_other_processors_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "digests.jsonl"
    path.write_text(json.dumps({"run": "plain", "machine": "another", "checkpoint": "a"}) + "\n")
    assert digests.read(path) == {}
    monkeypatch.setattr(sys, "argv", ["digests", "--quick", "--against", str(path)])
    with pytest.raises(SystemExit, match=r"no digests of this processor, .*before the change"):
        digests.main()


def test_what_was_not_there_before_differs():
    now = {"run": "plain", "metrics.jsonl": "a", "checkpoint": "b"}
    assert digests.find_differences([now], {"plain": now}) == []
    assert digests.find_differences([now], {"plain": {"run": "plain", "checkpoint": "c"}}) == [
        ["plain", "metrics.jsonl", "-", "a"],
        ["plain", "checkpoint", "c", "b"],
    ]
    assert [row[2] for row in digests.find_differences([now], {})] == ["-", "-", "-"]


def test_what_holds_no_digests_is_refused(tmp_path: Path):
    path = tmp_path / "other.txt"
    for text in ("no JSON", "[1]", '{"other": 1}', "3"):
        path.write_text(text)
        with pytest.raises(SystemExit, match=r"other.txt holds no digests .*; write the output of"):
            digests.read(path)


def test_without_a_gpu_it_says_so_and_how_to_run_the_tiny_form(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main()
    assert capsys.readouterr().out == f"{gpu.NOTHING}\n"
    assert "--quick" in gpu.NOTHING


def run_gpu(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    """Run the benchmark of a GPU in this process, on the CPU."""
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    gpu.main()


def test_the_tiny_form_of_the_gpu_benchmark_measures_every_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run_gpu(monkeypatch, "--quick")
    output = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in output if line.startswith("{")]
    assert [line["measurement"] for line in lines] == [part.name for part in gpu.list_quick()]
    assert all(line["failed"] is None and line["figures"] for line in lines)
    loss, step = lines[1]["figures"], lines[-1]["figures"]
    assert loss["loss_error"] < gpu_parts.TOLERANCE and loss["of_products"] > 0
    shares = (step["sample_share"], step["score_share"], step["update_share"])
    assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    groups = {part.group for part in gpu.list_measurements()}
    assert groups == {part.group for part in gpu.list_quick()}


def test_trls_steps_stand_beside_the_gpus_and_a_failure_of_one_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """The process of TRL is a double here: the first trainer lacks memory."""
    jobs = []

    def answer(module: str, path: Path, *, python: str) -> dict:
        jobs.append(json.loads(path.read_text()))
        if jobs[-1]["trainer"] == "gkd":
            raise SystemExit("python -m benchmarks.step_trl: exit 1: ...\nCUDA out of memory")
        assert (Path(jobs[-1]["student"]) / "tokenizer.json").is_file()
        return {"seconds": [1.0, 3.0], "tokens": [20, 60], "sample": [0.5, 1.5], "peak_mib": 512}

    monkeypatch.setattr(gpu_trl, "run_in_process", answer)
    monkeypatch.setattr(gpu.peers, "find_installed", lambda names, python: names)
    monkeypatch.setattr(gpu, "list_quick", lambda: iter(()))
    with pytest.raises(SystemExit, match=r"^failed: step trl gkd$"):
        run_gpu(monkeypatch, "--quick", "--only", "step", "--peer-python", "python-with-trl")
    output = capsys.readouterr().out.splitlines()
    first, second = [json.loads(line) for line in output if line.startswith("{")]
    assert (first["failed"], first["figures"]) == ("CUDA out of memory", {})
    assert second["figures"] == {
        "tokens_per_second": 20.0,
        "seconds": 2.0,
        "sample_share": 0.5,
        "peak_gib": 0.5,
    }
    assert [job["trainer"] for job in jobs] == list(gpu_trl.TRAINERS)
    assert all(len(job["prompts"]) % job["batch"] == 0 for job in jobs)


def test_a_gpu_run_keeps_its_lines_when_it_is_cut_or_a_part_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """First the second part interrupts the run; then two parts fail and all other parts are measured."""

    def stop(bench: gpu_parts.Bench, ceilings: object) -> gpu_parts.Figures:
        raise KeyboardInterrupt

    def fill(bench: gpu_parts.Bench, ceilings: object) -> gpu_parts.Figures:
        raise gpu.torch.OutOfMemoryError("CUDA out of memory\nlong text")

    def refuse(bench: gpu_parts.Bench, ceilings: object) -> gpu_parts.Figures:
        raise RuntimeError("self dtype must match mat1 dtype")

    first = gpu.Measurement("ceilings", "ceilings", lambda b, c: {"copy_gb": 2.0})
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda: "A GPU 80GB")
    monkeypatch.setattr(gpu.torch.cuda, "empty_cache", lambda: None)
    # It also adds lines to the page of performance, which another test covers.
    monkeypatch.setattr(gpu, "open_session", lambda name, options: measuring.Session(name))
    monkeypatch.setattr(sys, "argv", ["gpu", "--record", "--folder", str(tmp_path)])
    monkeypatch.setattr(
        gpu, "list_measurements", lambda: iter([first, gpu.Measurement("step", "step", stop)])
    )
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    record = gpu.read_record(tmp_path / "a-gpu-80gb.json")
    assert list(record["measurements"]) == ["ceilings"]
    assert record["measurements"]["ceilings"]["figures"] == {"copy_gb": 2.0}
    faster = gpu.Measurement("ceilings", "ceilings", lambda b, c: {"copy_gb": 3.0})
    parts = [
        faster,
        gpu.Measurement("step", "step", fill),
        gpu.Measurement("update", "update", refuse),
        gpu.Measurement("score", "score", lambda b, c: {"peak_gib": 1.0}),
    ]
    monkeypatch.setattr(gpu, "list_measurements", lambda: iter(parts))
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^failed: step, update$"):
        gpu.main()
    printed = capsys.readouterr().out
    assert ["copy_gb", "3", "2", "1.5"] in [line.split() for line in printed.splitlines()]
    assert "in refuse" in printed, "the traceback of a failed part is printed"
    done = gpu.read_record(tmp_path / "a-gpu-80gb.json")["measurements"]
    assert done["step"]["failed"] == "CUDA out of memory"
    assert done["update"]["failed"] == "self dtype must match mat1 dtype"
    assert done["score"]["figures"] == {"peak_gib": 1.0}


def test_the_profile_of_a_gpu_goes_through_every_phase(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["gpu_profile", "--quick"])
    monkeypatch.setattr(gpu_profile.torch.cuda, "is_available", lambda: False)
    gpu_profile.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [json.loads(line)["phase"] for line in lines] == ["sample", "score", "update"]


def test_only_packages_that_a_gpu_machine_lacks_are_downloaded(tmp_path: Path):
    path = tmp_path / "there.json"
    names = {row.partition("==")[0] for row in wheels.find_missing({}, "3.12")}
    assert {"pydantic", "pydantic-core", "transformers", "beartype"} <= names
    assert not names & {"torch", "triton", "practicum"}
    path.write_text(json.dumps([{"name": name, "version": "0.0"} for name in names]))
    installed = wheels.read_installed(path)
    assert "pydantic" in {row.partition("==")[0] for row in wheels.find_missing(installed, "3.12")}
    fitting = installed | {"pydantic": "2.12.0"}
    found = {row.partition("==")[0] for row in wheels.find_missing(fitting, "3.12")}
    assert not found & {"pydantic", "pydantic-core"}
    path.write_text("no JSON")
    with pytest.raises(SystemExit, match=r"there.json is not the output of pip list"):
        wheels.read_installed(path)


def test_the_shapes_of_a_gpu_run_are_those_of_qwen3():
    """Count parameters as the model cards do: with the embedding, tied or not."""
    billions = {
        name: (shape.body + shape.head * (1 if shape.tied else 2)) / 1e9
        for name, shape in gpu_models.SHAPES.items()
    }
    expected = {"0.6B": 0.596, "1.7B": 1.72, "4B": 4.02, "8B": 8.19}
    assert {name: billions[name] for name in expected} == pytest.approx(expected, rel=0.01)


def test_the_page_shows_what_was_recorded():
    said = page.PAGE.read_text(encoding="utf-8")
    assert said == page.fill_page(said, page.read(page.LINES)), (
        "docs/performance.md is out of date; run: python -m benchmarks page"
    )


def test_the_plots_are_of_what_was_recorded():
    for plot in page.build_plots(page.read(page.LINES)):
        assert plot.digest in plot.path.read_text(encoding="utf-8"), (
            "run: python -m benchmarks page"
        )


def test_the_page_takes_the_newest_reading_and_no_quick_one(tmp_path):
    lines = [_line(1.9), _line(1.2), {**_line(0.5), "quick": True}]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    said = page.render_results(page.read(path))
    assert "| 1.2 | ≤ 1.35 | **pass** | 1.1 to 1.3 (5) | [1] |" in said
    assert f"Of {len(goals.BY_KEY)} goals: 1 pass, {len(goals.BY_KEY) - 1} not measured." in said
    assert "`python -m benchmarks loss`, T = 2,048, V = 49,152" in said


def test_a_measurement_of_some_contenders_hides_none_of_all():
    full = {**_line(1.9), "seconds": {"reverse_kl": READING, "trl": READING}}
    full["peak_mib"] = {"reverse_kl": 150.0, "trl": 900.0}
    partial, later = _line(1.2), {**full, "peak_mib": {"reverse_kl": 140.0, "trl": 800.0}}
    for lines, trl in (((full, partial), 900.0), ((full, partial, later, partial), 800.0)):
        plots = {plot.name: plot for plot in page.build_plots(lines)}
        assert plots["loss-memory"].series["trl"] == [(2048, trl)]
        assert page.find_latest(lines)["loss.products.49152"] is partial


def _line(median: float) -> dict:
    return {
        "benchmark": "loss",
        "quick": False,
        "command": "python -m benchmarks loss",
        "tokens": 2048,
        "vocabulary": 49152,
        "widths": [256, 512],
        "seconds": {"reverse_kl": READING},
        "peak_mib": {"reverse_kl": 150.0},
        "readings": {"loss.products.49152": {**READING, "median": median}},
        "ceilings": {"gflops": 80.0, "read_gb": 15.0},
        "machine": {
            "processor": "one",
            "cores": 2,
            "threads": 1,
            "python": "3",
            "torch": "2",
            "transformers": "5",
        },
        "load": [0.1, 0.2],
        "commit": "abc",
        "time": "2026-01-01T00:00:00Z",
    }


def _run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=measuring.ROOT,
        env=measuring.build_environment(),
    )


def test_a_controls_line_stands_whatever_its_teacher_saw_and_its_recipe_says() -> None:
    fingerprints = set()
    for changes in (
        [],
        ["teacher.reference=Think of {answer}.", "claim=none", "name=other"],
        ["train.threads=2"],
    ):
        control = build_control(load_recipe("papers/rlsd", changes))
        assert control is not None
        fingerprints.add(papers.fingerprint(control))
    changed = build_control(load_recipe("papers/rlsd", ["train.steps=9"]))
    assert changed is not None
    assert len(fingerprints) == 1 and papers.fingerprint(changed) not in fingerprints


def test_a_new_setting_does_not_make_the_measured_lines_stale() -> None:
    """Explain a failure: one stale line is a changed recipe; many are a renamed or added setting, and the lines are carried."""
    lines = [line for (off, _), line in papers.read_lines().items() if not off][::9]
    stale = [
        line["recipe"]
        for line in lines
        if papers.fingerprint(load_recipe(line["recipe"])) != line["of"]
    ]
    assert len(stale) <= len(lines) // 2, (
        f"carry the lines: python -m benchmarks papers --carry REVISION; stale: {stale}"
    )


def test_runs_of_single_kinds_are_those_of_all_kinds() -> None:
    alone = [number for kind in alarms.KINDS for number in alarms.list_numbers(30, [kind])]
    assert sorted(alone) == alarms.list_numbers(30, alarms.KINDS) == list(range(30))


def test_what_joins_a_reward_and_a_teacher_is_measured_without_the_teacher_too() -> None:
    lines = papers.read_lines()
    off = {line["of"]: line["seeds"] for (is_off, _), line in lines.items() if is_off}
    for (is_off, name), line in lines.items():
        control = build_control(recipe := load_recipe(name))
        is_stale = papers.fingerprint(recipe) != line["of"]
        # One seed does not show what a teacher adds, with or without a control.
        if is_off or is_stale or control is None or len(line["seeds"]) == 1:
            continue
        assert off.get(papers.fingerprint(control)) == line["seeds"], name


def test_a_recipe_that_fails_does_not_lose_the_recipes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, off: bool, seeds: Sequence[int]) -> dict[str, Any]:
        if name == "papers/gkd":
            raise PracticumError(f"{name}: exit 10")
        return {"recipe": name, "seeds": seeds}

    monkeypatch.setattr(papers, "measure_recipe", measure)
    monkeypatch.setattr(papers, "LINES", tmp_path / "papers.jsonl")
    names = ["gkd", "sft", "seqkd"]
    monkeypatch.setattr(sys, "argv", ["papers", *names, "--only", "recipes", "--jobs", "1"])
    with pytest.raises(SystemExit, match="failed: papers/gkd"):
        papers.main()
    assert "1 of 3: papers/gkd: exit 10" in capsys.readouterr().err
    assert [line["recipe"] for line in papers.read_lines().values()] == [
        "papers/seqkd",
        "papers/sft",
    ]


def test_the_line_of_a_drafter_has_its_tokens_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def summarize(seed: int, drafts: bool) -> dict[str, Any]:
        accuracy, calls = {"mean": 0.5, "low": 0.4, "high": 0.6}, 1.5 + 0.5 * seed
        before = {"accuracy": accuracy, **({"drafts/tokens_per_call": 1.25} if drafts else {})}
        after = {"accuracy": accuracy, **({"drafts/tokens_per_call": calls} if drafts else {})}
        gain = {"mean": 0.0, "low": -0.1, "high": 0.1}
        return {"before": before, "after": after, "gain": gain, "teacher": None, "seconds": 1.0}

    keys = ("tokens_per_call_before", "tokens_per_call_after")
    for name in ("papers/eagle-3", "papers/gkd"):
        is_drafter = name == "papers/eagle-3"
        run_seed = lambda _name, _off, seed: summarize(seed, is_drafter)  # noqa: E731, B023
        monkeypatch.setattr(papers, "_run_seed", run_seed)
        line = papers.measure_recipe(name, False, [0, 1])
        assert [line.get(key) for key in keys] == ([1.25, 1.75] if is_drafter else [None, None])


def test_a_control_that_two_recipes_have_is_measured_once() -> None:
    assert papers.find_different_controls(
        ["papers/gkd", "papers/rlsd", "papers/slime", "papers/srpo"]
    ) == [
        "papers/rlsd",
        "papers/slime",
    ]


def test_lines_of_controls_have_places_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "LINES", tmp_path / "papers.jsonl")
    for line in (
        {"recipe": "papers/b", "teacher": "off", "of": "1"},
        {"recipe": "papers/c", "of": "2"},
        {"recipe": "papers/b", "of": "3"},
        {"recipe": "papers/b", "teacher": "off", "of": "4"},
    ):
        papers.keep(line)
    assert [line["of"] for line in map(json.loads, papers.LINES.read_text().splitlines())] == [
        "3",
        "2",
        "4",
    ]


def test_the_longest_chain_of_imports_counts_the_files_of_a_cycle() -> None:
    graph = networkx.DiGraph([("a", "b"), ("b", "c"), ("b", "d"), ("c", "b"), ("e", "d")])
    assert find_longest_chain(graph) == ["a", "b", "c", "d"]


def test_imports_inside_functions_count_and_those_for_types_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "counted_package"
    folder.mkdir()
    texts = {
        "__init__": "import counted_package.q\n\ndef load():\n    from counted_package.r import R\n",
        "q": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from counted_package import r\n",
        "r": 'from typing import Protocol\n\nclass R(Protocol):\n    "R."\n',
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    edges = build_import_graph("counted_package").edges
    assert set(edges) == {
        ("counted_package", "counted_package.q"),
        ("counted_package", "counted_package.r"),
    }
    assert [count_structural_types(text) for text in texts.values()] == [0, 0, 1]
    assert count_statements(texts["r"]) == 2
