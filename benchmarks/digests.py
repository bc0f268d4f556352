"""Print digests of the bytes that tiny runs of every kind write, to find code changes that change a run's result.

    python -m benchmarks digests > results/digests.jsonl
    python -m benchmarks digests --against results/digests.jsonl
    python -m benchmarks digests --only papers/gkd pool
    python -m benchmarks digests --quick

Every packaged recipe, and every source, signal, scorer, note and teacher that no recipe has: models made from scratch, two steps or
four. All take about five minutes of one core; `--quick` does only the plain one, `--only` the runs with one of the words in their
names. Each run and each stage of a pipeline prints a line of JSON: its name, the norm of its last gradient, and the SHA-256 of its
metrics, of its rollouts and of the tensors of its last checkpoint. With `--against`, it prints a table of the differences from an
earlier output and exits with 1. Digests are comparable only for the same versions and the same kind of processor. Each line names
its processor and vector instructions, and a comparison ignores the lines of other processors.
"""

import argparse
import hashlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.digest_runs import (
    BASE,
    RUNS,
    STARTS_FROM,
    UNSHORTENED,
    fill_in,
    open_inputs,
    reward_more,
    shrink,
)
from benchmarks.measuring import describe_machine, format_table
from practicum.recipe import Recipe, list_recipe_names, parse_recipe
from practicum.runs.stages import Pipeline, parse_pipeline


def main() -> None:
    """Print a line for each run; exit with 1 where one differs from an earlier output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the plain run")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="runs with one of these words in their names"
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="an earlier output of this command"
    )
    options = parser.parse_args()
    before = None if options.against is None else read(options.against)
    if before == {}:
        sys.exit(
            f"{options.against} has no digests of this processor, {name_machine()}; run `python -m benchmarks digests` "
            "before the change and add its lines to the file"
        )
    names = ["plain"] if options.quick else list_runs(options.only)
    lines = []
    for line in yield_digests(names):
        print(json.dumps(line), flush=True)
        lines.append(line)
    differing = [] if before is None else find_differences(lines, before)
    if differing:
        print(format_table(["run", "file", "before", "now"], differing))
        sys.exit(1)


def list_runs(words: Sequence[str] | None) -> list[str]:
    """Return the names of all runs; with words, of the runs that match one, and of the runs that they start from."""
    names = [*RUNS, *(name for name in list_recipe_names() if name not in UNSHORTENED)]
    if words is None:
        return names
    chosen = [name for name in names if any(word in name for word in words)]
    needed = {STARTS_FROM[name] for name in chosen if name in STARTS_FROM}
    return [name for name in names if name in chosen or name in needed]


def yield_digests(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Do the runs of those names in a folder that is thrown away, and yield the lines of each."""
    with tempfile.TemporaryDirectory() as folder, reward_more():
        for name in names:
            run = _run(name, Path(folder))
            stages = sorted((run / "stages").glob("*/"))
            for part in stages or [run]:
                run_name = f"{name}/{part.name}" if stages else name
                yield {"run": run_name, "machine": name_machine(), **hash_run(part)}


def name_machine() -> str:
    """Return the processor and its vector instructions, on which the last bits of a result depend."""
    machine = describe_machine()
    return f"{machine['processor']} {machine['vectors']}"


def hash_run(run: Path) -> dict[str, Any]:
    """Return the digests of a run folder's rows, and of all tensors of its newest checkpoint."""
    from practicum.run_dir.checkpoints import step_folders

    _, newest = max(step_folders(run / "checkpoints"))
    tensors = sorted(newest.glob("*.safetensors"))
    last = json.loads((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {
        "gradient_norm": last["grad_norm"],
        **{name: _hash_files([run / name]) for name in ("metrics.jsonl", "rollouts.jsonl")},
        "checkpoint": _hash_files(tensors),
    }


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return this processor's lines of an earlier output by their run; exit where a line is no digest."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return {line["run"]: line for line in lines if line["machine"] == name_machine()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(
            f"{path} holds no digests ({error}); write the output of `python -m benchmarks digests` into it"
        )


def find_differences(
    lines: Iterable[Mapping[str, Any]], before: Mapping[str, Mapping[str, Any]]
) -> list[list[str]]:
    """Return a row for each digest that is new or has changed."""
    return [
        [line["run"], name, str(before.get(line["run"], {}).get(name, "-"))[:12], str(digest)[:12]]
        for line in lines
        for name, digest in line.items()
        if before.get(line["run"], {}).get(name) != digest
    ]


def build_recipes(name: str) -> list[Recipe]:
    """Return the recipe of a run, or the recipes of its stages, without the files that it reads."""
    recipe = _parse(name, {"SERVER": "80", "SERVICE": "80"})
    return [recipe] if isinstance(recipe, Recipe) else list(recipe.build_recipes().values())


def _parse(name: str, inputs: Mapping[str, str]) -> Recipe | Pipeline:
    if name in RUNS:
        return parse_recipe({"name": name, **BASE, **fill_in(RUNS[name], inputs)}, name)
    data = shrink(name)
    return (parse_pipeline if "stages" in data else parse_recipe)(data, name)


def _run(name: str, folder: Path) -> Path:
    """Execute a run; the resumed run was stopped after its first step."""
    from practicum.errors import Interrupted
    from practicum.runs import run
    from practicum.runs.pipeline import run as run_pipeline

    with open_inputs(name, folder) as inputs:
        recipe = _parse(name, inputs)
        if not isinstance(recipe, Recipe):
            return run_pipeline(recipe, out=folder, progress=False).folder
        if name == "resumed":
            signals = iter([None, signal.SIGINT])
            with suppress(Interrupted):
                run(recipe, out=folder, stop=lambda: next(signals, None), progress=False)
        return run(recipe, out=folder, resume=name == "resumed", progress=False).folder


def _hash_files(paths: Sequence[Path]) -> str:
    """Return the digest of some files, their names included."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
