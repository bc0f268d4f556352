"""A micro-batch that does not fit is halved until it fits, and an error names a row that never fits."""

import subprocess
import sys

import pytest
import torch

from practicum.backends.local.ranks import is_out_of_memory
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.errors import ResourceError
from practicum.objective import Objective

from .tiny import data_for, tiny


def test_errors_of_the_allocators_are_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    )
    assert not is_out_of_memory(
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)")
    )


class TooLarge(torch.overrides.TorchFunctionMode):
    """A machine on which no linear map may read more than `rows` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear and args[0].numel() // args[0].shape[-1] > self.rows:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 9 bytes."
            )
        return func(*args, **(kwargs or {}))


def test_halving_gives_the_gradient_of_the_whole_batch():
    data = data_for(tiny(seed=1))
    student, twin = tiny(), tiny()
    plain, poor = LocalTrainer(twin), LocalTrainer(student, TrainerLimits(64, 16))
    for trainer in (plain, poor):
        trainer.forward_backward(data[:2], Objective(), 0)
    plain.forward_backward(data, Objective(), 0)
    with TooLarge(rows=16):
        result = poor.forward_backward(data, Objective(), 0)
    assert result.metrics["halvings"] == 2
    assert (poor.limits.micro_batch_tokens, poor.limits.chunk_tokens) == (10, 4)
    for name, parameter in student.trainable_parameters().items():
        torch.testing.assert_close(
            parameter.grad, twin.trainable_parameters()[name].grad, rtol=1e-5, atol=1e-6
        )


def test_one_sequence_that_does_not_fit_is_said():
    trainer, data = LocalTrainer(tiny(), TrainerLimits(64, 16)), data_for(tiny(seed=1))
    message = r"one sequence of 14 tokens does not fit in memory \(\[enforce fail .* 9 bytes.\); shorten rollout.max_new"
    with TooLarge(rows=5), pytest.raises(ResourceError, match=message):
        trainer.forward_backward(data, Objective(), 0)
    assert all(
        parameter.grad is None
        for parameter in trainer.language_model.trainable_parameters().values()
    )


def test_other_errors_pass_unchanged():
    data = data_for(tiny(seed=1))
    trainer = LocalTrainer(tiny())
    trainer.language_model.model.model.layers[0].mlp.up_proj.weight.data = torch.zeros(3, 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.forward_backward(data, Objective(), 0)
    assert trainer.limits == TrainerLimits()


CHILD = """
import resource, torch
from backends.tiny import data_for, rollout, tiny
from practicum.backends.local.trainer import LocalTrainer, TrainerLimits
from practicum.objective import Objective

torch.set_num_threads(1)
student = tiny()
data = data_for(tiny(seed=1), [rollout(50, 200, seed) for seed in range(160)])
trainer = LocalTrainer(student, TrainerLimits(10**6, 10**6))
small = LocalTrainer(tiny(), TrainerLimits(500, 100))
expected = small.forward_backward(data, Objective(), 0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 160 * 2**20, resource.RLIM_INFINITY))
result = trainer.forward_backward(data, Objective(), 0)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert result.metrics["halvings"] >= 1, result.metrics
assert abs(result.metrics["loss"] / expected.metrics["loss"] - 1) < 1e-5
for name, parameter in student.trainable_parameters().items():
    torch.testing.assert_close(parameter.grad, small.language_model.trainable_parameters()[name].grad, rtol=1e-3, atol=1e-5)
print("halvings", result.metrics["halvings"])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits as Linux has them")
def test_a_process_with_little_memory_halves_and_goes_on(request):
    folder = request.config.rootpath / "tests"
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.startswith("halvings")
