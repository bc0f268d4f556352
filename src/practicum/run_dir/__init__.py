"""The folder of one run: its files, its lock, its journals and its checkpoints.

    runs/NAME/
        recipe.json      what was asked for
        metrics.jsonl    one row a step
        rollouts.jsonl   what the student wrote
        alarms.jsonl     what the monitors found
        rejected.jsonl   what was not trained on, and why
        checkpoints/     step-N/ folders, each with a manifest of sizes and SHA-256 sums
        summary.json, report.html, models/

Everything on disk is JSON or safetensors. Nothing here reads or writes a pickle.
"""

from practicum.run_dir.checkpoints import Checkpoint, find_checkpoint
from practicum.run_dir.differences import changed_fields, compare_versions, current_versions, recipe_differences
from practicum.run_dir.files import json_number, read_json, write_json, write_text
from practicum.run_dir.folder import RunDir
from practicum.run_dir.journal import Journal, read_rows
from practicum.run_dir.saving import check_space, save_checkpoint

__all__ = [
    "Checkpoint",
    "Journal",
    "RunDir",
    "changed_fields",
    "check_space",
    "compare_versions",
    "current_versions",
    "find_checkpoint",
    "json_number",
    "read_json",
    "read_rows",
    "recipe_differences",
    "save_checkpoint",
    "write_json",
    "write_text",
]
