"""Put up walls around this process, which neither it nor its children can take down.

Only the standard library and calls without special rights are used, so that this works for every
user and in containers.
"""

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable

from practicum.sandbox.syscalls import build_filter, is_known

# Landlock, since Linux 5.13 (Documentation/userspace-api/landlock.rst): calls, rights and scopes,
# each right with the version that introduced it.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_BENEATH = 1
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_FILE_RIGHTS = ((1, (1 << 13) - 1), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
_NETWORK_RIGHTS = ((4, 0b11),)
_SCOPES = ((6, 0b11),)

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_FILTER_MODE = 2
_CAPABILITIES_VERSION = 0x20080522
_READ_ANY_FILE = 1 << 2
"""CAP_DAC_READ_SEARCH: root may read a Python of another user; Landlock decides which files."""


def missing() -> list[str]:
    """Return what this machine cannot wall off, with reasons; empty if all walls can stand."""
    system = platform.system()
    if system != "Linux":
        return [f"files, network, processes and signals ({system} has no Landlock and no seccomp)"]
    lacks = []
    if _read_landlock_version() < 1:
        lacks.append("files (the kernel has no Landlock, or it is off)")
    if not is_known(platform.machine()):
        lacks.append(
            f"network, processes and signals (no filter of system calls for {platform.machine()})"
        )
    return lacks


def isolate_process(
    readable: Iterable[str], limits: dict[str, int], *, forks: bool = False
) -> list[str]:
    """Wall this process in and return the walls that could not be put up.

    `limits` are limits of the module `resource` by name. With `forks` it may start children and
    signal them; each child calls `isolate_child` before it reads anything of a model.
    """
    for name, limit in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        soft_limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (soft_limit, soft_limit))
    lacks = missing()
    if platform.system() != "Linux":
        return lacks
    _drop_rights()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The filter comes last: it forbids the calls that the wall around files needs.
    for name, wall in (
        ("files", lambda: _restrict_files(readable)),
        ("network, processes and signals", lambda: _filter_calls(forks=forks)),
    ):
        if not any(lack.startswith(name) for lack in lacks):
            try:
                wall()
            except OSError as error:
                lacks.append(f"{name} ({error.strerror})")
    return lacks


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent, which must have a single thread."""
    if platform.system() == "Linux":
        _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _read_landlock_version() -> int:
    return _load_libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)


def _restrict_files(readable: Iterable[str]) -> None:
    """Allow reading beneath some folders and no other access to files.

    It also forbids TCP, and signals to and sockets of other processes.
    """
    version = _read_landlock_version()
    supported = [
        [bits for since, bits in rights if since <= version]
        for rights in (_FILE_RIGHTS, _NETWORK_RIGHTS, _SCOPES)
    ]
    attributes = struct.pack("=QQQ", *map(sum, supported))
    # An older kernel has a shorter structure and accepts a longer one if the rest is zero.
    ruleset = _call("syscall", _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path in readable:
        _allow(ruleset, path, _EXECUTE | _READ | _LIST)
    for path in _DEVICES:
        _allow(ruleset, path, _READ | _WRITE)
    _call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        # A missing path needs no permission.
        return
    if not os.path.isdir(path):
        rights &= _EXECUTE | _READ | _WRITE
    try:
        _call("syscall", _ADD_RULE, ruleset, _BENEATH, struct.pack("=Qi", rights, descriptor), 0)
    finally:
        os.close(descriptor)


def isolate_child(parent: int, *, required: bool) -> None:
    """Take from a child of a process that forks all that its parent needed for it.

    OSError if a required filter cannot be put up.
    """
    die_with_parent(parent)
    if platform.system() == "Linux" and is_known(platform.machine()):
        try:
            _filter_calls()
        except OSError:
            if required:
                raise


def _filter_calls(*, forks: bool = False) -> None:
    program = build_filter(platform.machine(), os.getpid(), forks=forks)
    steps = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(steps))
    _call("prctl", _PR_SET_SECCOMP, _FILTER_MODE, header, 0, 0)


def _drop_rights() -> None:
    """Give up root's rights except reading; this changes nothing for other users."""
    for capability in range(64):
        if 1 << capability != _READ_ANY_FILE:
            # The call fails without the right, or for an unknown number: nothing is to drop then.
            _load_libc().prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    rights = ctypes.create_string_buffer(24)
    _call("capget", header, rights)
    permitted = struct.unpack("=6I", rights.raw)
    reading = permitted[1] & _READ_ANY_FILE
    _call("capset", header, struct.pack("=6I", reading, reading, 0, 0, 0, 0))


def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    """Call a function of the C library; raise OSError if it returns a negative number."""
    answer = _load_libc()[name](*arguments)
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer
