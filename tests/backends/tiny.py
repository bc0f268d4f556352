"""Random two-layer models of three architectures, and data to train them on."""

from dataclasses import replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import enable_packing
from practicum.types import Datum, Prompt, Rollout, TeacherSignal

from .places import Current

VOCABULARY = 64
ARCHITECTURES = ("llama", "qwen3", "gemma3")


def tiny(
    architecture: str = "llama",
    seed: int = 0,
    *,
    rows: int = VOCABULARY,
    dropout: float = 0.0,
    head_width: int = 8,
) -> LanguageModel:
    """Return a model with `rows` embedding rows, `VOCABULARY` of them tokens; its weights are large, so that predictions differ."""
    kinds = {
        "llama": {"model_type": "llama"},
        "qwen3": {"model_type": "qwen3"},
        "gemma3": {
            "model_type": "gemma3_text",
            "final_logit_softcapping": 5.0,
            "sliding_window": 8,
        },
    }
    settings = dict(kinds[architecture])
    config = AutoConfig.for_model(
        settings.pop("model_type"),
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_width,
        max_position_embeddings=256,
        attention_dropout=dropout,
        initializer_range=0.2,
        tie_word_embeddings=architecture != "qwen3",
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        **settings,
    )
    if architecture == "gemma3":
        config.layer_types = ["sliding_attention", "full_attention"]
    place = Current.place
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
    moved = model.requires_grad_(False).to(torch.device(place.device))
    moved.tie_weights()  # moving to a device of another tensor class turns one shared tensor into two
    moved.requires_grad_(True)
    return enable_packing(LanguageModel(moved, VOCABULARY, autocast=not place.is_exact))


def random_tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(
        torch.randint(
            3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
    )


def rollout(
    prompt: int, answer: int, seed: int, *, group: str = "", mask: list[bool] | None = None
) -> Rollout:
    """Return a completion of random tokens, `prompt` and `answer` tokens long."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -4 * torch.rand(answer, generator=generator)
    return Rollout(
        prompt=Prompt(id=group or f"p{seed}", messages=()),
        prompt_tokens=random_tokens(prompt, seed),
        tokens=torch.tensor(random_tokens(answer, seed + 1000), dtype=torch.long),
        loss_mask=torch.ones(answer, dtype=torch.bool)
        if mask is None
        else torch.tensor(mask, dtype=torch.bool),
        sampling_logprobs=logprobs,
        policy_logprobs=logprobs - 0.1,
        policy_version=0,
        stop_reason="length",
        text="",
        reward=float(seed % 2),
    )


def rollouts() -> list[Rollout]:
    """Return unequal lengths, two groups, holes in one mask and nothing to learn in another."""
    return [
        rollout(3, 5, 1, group="a"),
        rollout(7, 2, 2, group="a"),
        rollout(2, 4, 3, mask=[False] * 4),
        rollout(5, 9, 4, group="b", mask=[True, False, True, True, False, True, True, True, False]),
        rollout(4, 1, 5, group="b"),
    ]


@torch.no_grad()
def hidden_signal(teacher: LanguageModel, item: Rollout) -> TeacherSignal:
    """Return the signal of a local teacher: one sequence at a time, without padding or cache."""
    teacher.model.eval()
    ids = _join_tokens(teacher, item)
    hidden = teacher.body(ids, torch.ones_like(ids, dtype=torch.bool))[0]
    first = len(item.prompt_tokens) - 1
    head = teacher.head()
    head = replace(head, weight=head.weight.detach())
    return TeacherSignal(hidden=hidden[first : first + len(item.tokens)].clone(), head=head)


def data_for(teacher: LanguageModel, items: list[Rollout] | None = None) -> list[Datum]:
    return [
        Datum(item, hidden_signal(teacher, item))
        for item in (rollouts() if items is None else items)
    ]


def all_logits(model: LanguageModel, item: Rollout) -> torch.Tensor:
    """Return the model's own logits at the supervised tokens of one rollout, by the whole forward of transformers.

    They are on the CPU, like the token data.
    """
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=model.autocast):
        logits = model.model(input_ids=_join_tokens(model, item)).logits[0, :, :VOCABULARY].float()
    first = len(item.prompt_tokens) - 1
    return logits[first : first + len(item.tokens)].cpu()[item.loss_mask]


def _join_tokens(model: LanguageModel, item: Rollout) -> torch.Tensor:
    """Return prompt and answer as a batch of one, on the model's device."""
    return torch.tensor([[*item.prompt_tokens, *item.tokens.tolist()]], device=model.device)
