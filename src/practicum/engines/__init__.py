"""Engines that sample for a student, one file each; its name is the key of `rollout.engine`.

vllm    vLLM in this process or behind a URL
auto    vLLM on a GPU if it is installed, otherwise the backend's own sampler

The engines are implemented in `practicum.engine_service`.
"""
