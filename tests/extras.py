"""Use each extra through practicum: `python tests/extras.py NAME`, in an environment that has the extra.

`test_package.py` runs this file, or its functions in forks. The output of practicum must show that the packages did their
part. `SERVICE` names a service with the Tinker API, for the extra that uses one.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = {"hidden_size": 32, "layers": 1, "heads": 2}
LETTERS = {"type": "reverse", "alphabet": "abcd"}
"""A task with letters that are known to the models that are served or written here."""


@dataclass(frozen=True, slots=True)
class Use:
    """A use of an extra: its packages, and the work.

    Not all work can be done in a fork: Ray's would share this process's connection, and the thread
    that sends tinker's requests does not exist in a fork.
    """

    packages: frozenset[str]
    work: Callable[[], None]
    can_fork: bool


USES: dict[str, Use] = {}
"""The use of each extra, by the extra's name."""


def uses(
    extra: str, *packages: str, can_fork: bool = True
) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function as the use of an extra and all of its packages."""

    def enter(work: Callable[[], None]) -> Callable[[], None]:
        USES[extra] = Use(frozenset(packages), work, can_fork)
        return work

    return enter


def distil(**sections: Any) -> Any:
    """Return the result of one step of tiny models; the sections replace the sections below."""
    import practicum

    return practicum.distill(
        **{
            "student": {"model": {**TINY, "seed": 1}},
            "teacher": {"type": "model", "model": {**TINY, "seed": 2}},
            "task": {"type": "reverse"},
            "train": {"steps": 1, "prompts_per_step": 2, "threads": 1},
            "rollout": {"max_new_tokens": 4},
            "evaluation": {"prompts": 2},
            "out": tempfile.mkdtemp(dir=Path.cwd()),
            **sections,
        }
    )


@uses("demo", "gguf")
def use_demo() -> None:
    """Train a student with weights from a GGUF file in a package."""
    from practicum.models.packaged import PACKAGED, Packaged

    package = Path("tiny_weights")
    package.mkdir()
    (package / "__init__.py").touch()
    write_gguf(package / "tiny.gguf")
    sys.path.insert(0, str(Path.cwd()))
    PACKAGED["tiny"] = Packaged("tiny_weights", "tiny-weights", "tiny.gguf")
    teacher = {"type": "self", "weights": "frozen"}
    result = distil(student={"model": "tiny"}, teacher=teacher, task=LETTERS)
    assert result.summary["steps"] == 1


def write_gguf(path: Path, seed: int = 0) -> None:
    """Write a llama of one layer with random weights, with llama.cpp's names."""
    import gguf
    import numpy as np

    words = ["<s>", "</s>", "<|endoftext|>", *"abcd", "Ġ", "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 3] + [1] * (len(words) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[-1]['content'] }}")
    shapes = {"token_embd": (len(words), 32), "output": (len(words), 32)}
    shapes |= dict.fromkeys(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"), (32,))
    for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{part}"] = (32, 32)
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@uses("remote", "httpx2")
def use_remote() -> None:
    """Train under a teacher behind a server on this machine."""
    from stub_server import Stub, table

    with Stub(table()) as stub:
        teacher = {"type": "openai_api", "url": stub.url}
        result = distil(teacher=teacher, objective={"signal": "sampled"}, task=LETTERS)
        assert result.summary["steps"] == 1
        assert stub.scored


@uses("tasks", "reasoning-gym", "math-verify")
def use_tasks() -> None:
    """Train on a generator's puzzles, and score an answer that is right only as mathematics."""
    puzzles = {"type": "reasoning_gym", "generator": "chain_sum", "train_size": 4}
    assert distil(task={**puzzles, "heldout_size": 2}).summary["steps"] == 1
    rows = [{"id": f"{n}", "prompt": f"{n} of two?", "answer": "1/2"} for n in range(4)]
    Path("halves.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    jsonl = {"type": "jsonl", "path": "halves.jsonl", "verifier": "math", "heldout": 2}
    # The run asks the verifier whether one half is 0.5 before it begins, and stops if the answer is no.
    assert distil(task=jsonl).summary["steps"] == 1


@uses("datasets", "datasets", "pyarrow")
def use_datasets() -> None:
    """Train on a saved dataset, and on a Parquet file."""
    from datasets import Dataset

    rows = [{"prompt": text, "answer": text[::-1]} for text in ("ab", "ba", "cd", "dc")]
    dataset = Dataset.from_list(rows)
    dataset.save_to_disk("saved")
    dataset.to_parquet("rows.parquet")
    verifier = {"verifier": "exact", "heldout": 2}
    for task in (
        {"type": "datasets", "path": "saved", **verifier},
        {"type": "jsonl", "path": "rows.parquet", **verifier},
    ):
        assert distil(task=task).summary["steps"] == 1


@uses("pictures", "pillow")
def use_pictures() -> None:
    """Read a row with a picture."""
    from picture_files import write_file
    from row_folder import Folder, read_one

    write_file(Path.cwd(), "a.png")
    prompt = read_one(Folder(Path.cwd()), {"prompt": "What?", "images": ["a.png"]})
    assert prompt.messages[0].content == "<image>What?"


@uses("track", "trackio", "wandb", "tensorboard", "mlflow")
def use_track() -> None:
    """Track a run with each service, and check what its client wrote."""
    import practicum

    os.environ.update(TRACKIO_DIR="trackio", WANDB_MODE="offline")
    for tracker, pattern in {
        "trackio": "trackio/**/*.db",
        "wandb": "**/wandb/offline-run-*/*.wandb",
        "tensorboard": "**/tensorboard/events.*",
        "mlflow": "**/mlflow.db",
    }.items():
        steps = [
            "train.steps=1",
            "student.model.pretrain.steps=1",
            "teacher.model.pretrain.steps=1",
        ]
        practicum.run("smoke/toy", [*steps, f"tracking={tracker}"], out=Path(tracker))
        assert list(Path.cwd().glob(pattern)), f"{tracker} wrote no {pattern}"


@uses("openenv", "websockets")
def use_openenv() -> None:
    """Return an observation of a counting server."""
    import threading
    from pathlib import Path

    from websockets.sync.server import ServerConnection, serve

    from practicum.ports import TaskContext
    from practicum.tasks.openenv import Config, build

    def answer(connection: ServerConnection) -> None:
        for _ in connection:
            data = {"observation": {"text": "one"}, "reward": None, "done": False}
            connection.send(json.dumps({"type": "observation", "data": data}))

    with serve(answer, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        config = Config(url=url, train_size=1, heldout_size=0)
        (prompt,) = build(config, TaskContext(0, Path())).train_prompts()
        server.shutdown()
    assert prompt.messages[0].content == "one"


@uses("gymnasium", "gymnasium", "pillow")
def use_gymnasium() -> None:
    """Show a frame of an environment."""
    from pathlib import Path

    from practicum.pictures import load_picture
    from practicum.ports import TaskContext
    from practicum.tasks.gymnasium import Config, build

    place = "practicum.methods.rpd.reach:practicum/Reach-v0"
    config = Config(env=place, view="frame", train_size=1, heldout_size=0)
    (prompt,) = build(config, TaskContext(0, Path())).train_prompts()
    assert load_picture(prompt.messages[0].images[0])[1].size == (32, 32)


@uses("quantization", "torchao")
def use_quantization() -> None:
    """Train adapters over students in 8 and in 4 bits, under teachers in as many."""
    for name in ("int8", "nf4"):
        teacher = {"type": "model", "model": {**TINY, "seed": 2}, "quantization": name}
        student = {"model": {**TINY, "seed": 1}, "lora": {"rank": 2}, "quantization": name}
        assert distil(student=student, teacher=teacher, task=LETTERS).summary["steps"] == 1


@uses("mcp", "mcp")
def use_mcp() -> None:
    """Call a tool of an MCP server."""
    from practicum.tools import mcp

    server = str(ROOT / "tests" / "tasks" / "mcp_server.py")
    tool = mcp.build(mcp.Config(command=(sys.executable, server)))
    assert tool.call("count_letter", {"word": "banana", "letter": "a"}) == "3"
    tool.connection.close()


@uses("tinker", "tinker", "httpx2", can_fork=False)
def use_tinker() -> None:
    """Train under a teacher at a service that speaks the Tinker API."""
    teacher = {"type": "tinker", "url": os.environ["SERVICE"], "model": "teacher"}
    result = distil(teacher=teacher, objective={"signal": "sampled"}, task=LETTERS)
    assert result.summary["steps"] == 1


@uses("server", "starlette", "uvicorn", "httpx", "tinker")
def use_server() -> None:
    """Serve a model, and ask it for its name."""
    import httpx

    result = distil(task=LETTERS)
    command = [
        sys.executable,
        "-m",
        "practicum",
        "serve",
        f"tiny={result.folder / 'models/student'}",
    ]
    with subprocess.Popen(
        [*command, "--port", "0", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "TINKER_BASE_URL=" in line)
            address = line.split("TINKER_BASE_URL=")[1].split()[0]
            about = httpx.get(f"{address}/api/v1/get_server_capabilities")
            assert about.status_code == 200 and "tiny" in about.text, about.text
        finally:
            process.terminate()


@uses("vllm", "vllm", "httpx2")
def use_vllm() -> None:
    """Let vLLM sample for the student, in this process."""
    result = distil(rollout={"engine": "vllm", "max_new_tokens": 4}, task=LETTERS)
    assert result.metrics[0]["canary"] < 0.3


@uses("verifiers", "verifiers")
def use_verifiers() -> None:
    """Let a chat loop of verifiers lead a conversation about a task of one of its tasksets."""
    sys.path.insert(0, str(ROOT / "tests" / "peers"))
    task = {"type": "verifiers", "taskset": "echo_taskset", "train_size": 2, "heldout_size": 2}
    result = distil(task=task, evaluation={"prompts": 0})
    assert result.summary["steps"] == 1


@uses("ray", "ray", can_fork=False)
def use_ray() -> None:
    """Train in a process of a cluster."""
    result = distil(task=LETTERS, backend={"type": "ray"})
    assert result.summary["steps"] == 1


@uses("peers", "trl", "liger-kernel")
def use_peers() -> None:
    """Compare the loss with both libraries in its benchmark."""
    command = [sys.executable, "-m", "benchmarks", "loss", "--quick", "--peer", "trl", "liger"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    line = json.loads(printed.splitlines()[-1])
    assert {"trl", "liger"} <= set(line["seconds"]), line


@uses(
    "dev",
    *(
        "beartype",
        "build",
        "furo",
        "gymnasium",
        "hatch-fancy-pypi-readme",
        "hatchling",
        "httpx",
        "hypothesis",
    ),
    *(
        "import-linter",
        "ipykernel",
        "jsonschema",
        "matplotlib",
        "mpmath",
        "myst-parser",
        "nbclient",
        "nbformat",
        "pillow",
    ),
    *(
        "playwright",
        "pyright",
        "pytest",
        "pytest-xdist",
        "ray",
        "ruff",
        "starlette",
        "tinker",
    ),
    "uvicorn",
    "websockets",
)
def use_dev() -> None:
    """Build the package, and check its source with a gate or a test of each tool."""
    tools = {
        "build": ["--no-isolation", "--outdir", str(Path.cwd()), "."],
        "ruff": ["check", "src"],
        "pyright": ["src/practicum/errors.py"],
        "pytest": ["-n", "1", "-p", "no:cacheprovider", *TESTS_WITH_TOOLS],
    }
    for tool, arguments in tools.items():
        subprocess.run([sys.executable, "-m", tool, *arguments], cwd=ROOT, check=True)
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    subprocess.run([sys.executable, "-c", lint, "--no-cache"], cwd=ROOT, check=True)
    draw_picture(Path("picture.png"))
    assert importlib.util.find_spec("playwright.sync_api")


TESTS_WITH_TOOLS = (
    "tests/functional/test_samples.py",
    "tests/recipe/test_json_schema.py",
    "tests/statistics/test_paired.py",
    "tests/tasks/test_openenv.py",
    "tests/test_notebooks.py",
    "tests/test_site.py",
    "tests/server/test_verbs.py",
    "tests/server/test_protocol.py",
)
"""Short tests that use shapes, random inputs, schemas, mpmath, sockets, a kernel, and the service."""


def draw_picture(path: Path) -> None:
    """Draw a curve and halve its colours, as for the pictures of the documentation."""
    import matplotlib
    from PIL import Image

    matplotlib.use("agg")
    from matplotlib import pyplot

    pyplot.plot([1, 2, 4])
    pyplot.savefig(path)
    with Image.open(path) as picture:
        assert picture.quantize(32).getcolors() is not None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["PRACTICUM_CACHE"] = folder
        USES[sys.argv[1]].work()
