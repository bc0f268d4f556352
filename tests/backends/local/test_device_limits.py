"""Default limits: unchanged on a CPU, larger on a GPU; limits of a recipe are used exactly."""

import torch

from practicum.backends.local import Config
from practicum.backends.local.device_limits import ON_CPU, find_limits, size_gpu
from practicum.backends.local.trainer import TrainerLimits, build_limits

CPU = torch.device("cpu")


def test_a_cpu_has_the_limits_of_its_caches():
    assert find_limits(CPU) == ON_CPU
    assert build_limits(CPU) == TrainerLimits() == TrainerLimits(None, 128, 64, 1024)


def test_a_gpu_has_larger_passes_and_a_share_of_its_memory():
    large, small = size_gpu(80 * 2**30), size_gpu(16 * 2**30)
    assert (large.graph_mib, small.graph_mib) == (20 * 1024, 4 * 1024)
    assert large.decode_bytes + large.graph_mib * 2**20 < 80 * 2**30
    assert large.scored_tokens == small.scored_tokens > ON_CPU.scored_tokens
    assert large.chunk_tokens > ON_CPU.chunk_tokens


def test_what_a_recipe_sets_is_taken():
    config = Config(chunk_tokens=7, sampling_batch=3, graph_mib=5, micro_batch_tokens=9)
    assert build_limits(CPU, config) == TrainerLimits(9, 7, 3, 5)
