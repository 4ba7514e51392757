"""System calls of Linux that Python's `os` lacks, through ctypes. Each raises `OSError`.

Constants are from the kernel's headers: sched.h, mount.h, prctl.h, capability.h, landlock.h.
"""

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
NUM_CAPABILITIES = 64

# Calls that came after Linux 5.1 have one number on all architectures.
SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
LANDLOCK_READ = 0b1101
"""Rights to execute, read files and list folders; the bit between them is for writing to files."""
LANDLOCK_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
"""All rights on files, by version of the interface; for 5 and later see `LANDLOCK_NEWEST_RIGHTS`."""
LANDLOCK_NEWEST_RIGHTS = (1 << 16) - 1
LANDLOCK_NET = 0b11
LANDLOCK_SCOPES = 0b11
"""Scopes that keep abstract sockets and signals among processes under the same rules."""

_libc = ctypes.CDLL(None, use_errno=True)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _FilterProgram(ctypes.Structure):
    _fields_ = (("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, what: str, *arguments: object) -> int:
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments), what)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags))
    _checked(_libc.mount(*arguments, options.encode() or None), f"mount {target}")


def restrict_mounts(path: str, attributes: int) -> None:
    """Sets attributes of the mount at `path` and of all below it; attributes that are set already stay set (Linux
    5.12).
    """
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    arguments = (ctypes.c_int(AT_FDCWD), path.encode(), ctypes.c_uint(AT_RECURSIVE), values)
    _syscall(SYS_MOUNT_SETATTR, f"mount_setattr {path}", *arguments, ctypes.c_size_t(ctypes.sizeof(values)))


def enter_root(path: str) -> None:
    """Makes the mount at `path` the root of this process's mount namespace, and unmounts everything else."""
    os.chdir(path)
    # With "." for both, the old root is stacked on the new one and can be unmounted there (pivot_root(2)).
    number = 155 if os.uname().machine == "x86_64" else 41
    _checked(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount")
    os.chdir("/")


def prctl(option: int, value: int = 0, pointer: object = None) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), pointer, zero, zero), f"prctl {option}")


def drop_capabilities() -> None:
    """Drops all capabilities, including those that programs could gain by executing a file."""
    for number in range(NUM_CAPABILITIES):
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError:  # a capability that this kernel does not have, or a process that may not drop from the set
            continue
    header = _CapabilityHeader(CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(ctypes.byref(header), (ctypes.c_uint32 * 6)()), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def load_filter(program: bytes) -> None:
    """Applies a compiled seccomp filter to this process and its descendants, irrevocably."""
    # An instruction of BPF has 8 bytes.
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(_FilterProgram(len(program) // 8, program)))


def landlock_version() -> int:
    """Returns the version of the interface. Raises `OSError` on a kernel without Landlock (before 5.13, or
    disabled).
    """
    flags = ctypes.c_uint(LANDLOCK_CREATE_RULESET_VERSION)
    return _syscall(SYS_LANDLOCK_CREATE_RULESET, "landlock", None, ctypes.c_size_t(0), flags)


def landlock_read_only(paths: list[str]) -> int:
    """Returns a ruleset, as a file descriptor, that allows only reading files, and only those below `paths`."""
    version = landlock_version()
    rights = LANDLOCK_RIGHTS.get(version, LANDLOCK_NEWEST_RIGHTS)
    attributes = (ctypes.c_uint64 * 3)(rights, LANDLOCK_NET if version >= 4 else 0, LANDLOCK_SCOPES)
    # Kernels refuse unknown fields that are not zero, so the structure ends with the last known one.
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(SYS_LANDLOCK_CREATE_RULESET, "landlock", attributes, ctypes.c_size_t(size), ctypes.c_uint(0))
    for path in paths:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        readable = LANDLOCK_READ if os.path.isdir(path) else LANDLOCK_READ & ~0b1000
        rule = _PathRule(readable, folder)
        kind = ctypes.c_int(LANDLOCK_RULE_PATH_BENEATH)
        arguments = (ctypes.c_int(ruleset), kind, ctypes.byref(rule), ctypes.c_uint(0))
        _syscall(SYS_LANDLOCK_ADD_RULE, f"landlock rule for {path}", *arguments)
        os.close(folder)
    return ruleset


def landlock_restrict(ruleset: int) -> None:
    """Applies a ruleset to this process and its descendants, irrevocably."""
    _syscall(SYS_LANDLOCK_RESTRICT_SELF, "landlock", ctypes.c_int(ruleset), ctypes.c_uint(0))
