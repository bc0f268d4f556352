"""Engines that sample for a student, one file each; its name is the key of `rollout.engine`.

_trainer    a trainer whose student samples by an engine, and the checks of handed-over weights
_requests   requests and answers in vLLM's words, the same in process and at a server
_process    vLLM in this process
_service    vLLM behind a URL
"""
