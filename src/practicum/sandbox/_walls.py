"""The walls around a process, put up by the process itself: nothing it does or starts afterwards can take them down.

Only the standard library and calls that need no rights are used, so that it works for every user and within containers.
"""

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Iterable

from practicum.sandbox._syscalls import filter_program, is_known

# Landlock, since Linux 5.13 (Documentation/userspace-api/landlock.rst): calls, rights and scopes, with the version of each.
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
"""CAP_DAC_READ_SEARCH: root reads a Python that belongs to somebody else; Landlock says which files."""


def missing() -> list[str]:
    """Return what this machine cannot wall off, each with its reason; empty where all walls can stand."""
    lacks = []
    if platform.system() != "Linux":
        return [
            f"files, network, processes and signals ({platform.system()} has no Landlock and no seccomp)"
        ]
    if _landlock_version() < 1:
        lacks.append("files (the kernel has no Landlock, or it is off)")
    if not is_known(platform.machine()):
        lacks.append(
            f"network, processes and signals (no filter of system calls for {platform.machine()})"
        )
    return lacks


def put_up(readable: Iterable[str], limits: dict[str, int]) -> list[str]:
    """Wall this process in and return what could not be; `limits` are of the module `resource`, by name."""
    for name, limit in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (most, most))
    lacks = missing()
    if platform.system() != "Linux":
        return lacks
    _drop_rights()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for name, wall in (
        ("files", lambda: _wall_off_files(readable)),
        ("network, processes and signals", _filter_calls),
    ):
        if not any(lack.startswith(name) for lack in lacks):
            try:
                wall()
            except OSError as error:
                lacks.append(f"{name} ({error.strerror})")
    return lacks


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends; the parent is to have one thread only."""
    if platform.system() == "Linux":
        _call("prctl", _PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _landlock_version() -> int:
    return _libc().syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)


def _wall_off_files(readable: Iterable[str]) -> None:
    """Allow to read what is beneath some folders, and nothing else of files; no TCP, no signals and sockets of others."""
    version = _landlock_version()
    known = [
        [bits for since, bits in rights if since <= version]
        for rights in (_FILE_RIGHTS, _NETWORK_RIGHTS, _SCOPES)
    ]
    attributes = struct.pack("=QQQ", *map(sum, known))
    # An older kernel knows a shorter structure, and takes a longer one whose rest is zero.
    ruleset = _syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    for path in readable:
        _allow(ruleset, path, _EXECUTE | _READ | _LIST)
    for path in _DEVICES:
        _allow(ruleset, path, _READ | _WRITE)
    _syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        # What is not there needs no permission.
        return
    if not os.path.isdir(path):
        rights &= _EXECUTE | _READ | _WRITE
    try:
        _syscall(_ADD_RULE, ruleset, _BENEATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)


def _filter_calls() -> None:
    program = filter_program(platform.machine(), os.getpid())
    steps = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HP", len(program) // 8, ctypes.addressof(steps))
    _call("prctl", _PR_SET_SECCOMP, _FILTER_MODE, described, 0, 0)


def _drop_rights() -> None:
    """Give up root's rights but for reading; without any, nothing changes."""
    for capability in range(64):
        if 1 << capability != _READ_ANY_FILE:
            # Refused to whoever has no such right, and to whom it makes no difference; numbers that are not there as well.
            _libc().prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITIES_VERSION, 0)
    rights = ctypes.create_string_buffer(24)
    _call("capget", header, rights)
    held = struct.unpack("=6I", rights.raw)
    kept = held[1] & _READ_ANY_FILE
    _call("capset", header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *arguments: object) -> int:
    return _call("syscall", number, *arguments)


def _call(name: str, *arguments: object) -> int:
    """Call a function of the C library; raise OSError where it returns a negative number."""
    answer = _libc()[name](*arguments)
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return answer
