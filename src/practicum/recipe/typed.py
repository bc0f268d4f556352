"""The sections of a recipe as typed dicts, for the completion of `practicum.distill(student={...})`.

Written by `python -m tests.test_docs` from the models that validate recipes; they decide what is
valid. A section of a plug-in has the keys of all its types.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class StudentSection(TypedDict, total=False):
    """The section `student`."""

    model: str | Mapping[str, Any]
    dtype: Literal["auto", "float32", "bfloat16"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    template: str | None
    system: str | None
    thinking: bool | None
    stop: Sequence[str]
    trust_remote_code: bool
    longest_text: int | None
    lora: Mapping[str, Any] | None
    trainable_layers: int | None
    quantization: Literal["int8", "nf4"] | None
    train_encoder: bool
    dropout: bool
    drafter: Mapping[str, Any] | None


class BackendSection(TypedDict, total=False):
    """The section `backend`."""

    type: Literal["flow", "local", "ray", "tinker", "torchrun"] | str
    policy: Literal["dx", "gmflow"]
    components: int
    steps: int
    substeps: int
    micro_batch_tokens: int | None
    graph_mib: int | None
    chunk_tokens: int | None
    sampling_batch: int | None
    decoding: Literal["auto", "native", "graph", "torch"]
    trainers: int
    nodes: int
    patience: float
    start_patience: float
    silence: float
    samplers: int
    teachers: int | Literal["beside"]
    teacher_shards: int
    restarts: int
    url: str
    allow_http: bool
    api_key_env: str | None
    timeout: float
    retry_seconds: float
    seed_bits: int
    tokenizer: str | None
    probe: bool
    fixed: Sequence[Literal["betas", "epsilon", "max_grad_norm", "weight_decay"]]


class TeacherSection(TypedDict, total=False):
    """The section `teacher`."""

    type: (
        Literal[
            "cached",
            "chat_api",
            "expert",
            "model",
            "none",
            "openai_api",
            "pool",
            "privileged",
            "route",
            "scripted",
            "self",
            "text_only",
            "tinker",
            "translated",
            "velocity",
        ]
        | str
    )
    teacher: str | Mapping[str, Any]
    folder: str | None
    max_mib: float
    url: str
    allow_http: bool
    api_key_env: str | None
    concurrency: int
    timeout: float
    tokens_per_second: float
    retry_seconds: float
    parameters: int | None
    protocol: Literal["openai", "anthropic"]
    model: str | Mapping[str, Any] | None
    system: str | None
    prices: Mapping[str, Any] | None
    budget: float | None
    reuse: bool
    softness: float
    dtype: Literal["auto", "float32", "bfloat16"]
    device: Literal["auto", "cpu", "cuda", "mps"]
    template: str | None
    thinking: bool | None
    stop: Sequence[str] | str | None
    trust_remote_code: bool
    longest_text: int | None
    residency: Literal["resident", "swap", "disk", "shared"]
    quantization: Literal["int8", "nf4", "nvfp4"] | None
    tokenizer: str | None
    dialect: Literal["auto", "vllm", "sglang", "echo", "chat"]
    largest_k: int
    token_budget: int | None
    canary_every: int
    temperature: float
    states: Mapping[str, Any] | None
    canary: float | None
    kind: Literal["geometric", "arithmetic", "sum"]
    teachers: Mapping[str, Any]
    weights: Mapping[str, Any] | Literal["live", "frozen", "ema", "periodic"]
    gate: float | None
    demonstrations: Sequence[Mapping[str, Any]]
    reference: str | Sequence[str] | None
    place: Literal["question", "answer"]
    question: str | Sequence[str] | None
    images: Literal["none", "teacher"] | None
    missing: Literal["error", "silent"]
    siblings: int
    key: str
    default: str | None
    tape: str | None
    run: Mapping[str, Any] | None
    rate: float
    period: int
    seed_bits: int
    model_path: str | None
    credit: Literal["word", "span"]
    refine: int
    network: Mapping[str, Any] | None
    path: Literal["own", "data"]


class TaskSection(TypedDict, total=False):
    """The section `task`."""

    type: (
        Literal[
            "calculator",
            "datasets",
            "frozen_lake",
            "gymnasium",
            "jsonl",
            "memos",
            "mixture",
            "needles",
            "openenv",
            "played",
            "programs",
            "python_expressions",
            "reasoning_gym",
            "reverse",
            "served",
            "shapes",
            "shell",
            "skills",
            "sokoban",
            "spoken",
            "tools",
            "topics",
            "traces",
            "user",
            "verifiers",
            "walker",
        ]
        | str
    )
    digits: int | str
    operators: str
    tags: Sequence[str] | None
    sloppy: float
    turns: int
    bad_calls: int
    train_size: int
    heldout_size: int
    seed: int | None
    path: str | Sequence[str]
    heldout: int | float | str | Sequence[str]
    columns: Mapping[str, Any]
    strict: bool
    verifier: Literal["exact", "contains", "number", "first_line", "math", "tests"] | str | Any
    reward_range: Sequence[float]
    step_rewards: bool
    sandbox: Literal["require", "best_effort", "off"] | Literal["require", "best_effort"]
    max_rejected: float
    name: str | None
    split: str
    rules: bool
    letters: bool
    slip: float
    size: int
    slippery: bool
    env: str
    kwargs: Mapping[str, Any]
    view: Literal["state", "frame"]
    bins: int
    instruction: str | None
    expert: str | None
    reward: Literal["last", "sum"]
    max_row_bytes: int
    train: Sequence[Literal["memos", "instructions"]] | Sequence[str] | None
    memos: int
    shape: Literal["ring", "pictures"]
    spread: float | int
    words: int
    url: str
    action: str
    observation: str
    reset: Mapping[str, Any]
    seconds: float
    run: Mapping[str, Any]
    task: str | Mapping[str, Any]
    note: str | None
    keep: int | None
    scope: Literal["run", "prompt"]
    shortest: int
    longest: int
    generator: str
    config: Mapping[str, Any]
    alphabet: str
    host: str
    port: int
    token_file: str | None
    shows: Literal["picture", "caption", "blank", "either"]
    heldout_shows: Literal["picture", "caption", "blank", "either"] | None
    asks: Literal["any", "list", "result"] | Sequence[str]
    most: int
    files: int
    least_wrong: int
    inputs: int
    turn_rewards: bool | Literal["judged"]
    train_seed: int | None
    skills: Sequence[str]
    boxes: int
    walls: float
    noise: float
    silent: bool
    tools: Sequence[str | Mapping[str, Any]]
    calls: Literal["auto", "hermes", "xml", "glm", "mistral", "lfm", "pythonic", "json"]
    characters: int
    topics: Any
    tries: int
    right: str
    wrong: str
    lines: bool
    bonus: float
    taskset: str
    settings: Mapping[str, Any]
    harness: str | None
    runs_code_here: bool


class RolloutSection(TypedDict, total=False):
    """The section `rollout`."""

    source: str | Mapping[str, Any]
    replay_size: int | str
    engine: str | Mapping[str, Any] | None
    draft: Mapping[str, Any] | None
    n: int | str
    max_new_tokens: int | str
    segment_tokens: int | str | None
    max_turns: int | str | None
    episodes: Mapping[str, Any]
    temperature: float | str
    top_p: float | str
    top_k: int | str
    max_staleness: int | str


class ObjectiveSection(TypedDict, total=False):
    """The section `objective`."""

    losses: Sequence[Mapping[str, Any]]
    aggregate: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ]
    aggregate_norm: float | str | None
    signal: str | Mapping[str, Any]
    against: Literal["teacher", "reference"]
    target: str | Mapping[str, Any]
    divergence: str | Mapping[str, Any]
    estimator: str | Mapping[str, Any]
    correction: str | Mapping[str, Any]
    advantage_logprob: Literal["learner", "sampler"]
    reward: str | Mapping[str, Any]
    scorer: str
    clip: str | Mapping[str, Any]
    weights: str | Mapping[str, Any]
    samples: str | Mapping[str, Any]
    filter: Literal["all", "correct", "incorrect", "failed_group", "solved_group"]
    source: Literal["all", "student", "dataset", "teacher", "reference", "environment"]
    context: Literal["student", "teacher"]
    coefficient: float | str


class OptimizerSection(TypedDict, total=False):
    """The section `optimizer`."""

    learning_rate: float | str
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int | str
    betas: Sequence[float]
    weight_decay: float | str
    max_grad_norm: float | str


class TrainSection(TypedDict, total=False):
    """The section `train`."""

    steps: int
    prompts_per_step: int
    updates_per_step: int
    epochs: int
    curriculum: Mapping[str, Any] | None
    checkpoint_every: int | None
    keep_checkpoints: int
    metric_for_best_model: Literal["accuracy", "reverse_kl"] | None
    save_in_background: bool
    threads: int | None
    budget: Mapping[str, Any] | None


class EvaluationSection(TypedDict, total=False):
    """The section `evaluation`."""

    prompts: int
    samples: int
    temperature: float
    max_new_tokens: int | None
    max_turns: int | None
    teacher: bool
    every: int | None
    search: Mapping[str, Any] | None


class MonitorsSection(TypedDict, total=False):
    """The section `monitors`."""

    action: Literal["off", "log", "warn", "checkpoint", "finish", "pause", "stop"] | None
    level: float | None
    change: float | None
    persistence: int | None
    set: Mapping[str, Any]


class TrackingSection(TypedDict, total=False):
    """The section `tracking`."""

    type: Literal["mlflow", "tensorboard", "trackio", "wandb"] | str
    experiment: str
    uri: str | None
    folder: str | None
    project: str
    entity: str | None
    group: str | None
    mode: Literal["online", "offline"] | None


class PricesSection(TypedDict, total=False):
    """The section `prices`."""

    currency: str
    machine_hour: float | None
    million_sampled_tokens: float | None
    million_scored_tokens: float | None
