"""The predicted step on a cluster: by hand on a tiny model, and by laws over random work."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.costs import Line, ModelDims, TrainableDims
from practicum.costs.cluster import (
    EFFICIENCY,
    HIDDEN_SHARE,
    TOLERANCE,
    choose_split,
    count_gpus,
    count_sampler_weights,
    count_site_bytes,
    find_smallest,
    forecast_step,
    scale_workload,
)
from practicum.costs.workload import (
    GPUS,
    Cluster,
    LearningWork,
    ScoringWork,
    Split,
    Workload,
)
from practicum.errors import ResourceError

# Qwen3-8B taught by Qwen3-32B: 512 answers of 4,096 tokens after prompts of 512.
SMALL = ModelDims(8_190_000_000, 6_945_000_000, 151_936, 4096, 36, 32, 8, 128)
LARGE = ModelDims(32_760_000_000, 31_200_000_000, 151_936, 5120, 64, 64, 8, 128)
ALL = TrainableDims(SMALL.parameters, 36, SMALL.body, 0, True)
ANSWERS, ANSWER, PROMPT = 512, 4096, 512


def build_work(answers: int = ANSWERS, teacher: ModelDims | None = LARGE) -> Workload:
    tokens, length = answers * ANSWER, PROMPT + ANSWER
    contexts = answers * (ANSWER * PROMPT + ANSWER * (ANSWER + 1) // 2)
    all_contexts = answers * length * (length + 1) // 2
    scorers = (
        ()
        if teacher is None
        else (
            ScoringWork(
                "teacher",
                teacher,
                tokens,
                teacher.count_hidden_flops(answers * length, all_contexts),
                Line(0, 140_000),
            ),
        )
    )
    return Workload(
        student=SMALL,
        learning=ALL,
        completions=answers,
        sampled_tokens=tokens,
        longest_answer=ANSWER,
        longest=length,
        contexts=contexts,
        sample_flops=SMALL.count_hidden_flops(answers * length, all_contexts),
        texts=answers,
        update_tokens=answers * length,
        update_flops=4 * SMALL.count_hidden_flops(answers * length, all_contexts),
        graph=Line(0, 900_000),
        logit_bytes=6 * 1024 * 4 * SMALL.vocabulary,
        scorers=scorers,
    )


def build_cluster(gpus: int = 64, gpu: str = "h100") -> Cluster:
    return Cluster(gpus, GPUS[gpu], min(8, gpus))


def test_a_step_by_hand() -> None:
    """Four trainers, two samplers and two teachers: each phase takes its amount divided by its rate."""
    work, cluster = build_work(), build_cluster(8)
    forecast = forecast_step(work, cluster, Split(4, 2, 2), ahead=False)
    gpu = cluster.gpu
    assert forecast.seconds["score"] == pytest.approx(
        work.scorers[0].flops / (2 * gpu.bfloat16_flops * EFFICIENCY["score"])
    )
    assert forecast.seconds["update"] == pytest.approx(
        work.update_flops / (4 * gpu.bfloat16_flops * EFFICIENCY["update"])
    )
    sent = work.sampled_tokens * 2 * LARGE.width
    assert forecast.links["hidden states to trainers"] == sent
    assert forecast.seconds["send"] == pytest.approx(sent / (2 * 40e9))
    assert forecast.links["weights to samplers"] == 2 * 4 * SMALL.parameters
    assert forecast.step_seconds == pytest.approx(sum(forecast.seconds.values()))
    # Each sampler holds the weights; its packed copy is read once per decode step.
    assert forecast.memory["sampler"] <= cluster.usable_memory
    kept = count_sampler_weights(work)
    slots = (cluster.usable_memory - kept) // SMALL.count_kv_bytes(
        work.contexts // work.sampled_tokens, 2
    )
    steps = -(-work.sampled_tokens // 2 // slots)
    read = steps * 2 * (SMALL.body + SMALL.head) + SMALL.count_kv_bytes(work.contexts, 2) / 2
    assert forecast.seconds["sample"] == pytest.approx(
        read / (gpu.bandwidth * EFFICIENCY["sample"]), rel=1e-3
    )


def in_float32(work: Workload) -> Workload:
    """Return the same work with models in float32."""
    scorers = tuple(replace(scorer, item_bytes=4) for scorer in work.scorers)
    learners = tuple(replace(learner, item_bytes=4) for learner in work.learners)
    return replace(work, scorers=scorers, learners=learners, item_bytes=4)


def test_a_sampler_holds_what_learns_in_float32_rounded_and_packed() -> None:
    """8 bytes per weight of the layers, in both dtypes; 4 of a frozen one in bfloat16."""
    work = build_work()
    maps, rest = SMALL.body, SMALL.parameters - SMALL.body
    assert count_sampler_weights(work) == 8 * maps + 4 * rest + 2 * SMALL.head
    assert count_sampler_weights(in_float32(work)) == 8 * maps + 4 * rest
    adapters = TrainableDims(40_000_000, 36, 0, 40_000_000, False)
    frozen = SMALL.parameters - 40_000_000
    adapted = replace(work, learning=adapters)
    assert count_sampler_weights(adapted) == 4 * 40_000_000 + 2 * frozen + 2 * maps


def test_products_in_float32_take_as_much_longer_as_the_data_sheet_says() -> None:
    work, cluster, split = build_work(), build_cluster(64), Split(24, 16, 24, 4)
    half, full = (forecast_step(w, cluster, split, ahead=False) for w in (work, in_float32(work)))
    for phase in ("score", "update"):
        assert full.seconds[phase] == pytest.approx(half.seconds[phase] * 989 / 67)
    assert full.seconds["sample"] >= 2 * half.seconds["sample"]
    assert full.seconds["send"] == 2 * half.seconds["send"]


@given(
    st.integers(1, 256),
    st.booleans(),
    st.booleans(),
    st.integers(4, 48),
    st.sampled_from(sorted(GPUS)),
    st.booleans(),
)
def test_a_plan_in_float32_is_never_faster(
    answers: int, taught: bool, adapted: bool, gpus: int, gpu: str, ahead: bool
) -> None:
    work, cluster = build_work(answers, LARGE if taught else None), build_cluster(gpus, gpu)
    if adapted:
        adapters = TrainableDims(40_000_000, 36, 0, 40_000_000, False)
        work = replace(work, learning=adapters, learners=(LearningWork("critic", 10**9, 10**15),))
    try:
        slow = choose_split(in_float32(work), cluster, ahead=ahead)[0]
    except ResourceError:
        return  # float32 takes more memory, too
    fast = choose_split(work, cluster, ahead=ahead)[0]
    assert slow.step_seconds >= fast.step_seconds
    same = forecast_step(work, cluster, slow.split, ahead=ahead)
    assert slow.step_seconds >= same.step_seconds
    assert all(slow.seconds[phase] >= same.seconds[phase] for phase in ("sample", "update"))


def test_rollouts_ahead_hide_the_faster_pools_behind_the_slowest() -> None:
    work, cluster, split = build_work(), build_cluster(8), Split(4, 2, 2)
    turns = forecast_step(work, cluster, split, ahead=False)
    ahead = forecast_step(work, cluster, split, ahead=True)
    seconds = ahead.seconds
    learning = seconds["update"] + seconds["wait"]
    slowest = max(seconds["sample"], seconds["score"] + seconds["send"], learning)
    assert ahead.step_seconds == pytest.approx(slowest + seconds["copy"])
    assert ahead.step_seconds < turns.step_seconds


def test_collectives_wait_only_for_what_no_product_hides() -> None:
    work, cluster = build_work(), replace(build_cluster(8), node_link=1e6)
    forecast = forecast_step(work, cluster, Split(8, 2, 2), ahead=False)
    total = forecast.links["between trainers"] / 8 / 1e6
    assert forecast.seconds["wait"] == pytest.approx(
        total - HIDDEN_SHARE * forecast.seconds["update"], rel=1e-6
    )
    fast = forecast_step(work, build_cluster(8), Split(8, 2, 2), ahead=False)
    assert fast.seconds["wait"] == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_the_split_is_the_best_of_all(ahead: bool) -> None:
    work, cluster = build_work(), build_cluster(16)
    forecasts = choose_split(work, cluster, ahead=ahead)
    found = {forecast.split: forecast.step_seconds for forecast in forecasts}
    seconds = list(found.values())
    assert seconds == sorted(seconds)
    for trainers in range(1, 9):
        for samplers in range(1, 16 - trainers):
            split = Split(trainers, samplers, 16 - trainers - samplers)
            try:
                alone = forecast_step(work, cluster, split, ahead=ahead)
            except ResourceError:
                assert split not in found
            else:
                assert found[split] == alone.step_seconds >= seconds[0]


def test_each_of_several_teachers_has_processes_of_its_own_and_the_slowest_counts() -> None:
    work, cluster = build_work(), build_cluster(16)
    small = replace(work.scorers[0], name="small", dims=SMALL, flops=work.scorers[0].flops // 10)
    both = replace(work, scorers=(*work.scorers, small))
    for forecast in choose_split(both, cluster, ahead=False):
        split = forecast.split
        assert split.trainers + split.samplers + 2 * split.teacher_gpus == 16
        assert split.teacher_shards == 1
    alone = forecast_step(work, cluster, Split(4, 4, 4), ahead=False)
    beside = forecast_step(both, cluster, Split(4, 4, 4), ahead=False)
    assert beside.seconds["score"] == alone.seconds["score"]
    assert beside.links["hidden states to trainers"] > alone.links["hidden states to trainers"]


@given(nodes=st.integers(1, 8), answers=st.integers(8, 2048), ahead=st.booleans())
def test_more_gpus_are_never_slower_and_pools_stay_within_their_memory(
    nodes: int, answers: int, ahead: bool
) -> None:
    work = build_work(answers)
    fewer, more = build_cluster(8 * nodes), build_cluster(16 * nodes)
    first, second = (choose_split(work, size, ahead=ahead)[0] for size in (fewer, more))
    assert second.step_seconds <= first.step_seconds * (1 + 1e-9)
    for forecast, cluster in ((first, fewer), (second, more)):
        assert max(forecast.memory.values()) <= cluster.usable_memory
        split = forecast.split
        assert split.trainers + split.samplers + split.teacher_gpus == cluster.gpus


@given(st.sampled_from([4, 16, 64, 512, 2048]), st.booleans(), st.booleans(), st.integers(8, 10))
def test_the_smallest_split_has_the_fewest_gpus_of_the_fast_ones(
    answers: int, taught: bool, ahead: bool, gpus: int
) -> None:
    """Compare with all splits that leave GPUs unused; taking GPUs one by one may miss one of them."""
    work, cluster = build_work(answers, LARGE if taught else None), build_cluster(gpus)
    forecasts = choose_split(work, cluster, ahead=ahead)
    limit = TOLERANCE * forecasts[0].step_seconds
    smallest = find_smallest(work, cluster, forecasts[0].step_seconds, ahead=ahead)
    assert smallest.step_seconds <= limit
    fewest = gpus
    teachers = ["beside", *range(1, gpus)] if taught else [0]
    for trainers, samplers, teacher in product(range(1, gpus), range(1, gpus), teachers):
        split = Split(trainers, samplers, teacher)
        if count_gpus(work, split) < fewest and (trainers <= 8 or trainers % 8 == 0):
            try:
                forecast = forecast_step(work, cluster, split, ahead=ahead)
            except ResourceError:
                continue
            if forecast.step_seconds <= limit:
                fewest = count_gpus(work, split)
    assert fewest <= count_gpus(work, smallest.split) <= fewest + 1


@pytest.mark.parametrize(("ahead", "most"), [(False, 384), (True, 64)])
def test_a_thousand_gpus_for_few_prompts_are_not_recommended(ahead: bool, most: int) -> None:
    work, cluster = build_work(), build_cluster(1024)
    forecasts = choose_split(work, cluster, ahead=ahead)
    assert count_gpus(work, forecasts[0].split) == 1024 and forecasts[0].busy["trainer"] < 0.1
    smallest = find_smallest(work, cluster, forecasts[0].step_seconds, ahead=ahead)
    assert count_gpus(work, smallest.split) <= most
    assert smallest.busy["trainer"] > forecasts[0].busy["trainer"]


def test_the_busy_shares_of_a_step_by_hand() -> None:
    forecast = forecast_step(build_work(), build_cluster(8), Split(4, 2, 2), ahead=False)
    seconds, total = forecast.seconds, forecast.step_seconds
    learning = seconds["update"] + seconds["wait"]
    phases = {"trainer": learning, "sampler": seconds["sample"], "teacher": seconds["score"]}
    assert forecast.busy == pytest.approx({pool: part / total for pool, part in phases.items()})


@given(factor=st.integers(2, 16))
def test_work_grows_in_proportion_to_the_prompts(factor: int) -> None:
    work, cluster = build_work(), build_cluster(8)
    split = Split(8, 2, 2)
    once = forecast_step(work, cluster, split, ahead=False).seconds
    scaled = forecast_step(scale_workload(work, factor), cluster, split, ahead=False).seconds
    for phase in ("score", "send", "update"):
        assert scaled[phase] == pytest.approx(factor * once[phase])
    assert scaled["sample"] <= factor * once["sample"] * (1 + 1e-9)
    assert scaled["copy"] == once["copy"]


def test_as_many_prompts_a_gpu_take_no_longer_on_more_nodes() -> None:
    """Weak scaling: more GPUs also mean smaller shards."""
    few = choose_split(build_work(512), build_cluster(8), ahead=True)[0]
    many = choose_split(build_work(4096), build_cluster(64), ahead=True)[0]
    assert 1.0 <= many.tokens_per_second / (8 * few.tokens_per_second) < 1.2


def test_what_cannot_fit_is_refused_with_what_to_do() -> None:
    cluster = build_cluster(8)
    vast = replace(LARGE, parameters=600_000_000_000, body=590_000_000_000)
    with pytest.raises(
        ResourceError,
        match=r"GPUs that hold it in shards.*or serve it elsewhere and set teacher=",
    ):
        choose_split(build_work(teacher=vast), cluster, ahead=False)
    long = replace(build_work(teacher=None), longest=60_000)
    with pytest.raises(ResourceError, match=r"a text of 60,000 tokens takes .* in an update"):
        choose_split(long, cluster, ahead=False)
    vast_student = replace(build_work(), student=vast)
    with pytest.raises(ResourceError, match="each sampler holds the whole student; take larger"):
        choose_split(vast_student, cluster, ahead=False)
    with pytest.raises(ResourceError, match=r"the student takes .* on each of 1 trainers"):
        forecast_step(build_work(), cluster, Split(1, 4, 3), ahead=False)
    with pytest.raises(ResourceError, match=r"the student with teacher takes .* on each of 1"):
        choose_split(build_work(), build_cluster(2), ahead=False)
    with pytest.raises(ResourceError, match="1 GPU is too few for trainers and samplers"):
        choose_split(build_work(), build_cluster(1), ahead=False)


def test_a_teacher_larger_than_a_gpu_is_held_in_shards() -> None:
    """Two GPUs hold half of it each, plus layers and head in transit."""
    large = replace(LARGE, parameters=50_000_000_000, body=48_000_000_000)
    work, cluster = build_work(teacher=large), build_cluster(16)
    with pytest.raises(ResourceError, match=r"GPUs that hold it in shards"):
        forecast_step(work, cluster, Split(8, 4, 4), ahead=False)
    forecasts = choose_split(work, cluster, ahead=False)
    apart = [f for f in forecasts if f.split.teacher_gpus]
    assert {forecast.split.teacher_shards for forecast in apart} >= {2}
    forecast = next(f for f in apart if f.split == Split(8, 4, 4, 2))
    gathered = 2 * (2 * large.body // large.layers + large.head)
    passed = work.scorers[0].forward.compute_bytes(work.longest)
    assert forecast.memory["teacher"] == 2 * 50_000_000_000 // 2 + gathered + passed
    passes = -(-work.sampled_tokens // 4 // 16384)
    assert forecast.links["between a teacher's shards"] == 4 * passes * 2 * large.body // 2
    # Products of such long passes hide all gathers within a node.
    alone = work.scorers[0].flops / (4 * cluster.gpu.bfloat16_flops * EFFICIENCY["score"])
    assert forecast.seconds["score"] == pytest.approx(alone)


def test_a_teacher_beside_the_trainers_takes_their_time_and_memory() -> None:
    work, cluster = build_work(), build_cluster(8)
    apart = forecast_step(work, cluster, Split(4, 2, 2), ahead=True)
    beside = forecast_step(work, cluster, Split(6, 2, "beside"), ahead=True)
    scorer = work.scorers[0]
    shard = 2 * LARGE.parameters // 6
    assert beside.memory["teacher"] == 0
    # Passes that take no memory do not fill the remainder: only the shard and the head differ.
    tight = replace(work, graph=Line(0, 0))
    with_it, without = (
        forecast_step(w, cluster, Split(6, 2, "beside"), ahead=True).memory["trainer"]
        for w in (tight, replace(tight, scorers=(replace(scorer, is_student=True),)))
    )
    head = 2 * LARGE.head
    assert with_it - without == shard + head
    seconds = beside.seconds
    assert seconds["score"] == pytest.approx(
        scorer.flops / (6 * cluster.gpu.bfloat16_flops * EFFICIENCY["score"])
    )
    learning = seconds["score"] + seconds["send"] + seconds["update"] + seconds["wait"]
    assert beside.step_seconds == pytest.approx(max(seconds["sample"], learning) + seconds["copy"])
    assert apart.step_seconds < apart.seconds["score"] + sum(
        apart.seconds[phase] for phase in ("update", "sample", "copy")
    )


def test_adapters_are_all_that_is_copied() -> None:
    learning = TrainableDims(40_000_000, 36, 0, 40_000_000, False)
    work = replace(build_work(), learning=learning)
    forecast = forecast_step(work, build_cluster(8), Split(4, 2, 2), ahead=False)
    assert forecast.links["weights to samplers"] == 2 * 4 * 40_000_000
    assert count_site_bytes(work)["samplers: weights"] == 4 * 40_000_000


def test_without_a_teacher_no_gpu_scores() -> None:
    forecasts = choose_split(build_work(teacher=None), build_cluster(8), ahead=True)
    assert all(forecast.split.teachers == 0 for forecast in forecasts)
    assert forecasts[0].seconds["score"] == 0


def test_scorers_that_learn_take_a_gpu_each_and_the_time_between_updates() -> None:
    cluster, critic = build_cluster(), LearningWork("scorer-critic", 70 * 10**9, 10**18)
    work = build_work()
    with_two = replace(work, learners=(critic, replace(critic, name="scorer-judge")))
    for ahead in (False, True):
        best = choose_split(with_two, cluster, ahead=ahead)[0]
        split = best.split
        assert split.trainers + split.samplers + split.teacher_gpus <= cluster.gpus - 2
        assert best.seconds["judge"] == 2e18 / (989e12 * EFFICIENCY["update"])
        assert best.memory["judge"] == 70 * 10**9
        plain = forecast_step(work, cluster, split, ahead=ahead)
        assert best.step_seconds >= plain.step_seconds
        if not ahead:
            assert best.step_seconds == pytest.approx(plain.step_seconds + best.seconds["judge"])
    assert scale_workload(with_two, 4).learners[0].flops == 4 * 10**18
    too_large = replace(work, learners=(replace(critic, num_bytes=100 * 10**9),))
    with pytest.raises(ResourceError, match=r"^scorer-critic takes .* on its own GPU.*adapters"):
        choose_split(too_large, cluster, ahead=False)
    with pytest.raises(ResourceError, match=r"^3 GPUs are too few .* next to scorers that learn"):
        choose_split(with_two, build_cluster(3), ahead=False)


def test_bytes_between_sites_by_hand() -> None:
    tokens = ANSWERS * ANSWER
    assert count_site_bytes(build_work()) == {
        "samplers: tokens and log-probabilities": 16 * tokens,
        "samplers: weights": 4 * SMALL.parameters,
        "teachers: sampled tokens": 4 * tokens,
        "teachers: top 64": 384 * tokens,
        "teachers: hidden states": 2 * 5120 * tokens,
        "half of the trainers: gradients": 4 * SMALL.parameters,
    }


def test_copies_of_the_weights_on_several_nodes_add_up_their_gradients() -> None:
    """Two copies of eight shards: each rank sends and receives half of its shard, in float32, in each of 5 passes."""
    work, cluster = build_work(), replace(build_cluster(16), network_link=1e3)
    forecast = forecast_step(work, cluster, Split(16, 2, 2), ahead=False)
    summed = 4 * (5 * (SMALL.parameters - SMALL.head) + SMALL.head)
    between = 2 * summed / 8 / 2
    within = forecast.links["between trainers"] / 16 - between
    assert forecast.seconds["wait"] == pytest.approx(
        within / cluster.node_link + between / 1e3 - HIDDEN_SHARE * forecast.seconds["update"]
    )
