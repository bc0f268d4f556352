"""Save a checkpoint completely or not at all; the old files are removed only after the new files
are in place.

A checkpoint is written into `step-N.tmp-PID`, every file synced, the manifest last, and then
renamed to `step-N`. A process killed at any moment leaves either the old set of checkpoints or the
new one.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from practicum.core.faults import inject_fault
from practicum.core.options import spell_options
from practicum.errors import ResourceError
from practicum.models.files import digest_file
from practicum.models.tensors import HEADER_BYTES, SavedTensor, write_tensors
from practicum.run_dir.checkpoints import (
    FILE_NAME,
    JOURNALS,
    MANIFEST,
    CheckpointDamage,
    check_manifest,
    is_complete,
    step_folders,
)
from practicum.run_dir.contents import RECORDS, JournalRecord
from practicum.run_dir.differences import collect_versions
from practicum.run_dir.files import (
    build_resource_error,
    discard,
    encode_json,
    remove_debris,
    sync,
    write_synced,
)
from practicum.run_dir.folder import RunDir

TAG = "TAG"
"""The file with the reason to keep a checkpoint of any age."""

_MIB = 2**20
# The bytes that a manifest and a file system's blocks may take beyond the tensors themselves.
_SPARE_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """A function that writes its own files into a checkpoint's folder, and their size in bytes."""

    write: Callable[[Path], None]
    size: int


