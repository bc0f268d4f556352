"""Exports: a model or an adapter with its card, here and at a double of the hub."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from hub_double import HubDouble
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from toy import make_model, toy_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from practicum.errors import ModelError, RecipeError, ResourceError
from practicum.models.config import ScorerConfig
from practicum.runs import exporting, open_student
from practicum.runs.exporting import export_run
from practicum.runs.opening import load_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    # The hub's client uploads with a deprecated argument of its HTTP library.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]
NAME = "org/my-model"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2)
    return folder


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of all weights, with an evaluation."""
    changes = {"evaluation.prompts": 8, "about": "a test"}
    return toy_run(models, tmp_path_factory.mktemp("whole"), changes).folder


@pytest.fixture(scope="module")
def adapted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of adapters, without an evaluation."""
    changes = {
        "student.lora": {"rank": 2, "alpha": 4.0},
        "student.system": "ab",
        "student.stop": ["d"],
        "task.shortest": 2,
    }
    return toy_run(models, tmp_path_factory.mktemp("adapted"), changes).folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    with HubDouble() as double:
        monkeypatch.setattr(constants, "ENDPOINT", double.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", double.token)
        yield double


def read_card(folder: Path) -> tuple[dict, str]:
    """Return the header and the text of a model card."""
    _, header, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), text


def test_a_card_says_what_the_run_measured(whole: Path, tmp_path: Path) -> None:
    export = export_run(whole, tmp_path / "out")
    header, text = read_card(tmp_path / "out")
    assert header == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["practicum", "distillation"],
    }
    assert "A model trained with practicum: a test." in text
    assert "Step 4, one seed (0)." in text
    assert "| before | 0.00 [0.00, " in text
    assert "8 held-out prompts" in text
    assert "Verdict against the base model: TOO FEW PROMPTS: accuracy 0." in text
    assert re.search(r"Cost: .* tokens trained on, [\d.]+ [MG]FLOP\.", text)
    assert "divergence: reverse_kl" in text
    assert f"torch {torch.__version__}" in text
    assert "chat template is the base model's own, unchanged" in text
    assert str(tmp_path.parent.parent) not in text
    assert export.describe()[0].startswith(f"wrote {tmp_path / 'out'}: ")
    assert "model.safetensors" in export.describe()[1]
    assert export.describe()[2].startswith("load: AutoModelForCausalLM.from_pretrained(")


def test_an_adapter_is_loaded_by_peft_with_the_students_numbers(
    adapted: Path, models: Path, tmp_path: Path
) -> None:
    export = export_run(adapted, tmp_path / "out", adapter=True)
    assert export.base == str(models / "student")
    assert "users of the adapter also need it" in export.describe()[-1]
    base = AutoModelForCausalLM.from_pretrained(models / "student")
    tokens = torch.tensor([[3, 4, 5, 6]])
    _, student = open_student(adapted)
    expected = student.loaded.language_model.model(tokens).logits  # type: ignore[attr-defined]
    found = PeftModel.from_pretrained(base, tmp_path / "out").eval()(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    header, text = read_card(tmp_path / "out")
    assert header["library_name"] == "peft"
    assert "Accuracy on held-out prompts was not measured." in text
    assert "the system turn in the recipe below" in text
    assert "answers also ended at `d`" in text
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert load_model(ScorerConfig(model=str(tmp_path / "out"))).source == str(tmp_path / "out")


def test_an_exported_adapter_is_a_student_that_goes_on(
    adapted: Path, models: Path, tmp_path: Path
) -> None:
    export_run(adapted, tmp_path / "adapter", adapter=True)
    changes = {"student": {"model": str(tmp_path / "adapter"), "lora": {"rank": 2, "alpha": 4.0}}}
    result = toy_run(models, tmp_path / "runs", {**changes, "train.steps": 1})
    again = export_run(result.folder, tmp_path / "again", adapter=True)
    assert again.base == str(models / "student")


def test_a_run_of_all_weights_has_no_adapter(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no student\.lora.*; leave --adapter out"):
        export_run(whole, tmp_path / "out", adapter=True)
    assert not list(tmp_path.iterdir())


def test_an_unfinished_run_claims_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole / "summary.json").rename(whole / "hidden.json")
    try:
        export_run(whole, tmp_path / "out")
    finally:
        (whole / "hidden.json").rename(whole / "summary.json")
    text = read_card(tmp_path / "out")[1]
    assert "had not finished, so nothing has been measured" in " ".join(text.split())
    assert "accuracy" not in text.partition("## Prompting")[0]


@pytest.mark.parametrize("private", [True, False])
def test_a_push_uploads_every_file_to_a_new_repository(
    whole: Path, tmp_path: Path, hub: HubDouble, private: bool
) -> None:
    export = export_run(whole, tmp_path / "out", push_to_hub=NAME, public=not private)
    assert hub.repositories[NAME]["visibility"] == ("private" if private else "public")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files[NAME] == files
    assert export.address == f"{hub.url}/{NAME}"
    assert export.describe()[-1] == f"pushed to {hub.url}/{NAME}"
    export_run(whole, tmp_path / "again", push_to_hub=NAME)
    assert hub.commits <= 2


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "hf auth login"), (403, "write access"), (404, "no such user"), (500, "later")],
)
def test_a_refusal_of_the_hub_comes_before_the_export(
    whole: Path, tmp_path: Path, hub: HubDouble, status: int, advice: str
) -> None:
    hub.refuse["/api/repos/create"] = status
    with pytest.raises(
        ResourceError, match=f"{NAME}: the hub answered {status} .*{advice}"
    ) as error:
        export_run(whole, tmp_path / "out", push_to_hub=NAME)
    assert hub.token not in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_failed_upload_leaves_the_export_and_says_how_to_go_on(
    whole: Path, tmp_path: Path, hub: HubDouble
) -> None:
    hub.refuse["/api/models/org/my-model/commit"] = 403
    with pytest.raises(ResourceError, match=r"answered 403 .*hf upload org/my-model") as error:
        export_run(whole, tmp_path / "out", push_to_hub=NAME)
    assert hub.token not in str(error.value)
    assert (tmp_path / "out" / "config.json").is_file()


def test_without_a_token_or_a_network_a_push_is_one_line(
    whole: Path, tmp_path: Path, hub: HubDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match="the hub cannot be reached"):
        export_run(whole, tmp_path / "out", push_to_hub=NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ResourceError, match=r"offline|cannot be reached"):
        export_run(whole, tmp_path / "out", push_to_hub=NAME)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with pytest.raises(ResourceError, match="not logged in to the hub; log in with"):
        export_run(whole, tmp_path / "out", push_to_hub=NAME)


def test_a_name_that_no_repository_can_have_is_refused(
    whole: Path, tmp_path: Path, hub: HubDouble
) -> None:
    with pytest.raises(ResourceError, match=r"--push-to-hub a/b/c: "):
        export_run(whole, tmp_path / "out", push_to_hub="a/b/c")


@pytest.mark.long
def test_the_command_pushes_and_shows_no_token(
    adapted: Path, tmp_path: Path, hub: HubDouble
) -> None:
    words = ["export", str(adapted), "out", "--adapter", "--push-to-hub", NAME]
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": hub.token}
    done = subprocess.run(
        [sys.executable, "-m", "practicum", *words],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"pushed to {hub.url}/{NAME}" in done.stdout
    assert hub.token not in done.stdout + done.stderr
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(hub.files[NAME])


def test_a_student_with_its_own_head_is_exported_and_read_as_a_run(
    models: Path, tmp_path: Path
) -> None:
    """Check a folder with a config that ties head and embedding, as folders of merged adapters do."""
    student = make_model(tmp_path / "student", seed=1)
    weights = load_file(student / "model.safetensors")
    head = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file({**weights, "lm_head.weight": head}, student / "model.safetensors", {"format": "pt"})
    changes = {"student.model": str(student), "train.steps": 1}
    run = toy_run(models, tmp_path / "runs", changes).folder
    export_run(run, tmp_path / "out")
    tokens = torch.tensor([[3, 4, 5, 6]])
    _, trained = open_student(run)
    expected = trained.loaded.language_model.model(tokens).logits  # type: ignore[attr-defined]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
    assert torch.equal(found, expected)
    again = load_model(ScorerConfig(model=str(run)))
    assert (Path(again.source) / "config.json").read_text() == (
        tmp_path / "out" / "config.json"
    ).read_text()


def test_an_export_that_fails_leaves_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(facts: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "build_card", fail)
    with pytest.raises(ResourceError, match=r"out: cannot be written \(No space left"):
        export_run(whole, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_exists_is_left_alone(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="exists already"):
        export_run(whole, tmp_path)
