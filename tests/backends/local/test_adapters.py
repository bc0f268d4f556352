"""Adapters are added to every linear map and every fused weight of experts, and an export is the trained model."""

import re
from collections import Counter

import pytest
import torch
from pydantic import ValidationError
from toy import in_check
from transformers import AutoModelForCausalLM

from backends.folders import model_folder
from backends.mixtures import FAMILIES, family_folder
from backends.toys import toy_data
from practicum.backends.local.adapters import (
    PARTS,
    add_adapters,
    is_linear_map,
    list_adapted_weights,
)
from practicum.backends.local.export import export
from practicum.backends.local.hosted import add_shared_adapters
from practicum.backends.local.loading import load, load_student
from practicum.backends.local.trainer import LocalTrainer
from practicum.errors import ModelError
from practicum.models.config import Lora, ModelConfig, StudentConfig
from practicum.objective import Objective, Sampled
from practicum.ports import AdamParams, SampleRequest, SamplingParams, WeightUpdateRule
from practicum.types import ScoreRequest

TEXT = ScoreRequest((3, 8, 9, 10), (4, 7, 7, 2, 5, 11))

SHORT = ("deepseek_v3", "mixtral", "gpt2")
"""One family with both kinds of layer, one with experts, one without; all remaining families are long."""

ATTENTION = {
    "self_attn.q_proj": 2,
    "self_attn.k_proj": 2,
    "self_attn.v_proj": 2,
    "self_attn.o_proj": 2,
}
EXPERTS = {"mlp.experts.gate_up_proj": 2, "mlp.experts.down_proj": 2}
MLP = ("gate_proj", "up_proj", "down_proj")