def save_checkpoint(  # noqa: PLR0913  (the parts of a checkpoint)
    run_dir: RunDir,
    step: int,
    tensors: Mapping[str, Mapping[str, SavedTensor]],
    state: Mapping[str, object],
    *,
    writer: CheckpointWriter | None = None,
    keep: int = 2,
    kept_step: int | None = None,
    tag: str | None = None,
    packages: Sequence[str] = (),
    journals: Mapping[str, JournalRecord] | None = None,
) -> Path:
    """Save `tensors` (file stem to named tensors), `state` and the files of `writer` as `step-N`.

    Then remove all but the `keep` newest checkpoints: by default two, one to resume from and one to
    fall back to if the disk damages the first. A checkpoint with a `tag` (the reason to keep it) is
    never removed and does not count; the same is true for step `kept_step`. `packages` are the
    packages of this run that practicum does not require; their versions are recorded. `journals` are
    the records of the run's journals.
    """
    assert keep >= 1, f"keep is {keep}, but a run keeps at least the checkpoint it just wrote"
    assert state.get("step", step) == step, f"step is {step}, the state says {state.get('step')}"
    texts = {
        "state.json": encode_json({**state, "step": step}) + "\n",
        "versions.json": encode_json(collect_versions(packages), indent=2) + "\n",
        **({} if tag is None else {TAG: tag + "\n"}),
        **({} if journals is None else {JOURNALS: RECORDS.dump_json(dict(journals)).decode()}),
    }
    folder = run_dir.checkpoints
    temporary = folder / f"step-{step}.tmp-{os.getpid()}"
    final = folder / f"step-{step}"
    needed = _count_bytes(tensors, texts) + (0 if writer is None else writer.size)
    try:
        if folder.is_symlink():
            raise ResourceError(f"{folder} became a symbolic link; put the folder back and resume")
        remove_debris(folder)
        # Checked first: a disk that fills up halfway would also stop the journals.
        if shutil.disk_usage(folder).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _write(temporary, step, tensors, texts, writer)
        inject_fault("save.before_rename")
        _put_in_place(temporary, final)
        _prune(folder, final, step, keep, kept_step)
    except ResourceError:
        raise
    except OSError as error:
        raise _explain_failure(step, needed, folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def check_space(run_dir: RunDir, size: int) -> None:
    """Raise ResourceError if the disk lacks `size` bytes; a run calls this before it trains."""
    free = shutil.disk_usage(run_dir.path).free
    if free < size + _SPARE_BYTES:
        raise ResourceError(
            f"a checkpoint of this run needs {(size + _SPARE_BYTES) / _MIB:.1f} MiB, "
            f"{free / _MIB:.1f} MiB free in {run_dir.path}; "
            f"free space, or use {spell_options(out='a folder on another disk')}"
        )


def _write(
    folder: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, SavedTensor]],
    texts: Mapping[str, str],
    writer: CheckpointWriter | None,
) -> None:
    """Write every file of a checkpoint into a new folder, the manifest last."""
    folder.mkdir()
    # safetensors writes files that only their owner can read; the new folder has the umask's mode.
    mode = folder.stat().st_mode & 0o666
    if writer is not None:
        writer.write(folder)
    for stem, named in tensors.items():
        assert FILE_NAME.fullmatch(stem), f"{stem!r} cannot be a file's name"
        write_tensors(folder / f"{stem}.safetensors", named)
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        (folder / name).chmod(mode)
        sync(folder / name)
    inject_fault("save.after_tensors")
    for name, text in texts.items():
        write_synced(folder / name, text.encode())
    files = {
        name: {"size": (folder / name).stat().st_size, "sha256": digest_file(folder / name)}
        for name in [*names, *texts]
    }
    manifest = encode_json({"step": step, "files": files}, indent=2) + "\n"
    write_synced(folder / MANIFEST, manifest.encode())
    sync(folder)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename the finished folder to its final name."""
    # A folder cannot be renamed onto a full one, so an earlier save of the step makes room under a
    # name that a resume also finds: a kill between the two renames loses nothing.
    aside = None
    if os.path.lexists(final):
        names = (final.with_name(f"{final.name}.old-{number}") for number in itertools.count())
        aside = next(name for name in names if not os.path.lexists(name))
        os.rename(final, aside)
    os.rename(temporary, final)
    inject_fault("save.after_rename")
    sync(final.parent)
    if aside is not None:
        discard(aside)


def _prune(folder: Path, newest: Path, step: int, keep: int, kept_step: int | None) -> None:
    """Remove all but the `keep` newest checkpoints up to `step`, and `kept_step`. Links are
    kept."""
    # A later step belongs to a history that this run left when it resumed from an earlier one, and
    # a folder without its manifest or with files of a wrong size can never be resumed from.
    try:
        check_manifest(newest, step)
    except CheckpointDamage as damage:
        raise ResourceError(
            f"checkpoint {newest} is damaged right after it was written ({damage}), "
            "older ones are kept; check the disk and resume"
        ) from damage
    count = 1
    for older_step, path in list(step_folders(folder)):
        if path == newest or path.is_symlink() or not path.is_dir():
            continue
        is_protected = older_step == kept_step or (path / TAG).is_file()
        is_resumable = older_step < step and (is_protected or count < keep)
        if not is_resumable or not is_complete(path, older_step):
            discard(path)
        elif not is_protected:
            count += 1


def _count_bytes(tensors: Mapping[str, Mapping[str, SavedTensor]], texts: Mapping[str, str]) -> int:
    """Return an upper bound on the bytes of a checkpoint."""
    all_tensors = [tensor for named in tensors.values() for tensor in named.values()]
    size = sum(tensor.nbytes + HEADER_BYTES for tensor in all_tensors)
    return _SPARE_BYTES + sum(map(len, texts.values())) + size


def _explain_failure(step: int, needed: int, folder: Path, error: OSError) -> ResourceError:
    """Return the error of a failed save, with the bytes needed and free if space ran out."""
    problem = f"cannot be saved in {folder}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(folder).free
        if error.errno == errno.ENOSPC and free >= needed and not os.statvfs(folder).f_favail:
            reason = "the disk has no inodes left; remove files and resume"
            return ResourceError(f"checkpoint of step {step} cannot be saved in {folder}: {reason}")
        problem = f"needs {needed / _MIB:.1f} MiB, {free / _MIB:.1f} MiB free in {folder}"
    return build_resource_error(f"checkpoint of step {step} {problem}", error)
