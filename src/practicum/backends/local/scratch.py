"""Make from-scratch models: a small architecture with random weights, optionally pretrained.

Pretraining teaches the task's answers, or whole responses where a prompt has one.
"""

import contextlib
import hashlib
import os
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import ModuleType

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from practicum.backends.local import scratch_speech, scratch_vision
from practicum.backends.local.packing import pad_sequences
from practicum.backends.local.pictures import (
    SOUND_FAMILIES,
    Pictures,
    choose_class,
    open_pictures,
)
from practicum.core.randomness import seed_of
from practicum.core.waits import Wait, show_wait
from practicum.errors import DataError
from practicum.models.config import PretrainConfig, ScratchConfig
from practicum.ports import (
    Task,
)
from practicum.rollouts.fields import list_prompt_fields
from practicum.text import TOKENIZERS, Renderer, collect_stop_ids
from practicum.text.from_scratch import add_media_token
from practicum.text.placeholders import fill_placeholders, list_placeholders
from practicum.types import Message, Prompt

MAX_TURNS = 256
"""The maximum number of turns in an expert's conversation for pretraining."""

SENSES: Mapping[str, ModuleType] = {
    "llava": scratch_vision,
    **dict.fromkeys(SOUND_FAMILIES, scratch_speech),
}
"""The module with the part that reads pictures or sounds, by the architecture."""

LOSSES = 10
"""The number of steps for the mean loss that can end pretraining."""


def prepare_scratch_folder(
    folder: Path, config: ScratchConfig, task: Task, template: str | None = None
) -> Path:
    """Return the folder of a from-scratch model; the first call makes the model.

    Its vocabulary is the task's characters, and it is pretrained on the task's answers, or on the
    turns of its expert, after prompts in the chat template that the recipe gives it, if any.
    """
    if not (folder / "config.json").is_file():
        # Rename when complete, so that an interrupted call leaves no incomplete model.
        temporary = folder.with_name(f"{folder.name}.tmp")
        lessons = list_lessons(task, config.seed) if config.pretrain.steps else []
        if config.pretrain.question is not None:
            lessons = [_ask(prompt, config.pretrain.question) for prompt in lessons]
        _copy_or_build(temporary, config, collect_alphabet(task), lessons, template)
        temporary.rename(folder)
    return folder


def _copy_or_build(
    folder: Path,
    config: ScratchConfig,
    alphabet: str,
    lessons: Sequence[Prompt],
    template: str | None,
) -> None:
    """Write a model folder; runs of a comparison that need the same model build it once."""
    if not (shared := os.environ.get("PRACTICUM_SHARED_MODELS")):
        build_scratch_model(folder, config, alphabet, lessons, template)
        return
    parts = (config.model_dump_json(), torch.get_num_threads(), alphabet, lessons, template)
    model = Path(shared) / hashlib.sha256(repr(parts).encode()).hexdigest()
    if not model.is_dir():
        with tempfile.TemporaryDirectory(dir=shared) as temporary:
            built = Path(temporary) / "model"
            build_scratch_model(built, config, alphabet, lessons, template)
            # A parallel run may have made the same model in the meantime.
            with contextlib.suppress(OSError):
                built.rename(model)
    shutil.copytree(model, folder, dirs_exist_ok=True)


def collect_alphabet(task: Task) -> str:
    """Return every character of the task once, sorted."""
    characters = set(task.letters)
    for prompt in (*task.train_prompts(), *task.heldout_prompts()):
        characters.update(*(message.content for message in prompt.messages))
        characters.update(prompt.answer or "", prompt.response or "")
    return "".join(sorted(characters))


def list_lessons(task: Task, seed: int) -> Sequence[Prompt]:
    """List the pretraining examples: the training prompts with their answers.

    For a task with conversations, they are the turns of one conversation of its expert about each
    prompt. Raises DataError if a conversation does not end.
    """
    if not (task.has_expert and task.opens_episodes):
        return task.train_prompts()
    lessons = []
    for prompt in task.train_prompts():
        draw, turns = random.Random(seed_of(seed, "pretrain", prompt.id)), list[str]()
        messages, reply = list(prompt.messages), None
        with closing(task.open(prompt, seed)) as episode:
            while reply is not None or not turns:
                if len(turns) == MAX_TURNS:
                    raise DataError(
                        f"pretrain: the task's conversation with its expert about {prompt.id!r} has "
                        f"not ended after {MAX_TURNS} turns; set pretrain: {{steps: 0}}"
                    )
                texts = task.expert(prompt, turns)
                turns += draw.choices(list(texts), list(texts.values()))
                lessons.append(
                    replace(prompt, messages=tuple(messages), answer=turns[-1], response=None)
                )
                reply = episode.step(turns[-1]).message
                messages += [Message("assistant", turns[-1]), *filter(None, (reply,))]
    return lessons