ADAPTED = {
    "mixtral": ATTENTION | EXPERTS,
    "qwen3_moe": ATTENTION | EXPERTS,
    "qwen2_moe": ATTENTION
    | EXPERTS
    | {f"mlp.shared_expert.{name}": 2 for name in MLP}
    | {"mlp.shared_expert_gate": 2},
    "olmoe": ATTENTION | EXPERTS,
    "granitemoe": ATTENTION
    | {f"block_sparse_moe.experts.{name}": 2 for name in ("gate_up_proj", "down_proj")},
    "gpt_oss": ATTENTION | EXPERTS,
    "phimoe": ATTENTION | EXPERTS,
    "deepseek_v3": {
        f"self_attn.{name}": 2
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    }
    | {"self_attn.o_proj": 2}
    | {f"mlp.{name}": 1 for name in MLP}
    | {f"mlp.shared_experts.{name}": 1 for name in MLP}
    | {"mlp.experts.gate_up_proj": 1, "mlp.experts.down_proj": 1},
    "glm4_moe": ATTENTION
    | {f"mlp.{name}": 1 for name in MLP}
    | {f"mlp.shared_experts.{name}": 1 for name in MLP}
    | {"mlp.experts.gate_up_proj": 1, "mlp.experts.down_proj": 1},
    "qwen3_next": {f"linear_attn.{name}": 1 for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")}
    | dict.fromkeys(ATTENTION, 1)
    | EXPERTS
    | {f"mlp.shared_expert.{name}": 2 for name in MLP}
    | {"mlp.shared_expert_gate": 2},
    "jamba": {"mamba.in_proj": 1}
    | dict.fromkeys(ATTENTION, 1)
    | {f"feed_forward.{name}": 1 for name in MLP}
    | {"feed_forward.experts.gate_up_proj": 1, "feed_forward.experts.down_proj": 1},
    "falcon_h1": ATTENTION | {"mamba.in_proj": 2} | {f"feed_forward.{name}": 2 for name in MLP},
    "mamba": {"mixer.in_proj": 2},
    "gpt2": {"attn.c_attn": 2, "attn.c_proj": 2, "mlp.c_fc": 2, "mlp.c_proj": 2},
    "gpt_neox": {
        f"{half}.{name}": 2
        for half, names in {
            "attention": ("query_key_value", "dense"),
            "mlp": ("dense_h_to_4h", "dense_4h_to_h"),
        }.items()
        for name in names
    },
    "seed_oss": ATTENTION | {f"mlp.{name}": 2 for name in MLP},
}
"""The number of modules and fused weights of each name that have adapters, in two layers."""

MIXTURES = ("mixtral", "granitemoe", "deepseek_v3", "glm4_moe", "qwen3_next", "gpt_oss")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(family: str):
        if family not in made:
            made[family] = family_folder(tmp_path_factory.mktemp(family), family)
        return made[family]

    return folder


def student(folder, **choices):
    return load_student(StudentConfig(model=str(folder), lora=Lora(rank=4), **choices), 0)


def learn(trainer: LocalTrainer, folder, steps) -> None:
    for step in steps:
        trainer.forward_backward(toy_data(folder), Objective(), step)
        assert trainer.optim_step(AdamParams(0.05))["skipped"] == 0


def score(client) -> torch.Tensor:
    (signal,) = client.score([TEXT], Sampled())
    return signal.logprobs


@torch.no_grad()
def plain_scores(folder) -> torch.Tensor:
    """Compute log-probabilities by the whole forward of transformers, over the fifteen tokens that exist."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[*TEXT.prompt_tokens, *TEXT.tokens]])
    logprobs = model(ids).logits[0, :, :15].log_softmax(-1)
    return logprobs[len(TEXT.prompt_tokens) - 1 : -1].gather(
        -1, torch.tensor(TEXT.tokens)[:, None]
    )[:, 0]


def adapted_names(model) -> Counter:
    """Return the modules and fused weights with adapters, without the number of their layer."""
    names = []
    for name, module in model.named_modules():
        if f"{name}.lora_A.default.weight" in dict(model.named_parameters()):
            weight = getattr(module, "parameter_name", None)
            where = re.sub(r"^.*?\.\d+\.", "", name).replace(".base_layer", "")
            names.append(where if weight is None else f"{where}.{weight}")
    return Counter(names)


@pytest.mark.parametrize("family", in_check(FAMILIES, *SHORT))
def test_adapters_lie_on_every_linear_map_and_every_weight_of_experts(folders, family):
    model = student(folders(family)).language_model
    assert adapted_names(model.model) == ADAPTED[family]
    assert len(model.trainable_parameters()) == 2 * sum(ADAPTED[family].values())


@pytest.mark.parametrize("family", in_check(FAMILIES, *SHORT))
def test_a_fresh_adapted_student_is_exactly_its_base(folders, family):
    ids = torch.tensor([[3, 8, 9, 10, 4]])
    with torch.no_grad():
        base = load(ModelConfig(model=str(folders(family)))).language_model.model(ids).logits
        assert torch.equal(student(folders(family)).language_model.model(ids).logits, base)


@pytest.mark.parametrize("family", in_check(FAMILIES, *SHORT))
def test_an_export_is_the_model_that_was_trained(folders, family, tmp_path):
    loaded = student(folders(family))
    trainer = LocalTrainer(loaded.language_model)
    before = {
        name: value.detach().clone()
        for name, value in loaded.language_model.trainable_parameters().items()
    }
    learn(trainer, folders(family), range(2))
    assert not any(
        torch.equal(value, before[name])
        for name, value in loaded.language_model.trainable_parameters().items()
    )
    trained = score(trainer.build_sampling_client())
    export(loaded, tmp_path / "out")
    exported = plain_scores(tmp_path / "out")
    assert (exported - plain_scores(folders(family))).abs().max() > 1e-2
    torch.testing.assert_close(exported, trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_half_of_a_layer_is_adapted_where_that_is_asked(folders, family):
    base = load(ModelConfig(model=str(folders(family)))).language_model
    halves = [
        adapted_names(add_shared_adapters(base, Lora(rank=2), 0, (part,)).model) for part in PARTS
    ]
    assert halves[0] + halves[1] == ADAPTED[family]
    assert all("attn" in name for name in halves[0]) and not any(
        "attn" in name for name in halves[1]
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_only_the_modules_that_are_named_are_adapted(folders, family):
    """A name is the end of a path, of a linear map or of a weight that holds all experts."""
    names = sorted(ADAPTED[family])
    for name in names:
        for target in {name, name.rpartition(".")[2]}:
            lora = Lora(rank=2, targets=(target,))
            model = load_student(StudentConfig(model=str(folders(family)), lora=lora), 0)
            assert adapted_names(model.language_model.model) == {
                other: count
                for other, count in ADAPTED[family].items()
                if f".{other}".endswith(f".{target}")
            }
    lora = Lora(rank=2, targets=(names[0], "c_nothing"))
    with pytest.raises(ModelError, match=r"targets: no module named c_nothing .* there are ") as e:
        load_student(StudentConfig(model=str(folders(family)), lora=lora), 0)
    assert names[0].rpartition(".")[2] in str(e.value) and "\n" not in str(e.value)


def test_rslora_scales_by_the_root_of_the_rank(folders):
    folder = folders(next(iter(FAMILIES)))
    adapters = [
        dict(
            list_adapted_weights(
                load_student(
                    StudentConfig(model=str(folder), lora=Lora(rank=4, alpha=alpha, rslora=rslora)),
                    0,
                ).language_model.model
            )
        )
        for alpha, rslora in ((8, True), (16, False))
    ]
    for name, adapter in adapters[0].items():
        assert adapter.scaling == adapters[1][name].scaling == {"default": 4.0}


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("use_dora", "not trained apart"),
        ("dora", "not trained apart"),
        ("modules_to_save", "leave lora out"),
        ("use_rslora", "write rslora"),
        ("target_modules", "write targets"),
    ],
)
def test_other_settings_of_peft_are_refused_by_name(key, remedy):
    with pytest.raises(ValidationError) as error:
        Lora.model_validate({"rank": 4, key: True})
    (problem,) = error.value.errors()
    assert f"{key}: " in problem["msg"] and remedy in problem["msg"]


def test_attention_is_found_whatever_a_family_calls_it(folders):
    base = load(ModelConfig(model=str(folders("gpt_neox")))).language_model
    names = adapted_names(add_shared_adapters(base, Lora(rank=2), 0, ("attention",)).model)
    assert names == {"attention.query_key_value": 2, "attention.dense": 2}


@pytest.mark.parametrize("family", in_check([*MIXTURES, "gpt2"], *SHORT))
def test_a_resumed_trainer_goes_on_bit_for_bit(folders, family):
    folder = folders(family)
    through, resumed = (LocalTrainer(student(folder).language_model) for _ in range(2))
    learn(through, folder, range(2))
    saved = {
        stem: {name: value.clone() for name, value in tensors.items()}
        for stem, tensors in through.save_state().items()
    }
    learn(through, folder, [2])
    resumed.load_state(saved)
    learn(resumed, folder, [2])
    for name, value in through.language_model.trainable_parameters().items():
        assert torch.equal(value, resumed.language_model.trainable_parameters()[name]), name


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "gpt2"])
def test_snapshots_and_earlier_selves_have_the_adapters_of_their_time(folders, family):
    folder = folders(family)
    trainer = LocalTrainer(student(folder).language_model)
    learn(trainer, folder, [0])
    once = score(trainer.build_sampling_client())
    held = [trainer.snapshot(), trainer.build_self_teacher(WeightUpdateRule("frozen"))]
    learn(trainer, folder, [1])
    now = score(trainer.build_sampling_client())
    assert (now - once).abs().max() > 1e-2
    for client in held:
        assert torch.equal(score(client), once)
    assert torch.equal(score(trainer.snapshot()), now)
    assert torch.equal(score(trainer.build_self_teacher(WeightUpdateRule("live"))), now)


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "granitemoe", "gpt2"])
def test_what_is_sampled_has_the_probability_that_is_scored(folders, family):
    folder = folders(family)
    trainer = LocalTrainer(student(folder).language_model)
    learn(trainer, folder, range(2))
    client = trainer.build_sampling_client()
    requests = [SampleRequest((3, 8, 9), seed) for seed in range(3)]
    for request, sample in zip(requests, client.sample(requests, SamplingParams(12)), strict=True):
        (signal,) = client.score(
            [ScoreRequest(request.prompt_tokens, tuple(sample.tokens.tolist()))], Sampled()
        )
        torch.testing.assert_close(sample.policy_logprobs, signal.logprobs, rtol=0, atol=1e-5)


def test_experts_see_their_adapters_while_another_model_is_within_its_own(folders):
    """Check a run that writes rollouts in one thread and trains in another."""
    outer, inner = (student(folders("mixtral")).language_model for _ in range(2))
    ids = torch.tensor([[3, 8, 9, 10]])
    seen = []

    @torch.no_grad()
    def within(module, arguments) -> None:
        for _ in range(2):
            seen.append(inner.model(ids).logits)
            for name, value in inner.trainable_parameters().items():
                if "experts" in name:
                    value.add_(0.1)

    experts = next(
        module for module in outer.model.modules() if type(module).__name__ == "MixtralExperts"
    )
    handle = experts.register_forward_pre_hook(within)
    with torch.no_grad():
        outer.model(ids)
    handle.remove()
    assert (seen[0] - seen[1]).abs().max() > 1e-2


def test_what_could_not_be_exported_is_refused_before_anything_is_learned(tmp_path):
    model = load(ModelConfig(model=str(model_folder(tmp_path / "model")))).language_model.model
    torch.nn.utils.parametrizations.weight_norm(model.get_submodule("model.layers.1.mlp.up_proj"))
    with pytest.raises(
        ModelError,
        match=r"its adapters could not be exported, for model.layers.1.mlp.up_proj.weight is not a weight of the model; leave",
    ):
        add_adapters(model, Lora(rank=2), 0, [0, 1])


class ServerCompletion(torch.nn.Linear):
    """A plain product, implemented by the class itself, as in Falcon."""

    def forward(self, x):
        return x @ self.weight.T + (0.0 if self.bias is None else self.bias)


class Router(torch.nn.Linear):
    """A product with an addition."""

    def forward(self, x):
        return super().forward(x).softmax(dim=-1)


class Chooser(torch.nn.Linear):
    """Two results."""

    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "plain"),
    [(torch.nn.Linear, True), (ServerCompletion, True), (Router, False), (Chooser, False)],
)
def test_a_linear_map_is_told_by_what_it_does(kind, plain, bias):
    assert is_linear_map(kind(3, 2, bias=bias)) == plain
    assert is_linear_map(kind(3, 2, bias=bias, device="meta")) == plain


def test_nothing_to_adapt_is_refused_with_advice(folders):
    base = load(ModelConfig(model=str(folders("mamba")))).language_model
    with pytest.raises(
        ModelError,
        match=r"no linear map of mlp to adapt was found; leave lora out to train the weights",
    ):
        add_shared_adapters(base, Lora(rank=2), 0, ("mlp",))
