"""From-scratch models: a small architecture with random weights, optionally taught the task's answers first."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from practicum.backends.local.packing import pad_sequences
from practicum.errors import DataError
from practicum.models.config import PretrainConfig, ScratchConfig
from practicum.ports import HasAlphabet, Task
from practicum.text import Renderer, character_tokenizer, stop_ids
from practicum.types import Prompt

MAX_POSITIONS = 512


def scratch_folder(folder: Path, config: ScratchConfig, task: Task) -> Path:
    """Return the folder of a from-scratch model, made the first time with the characters and the answers of the task."""
    if not (folder / "config.json").is_file():
        temporary = folder.with_name(f"{folder.name}.tmp")
        make_scratch_model(temporary, config, alphabet_of(task), task.train_prompts())
        temporary.rename(folder)
    return folder


def alphabet_of(task: Task) -> str:
    """Return every character of the task, in order."""
    prompts = [*task.train_prompts(), *task.heldout_prompts()]
    more = task.letters if isinstance(task, HasAlphabet) else ""
    return "".join(
        sorted({letter for prompt in prompts for letter in _letters(prompt)} | set(more))
    )


def _letters(prompt: Prompt) -> str:
    return "".join(
        [
            *(message.content for message in prompt.messages),
            prompt.answer or "",
            prompt.response or "",
        ]
    )


def make_scratch_model(
    folder: Path, config: ScratchConfig, alphabet: str, prompts: Sequence[Prompt]
) -> None:
    """Write a model folder: seeded random weights, a character tokenizer, pretrained on the prompts' answers if asked."""
    tokenizer = character_tokenizer(alphabet)
    renderer = Renderer(tokenizer, stop_ids=stop_ids(tokenizer, None))
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = AutoModelForCausalLM.from_config(
            _architecture(config, len(tokenizer), min(renderer.stop_ids))
        )
        if config.pretrain.steps:
            _pretrain(model, renderer, config.pretrain, prompts, config.seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _architecture(config: ScratchConfig, vocabulary: int, eos: int):  # type: ignore[no-untyped-def]
    rows = max(vocabulary, config.padded_vocabulary or 0)
    kind = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3_text"}[config.architecture]
    extra = (
        {"final_logit_softcapping": 30.0, "sliding_window": 32}
        if config.architecture == "gemma3"
        else {}
    )
    return AutoConfig.for_model(
        kind,
        vocab_size=rows,
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=max(config.heads // 2, 1),
        head_dim=config.hidden_size // config.heads,
        max_position_embeddings=MAX_POSITIONS,
        attention_dropout=config.dropout,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=0,
        **extra,
    )


def _pretrain(
    model: PreTrainedModel,
    renderer: Renderer,
    settings: PretrainConfig,
    prompts: Sequence[Prompt],
    seed: int,
) -> None:
    """Cross-entropy on the answers (the stop token included), prompts drawn at random."""
    stop = min(renderer.stop_ids)
    pairs = [
        (renderer.render(prompt.messages), [*renderer.encode(prompt.answer or ""), stop])
        for prompt in prompts
        if prompt.answer is not None
    ]
    if not pairs:
        raise DataError(
            "pretrain.steps is set, but no training prompt has an answer to learn; write pretrain: {steps: 0}"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(settings.steps):
        chosen = [
            pairs[index]
            for index in torch.randint(len(pairs), (settings.batch,), generator=generator).tolist()
        ]
        ids, mask = pad_sequences(
            [(*prompt, *answer) for prompt, answer in chosen], side="right", device=model.device
        )
        labels = torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(chosen):
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        logits = model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - step / settings.steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