def _ask(prompt: Prompt, question: str) -> Prompt:
    """Return the prompt with another question; DataError if it lacks a field of a placeholder."""
    fields = list_prompt_fields(prompt)
    if lacking := set(list_placeholders(question)) - set(fields):
        raise DataError(
            f"pretrain.question: prompt {prompt.id!r} has no field {min(lacking)!r}; its fields are "
            f"{', '.join(fields)}"
        )
    return replace(prompt, messages=(Message("user", fill_placeholders(question, fields)),))


def build_scratch_model(
    folder: Path,
    config: ScratchConfig,
    alphabet: str,
    prompts: Sequence[Prompt],
    template: str | None = None,
) -> None:
    """Write a model folder: seeded weights, pretrained if configured, and a tokenizer."""
    tokenizer = TOKENIZERS[config.tokenizer](alphabet)
    senses = SENSES.get(config.architecture)
    if senses is not None:
        add_media_token(tokenizer, senses.TOKEN)
    renderer = Renderer(tokenizer, template=template, stop_ids=collect_stop_ids(tokenizer, None))
    described = _build_config(config, tokenizer, min(renderer.stop_ids))
    if senses is not None:
        # Pretraining reads pictures and sounds by the processor in the folder.
        described.save_pretrained(folder)
        senses.write_processor(folder)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = choose_class(described.model_type).from_config(described)
        if config.pretrain.steps:
            pictures = None if senses is None else open_pictures(str(folder), tokenizer)
            _pretrain(model, renderer, config.pretrain, prompts, config.seed, pictures)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _build_config(
    config: ScratchConfig, tokenizer: PreTrainedTokenizerBase, eos: int
) -> PretrainedConfig:
    settings = {
        "vocab_size": max(len(tokenizer), config.padded_vocabulary or 0),
        "hidden_size": config.hidden_size,
        "intermediate_size": 4 * config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": max(config.heads // 2, 1),
        "head_dim": config.hidden_size // config.heads,
        "max_position_embeddings": config.positions,
        "attention_dropout": config.dropout,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": 0,
    }
    if config.architecture in SENSES:
        return SENSES[config.architecture].describe_model(config, tokenizer, settings)
    is_gemma = config.architecture == "gemma3"
    kind = "gemma3_text" if is_gemma else config.architecture
    extra = {"final_logit_softcapping": 30.0, "sliding_window": 32} if is_gemma else {}
    return AutoConfig.for_model(kind, **settings, **extra)


def _pretrain(
    model: PreTrainedModel,
    renderer: Renderer,
    settings: PretrainConfig,
    prompts: Sequence[Prompt],
    seed: int,
    pictures: Pictures | None,
) -> None:
    """Train by cross-entropy on responses, else answers, and the stop token; prompts are drawn at random."""
    stop = min(renderer.stop_ids)
    if pictures is not None:
        renderer = replace(renderer, pictures=pictures.open_reader())
    pairs = [
        (renderer.render(prompt.messages), [*renderer.encode(text), stop])
        for prompt in prompts
        if (text := prompt.answer if prompt.response is None else prompt.response) is not None
    ]
    if not pairs:
        raise DataError(
            "pretrain.steps is set, but no training prompt has an answer to learn; set pretrain: "
            "{steps: 0}"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, fused=True)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    with show_wait("pretraining from scratch: steps", settings.steps) as wait:
        _take_steps(model, optimizer, pairs, settings, generator, wait, pictures)
    model.eval()


def _take_steps(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    settings: PretrainConfig,
    generator: torch.Generator,
    wait: Wait,
    pictures: Pictures | None,
) -> None:
    """Take the steps of pretraining on pairs of prompt and answer; the learning rate falls to 0.

    Raises DataError if `settings.loss` is set and not reached.
    """
    losses: deque[float] = deque(maxlen=LOSSES)
    for step in range(settings.steps):
        indices = torch.randint(len(pairs), (settings.batch,), generator=generator).tolist()
        chosen = [pairs[index] for index in indices]
        ids, mask = pad_sequences(
            [(*prompt, *answer) for prompt, answer in chosen], side="right", device=model.device
        )
        labels = torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(chosen):
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": mask.long()}
        inputs |= {} if pictures is None else pictures.collect(model, ids, mask)
        logits = model(**inputs).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * (1 - step / settings.steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wait.advance()
        if settings.loss is not None:
            losses.append(loss.item())
            if len(losses) == LOSSES and fmean(losses) <= settings.loss:
                return
    if settings.loss is not None:
        raise DataError(
            f"pretrain: the mean loss of the last {len(losses)} of {settings.steps} steps is "
            f"{fmean(losses):.3g}; set a larger pretrain.steps, or pretrain.loss above it"
        )
