"""The system calls that code in the sandbox may make, compiled to a seccomp filter by libseccomp.

Like Docker's, it is a list of allowed calls, so that calls that the kernel gains later stay excluded. Besides dangerous
calls, all that allocate memory which no other limit counts are excluded (memfd, System V shared memory).
"""

import ctypes
import errno
import os

LIBRARY = "libseccomp.so.2"

_ACT_ALLOW, _ACT_ERRNO = 0x7FFF0000, 0x00050000
_COMPARE_MASKED_EQUAL = 7
_WORD = 0xFFFFFFFF

_READING = (
    "access chdir close close_range dup dup2 dup3 faccessat faccessat2 fadvise64 fchdir fcntl fgetxattr flistxattr "
    "flock fstat fstatfs getcwd getdents getdents64 getxattr ioctl lgetxattr listxattr lseek lstat newfstatat open "
    "openat pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv sendfile "
    "stat statfs statx umask write writev"
)
_WRITING = (
    "chmod copy_file_range creat fallocate fchmod fchmodat fdatasync fsync ftruncate link linkat mkdir mkdirat rename "
    "renameat renameat2 rmdir symlink symlinkat truncate unlink unlinkat utime utimensat utimes"
)
"""Calls that are harmless where the user's files do not exist."""
_MEMORY = "brk madvise membarrier mincore mmap mprotect mremap msync munmap"
_WAITING = (
    "alarm clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 "
    "epoll_wait eventfd eventfd2 futex futex_waitv getitimer gettimeofday nanosleep pause pipe pipe2 poll ppoll "
    "pselect6 restart_syscall select setitimer time timer_create timer_delete timer_getoverrun timer_gettime "
    "timer_settime timerfd_create timerfd_gettime timerfd_settime times"
)
_OWN_PROCESS = (
    "arch_prctl capget exit exit_group get_robust_list getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid "
    "getpriority getrandom getresgid getresuid getrlimit getrusage getsid gettid getuid getppid prctl prlimit64 rseq "
    "rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_getaffinity "
    "sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min sched_yield set_robust_list "
    "set_tid_address sigaltstack sysinfo uname wait4 waitid"
)
_SOCKET_PAIRS = "socketpair sendto recvfrom shutdown getsockname getpeername getsockopt setsockopt"
_PROCESSES = "clone fork vfork execve execveat kill tgkill tkill setpgid setsid rt_sigqueueinfo"
"""Calls that are harmless in a separate PID namespace with a limit on processes."""

READ_ONLY = tuple(f"{_READING} {_MEMORY} {_WAITING} {_OWN_PROCESS} {_SOCKET_PAIRS}".split())
READ_WRITE = (*READ_ONLY, *f"{_WRITING} {_PROCESSES}".split())

_ARGUMENTS = {
    "clone": [(0, 0x7E020000, 0)],  # no flag that creates a namespace
    "prlimit64": [(0, _WORD, 0)],  # of this process
    "socketpair": [(0, _WORD, 1)],  # AF_UNIX; the event loop of asyncio wakes itself through one
    "prctl": [(0, _WORD, option) for option in (3, 15, 16, 0x53564D41)],  # dumpable, names of threads and memory
    # Duplicates, flags and locks. F_SETOWN would send signals to other processes, F_SETPIPE_SZ enlarge pipes.
    "fcntl": [(1, _WORD, command) for command in (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)],
    # Terminal attributes and size, bytes to read, flags of the descriptor. TIOCSTI would type into a terminal.
    "ioctl": [(1, _WORD, command) for command in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)],
}
"""Calls that are allowed for some values of one argument: its number, a mask, the value under the mask."""
_OPEN_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_ARGUMENTS_READ_ONLY = {**_ARGUMENTS, "open": [(1, _OPEN_TO_WRITE, 0)], "openat": [(2, _OPEN_TO_WRITE, 0)]}


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operation", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def compile_filter(*, read_only: bool) -> bytes:
    """Compiles the program for `linux.load_filter`; calls that are not allowed fail with EPERM. read_only: exclude
    calls that write to files or start processes or threads. Raises `OSError`, also if libseccomp is missing.
    """
    library = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ACT_ERRNO | errno.EPERM)))
    # The C library tries clone3 first and falls back to clone, whose flags a filter can read, only for ENOSYS.
    _add(library, context, _ACT_ERRNO | errno.ENOSYS, "clone3")
    allowed, arguments = (READ_ONLY, _ARGUMENTS_READ_ONLY) if read_only else (READ_WRITE, _ARGUMENTS)
    for name in allowed:
        for rule in arguments.get(name, [()]):
            _add(library, context, _ACT_ALLOW, name, *rule)
    return _exported(library, context)


def _add(library: ctypes.CDLL, context: ctypes.c_void_p, action: int, name: str, *rule: int) -> None:
    """Adds a rule. rule: an argument's number, mask and value; without it the action applies to all arguments."""
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # another architecture's call, or one that this libseccomp does not know: it stays denied
        return
    count = 1 if rule else 0
    array = (_Comparison * 1)(*([_Comparison(rule[0], _COMPARE_MASKED_EQUAL, rule[1], rule[2])] if rule else []))
    arguments = (ctypes.c_uint32(action), ctypes.c_int(number), ctypes.c_uint(count), array)
    result = library.seccomp_rule_add_array(context, *arguments)
    if result:
        raise OSError(-result, f"libseccomp: rule for {name}: {os.strerror(-result)}")


def _exported(library: ctypes.CDLL, context: ctypes.c_void_p) -> bytes:
    # An anonymous file, because this function of libseccomp writes to a descriptor.
    with open(os.memfd_create("filter"), "r+b") as file:
        result = library.seccomp_export_bpf(context, ctypes.c_int(file.fileno()))
        library.seccomp_release(context)
        if result:
            raise OSError(-result, f"libseccomp: {os.strerror(-result)}")
        file.seek(0)
        return file.read()
