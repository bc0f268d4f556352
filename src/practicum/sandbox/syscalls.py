"""List the system calls of a sandboxed process, as a program for the kernel's seccomp filter.

A call that is not listed fails with ENOSYS, as if the kernel did not know it: sockets, new
processes, sessions and process groups, tracing, mounts, namespaces, shared memory of others,
io_uring, and all calls of later kernels. Some calls are allowed with some arguments only. The
numbers come from arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of
Linux.
"""

import errno
import struct

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the table below, and the AUDIT_ARCH of <linux/audit.h>."""

# fmt: off
ALLOWED: dict[str, tuple[int, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "ioctl": (16, 29), "pread64": (17, 67),
    "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "pipe": (22, None), "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216),
    "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233), "dup": (32, 23),
    "dup2": (33, None), "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102),
    "alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "clone": (56, 220),
    "execve": (59, 221), "exit": (60, 93), "wait4": (61, 260), "kill": (62, 129),
    "uname": (63, 160), "fcntl": (72, 25), "flock": (73, 32), "getdents": (78, None),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "readlink": (89, None),
    "umask": (95, 166), "gettimeofday": (96, 169), "mkdir": (83, None), "mkdirat": (258, 34),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153),
    "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "getpgrp": (111, None), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgid": (121, 155), "getsid": (124, 156),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "statfs": (137, 43), "fstatfs": (138, 44), "getpriority": (140, 141),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "prctl": (157, 167),
    "arch_prctl": (158, None), "setrlimit": (160, 164), "gettid": (186, 178), "time": (201, None),
    "futex": (202, 98), "sched_getaffinity": (204, 123), "epoll_create": (213, None),
    "getdents64": (217, 61), "set_tid_address": (218, 96), "restart_syscall": (219, 128),
    "fadvise64": (221, 223), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "tgkill": (234, 131), "waitid": (247, 95), "openat": (257, 56),
    "newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72),
    "ppoll": (271, 73), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "epoll_pwait": (281, 22), "eventfd2": (290, 19), "epoll_create1": (291, 20), "dup3": (292, 24),
    "pipe2": (293, 59), "prlimit64": (302, 261), "getcpu": (309, 168), "getrandom": (318, 278),
    "membarrier": (324, 283), "statx": (332, 291), "rseq": (334, 293), "close_range": (436, 436),
    "faccessat2": (439, 439),
}
"""The number of each call on x86_64 and on aarch64; None if it does not exist there.

`mkdir` and `mkdirat` create nothing, as nothing may be written, but report that a folder exists.
"""
# fmt: on

_THREAD = 0x00010000
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
"""Duplicate, flags, locks; not F_SETOWN and F_SETSIG, which send signals to others."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_PRCTL = (15, 16)
"""PR_SET_NAME, PR_GET_NAME."""
_PRCTL_OF_CHILDREN = (1, 22)
"""PR_SET_PDEATHSIG, PR_SET_SECCOMP."""

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16


def is_known(machine: str) -> bool:
    """Return True if the calls of this kind of machine are listed."""
    return machine in _MACHINES


def build_filter(machine: str, process: int, *, forks: bool = False) -> bytes:
    """Return the filter of one process as `struct sock_filter`s, in order of execution.

    With `forks` it may start children, end them, and let them put up a stricter filter.
    """
    column, architecture = _MACHINES[machine]
    # The lower half of an argument suffices: each of these is an int or a set of low flags.
    conditions: dict[str, tuple[int, int, tuple[int, ...]]] = {
        # Signals reach no other process, and only threads can be created, no processes.
        "clone": (0, _ANY_BIT, (_THREAD,)),
        "kill": (0, _EQUAL, (process,)),
        "tgkill": (0, _EQUAL, (process,)),
        # Only the process's own limits.
        "prlimit64": (0, _EQUAL, (0, process)),
        "fcntl": (1, _EQUAL, _FCNTL),
        "ioctl": (1, _EQUAL, _IOCTL),
        "prctl": (0, _EQUAL, _PRCTL),
    }
    if forks:
        for call in ("clone", "kill", "tgkill"):
            del conditions[call]
        conditions["prctl"] = (0, _EQUAL, (*_PRCTL, *_PRCTL_OF_CHILDREN))
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # From this number on are the calls of x32, which have another meaning.
        (_AT_LEAST, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _KILL),
    ]
    for name, numbers in ALLOWED.items():
        number = numbers[column]
        if number is None:
            continue
        allowing = [(_RETURN, 0, 0, _ALLOW)]
        if name in conditions:
            argument, test, values = conditions[name]
            allowing = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
            for value in values:
                allowing += [(test, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
            allowing.append((_RETURN, 0, 0, _REFUSE | errno.EPERM))
        steps += [(_EQUAL, 0, len(allowing), number), *allowing]
    steps.append((_RETURN, 0, 0, _REFUSE | errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
