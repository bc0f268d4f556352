"""Shard a model over several processes with torch's FSDP2, for any program that starts processes.

sharding    put a model's weights in shards; read and write single tensors of it
fsdp_ranks  the collectives of an update: passes dealt, head gathered, gradients summed
following   the student as its own teacher
parts       checkpoints in which each process writes some of the tensors
"""
