"""The folder of one run: its files, its lock, its journals and its checkpoints.

    runs/NAME/
        recipe.json      the resolved recipe
        metrics.jsonl    one row per step
        rollouts.jsonl   the sampled completions
        alarms.jsonl     one row per alarm of a monitor
        rejected.jsonl   rows of the data that were left out, and why
        checkpoints/     step-N/ folders, each with a manifest of sizes and SHA-256 sums
        summary.json, report.html, models/

Everything on disk is JSON or safetensors: a pickle could run code when it is read.
"""

from practicum.run_dir import shapes
from practicum.run_dir.best import BestMetric, BestTracker, recall_best
from practicum.run_dir.changes import propose_flags, split_changes
from practicum.run_dir.checkpoints import MANIFEST, Checkpoint, find_checkpoint
from practicum.run_dir.contents import JournalRecord, check_journal
from practicum.run_dir.differences import (
    Difference,
    collect_versions,
    compare_versions,
    list_changed_fields,
    list_changed_parts,
)
from practicum.run_dir.files import (
    RESTORE,
    is_alive,
    prepare_folder,
    read_json,
    shorten_path,
    to_json_number,
    write_bytes,
    write_json,
    write_text,
)
from practicum.run_dir.folder import RunDir
from practicum.run_dir.journal import Journal, parse_row, read_rows, truncate_journal
from practicum.run_dir.saving import CheckpointWriter, check_space, save_checkpoint

__all__ = [
    "MANIFEST",
    "RESTORE",
    "BestMetric",
    "BestTracker",
    "Checkpoint",
    "CheckpointWriter",
    "Difference",
    "Journal",
    "JournalRecord",
    "RunDir",
    "check_journal",
    "check_space",
    "collect_versions",
    "compare_versions",
    "find_checkpoint",
    "is_alive",
    "list_changed_fields",
    "list_changed_parts",
    "parse_row",
    "prepare_folder",
    "propose_flags",
    "read_json",
    "read_rows",
    "recall_best",
    "save_checkpoint",
    "shapes",
    "shorten_path",
    "split_changes",
    "to_json_number",
    "truncate_journal",
    "write_bytes",
    "write_json",
    "write_text",
]
