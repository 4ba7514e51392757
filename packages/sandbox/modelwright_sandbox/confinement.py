"""Two ways to confine a program, each with a filter of system calls on top, which libseccomp compiles.

`namespaces`: the program sees a file system with the Python runtime, read-only, and a private folder; no other process
and no network interface exists for it. `landlock` is for machines that do not let a process create namespaces, such as
most containers: the program may read the Python runtime, and can neither write files nor start processes or threads.

Like Docker's, the filter is a list of allowed calls, so that calls that the kernel gains later stay excluded. Besides
dangerous calls, all that allocate memory which no other limit counts are excluded (memfd, System V shared memory).
"""

import ctypes
import errno
import os
import resource
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any, Protocol

from modelwright_sandbox import linux

WORK_FOLDER = "/tmp"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_ROOT_MOUNT = "/proc"
"""Mount point of the new root before it becomes the root: a folder that exists on every machine, so none is left
behind. The program gets no /proc, which shows more than it needs to know."""
_NOBODY = 65534
_MAX_FILES = 1000
_INODES = f"nr_inodes={_MAX_FILES}"
_MAX_DESCRIPTORS = 64


class Confinement(Protocol):
    """A way for a launcher to confine programs."""

    has_processes: bool
    """True if programs run in a separate PID namespace, whose first process ends them all."""

    def enter(self) -> None:
        """Called once, in the launcher. Raises `OSError` if the machine does not allow it."""
        ...

    def prepare(self, limits: Mapping[str, Any]) -> None:
        """Called in the process that is about to fork the program."""
        ...

    def confine(self, limits: Mapping[str, Any]) -> None:
        """Called in the program's process, which from then on can do nothing more than the program."""
        ...


def runtime_folders() -> list[str]:
    """Returns the folders that Python needs to run: its library and the machine's shared libraries."""
    names = ("stdlib", "platstdlib")
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix}
    folders = [sysconfig.get_path(name, vars={**base, "installed_platbase": sys.base_exec_prefix}) for name in names]
    folders += [f"{sys.base_prefix}/lib"]  # where Conda has the libraries that extension modules load
    return [path for path in dict.fromkeys([*_LIBRARIES, *folders]) if os.path.isdir(path)]


class Namespaces:
    """Confinement by user, mount, PID, network, IPC and UTS namespaces (Linux 5.14)."""

    has_processes = True

    def __init__(self) -> None:
        self._filter = compile_filter(read_only=False)
        self._is_root = False

    def enter(self) -> None:
        flags = linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
        try:
            linux.unshare(flags)
            self._is_root = True
        except PermissionError:  # without the rights of root a user namespace is needed
            user, group = os.geteuid(), os.getegid()
            linux.unshare(flags | linux.CLONE_NEWUSER)
            # `setgroups` has to be denied first, or the kernel refuses a group map written without privileges.
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
        options = "size=1m,nr_inodes=1000,mode=755"
        linux.mount("tmpfs", _ROOT_MOUNT, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
        for path in runtime_folders():
            target = f"{_ROOT_MOUNT}{path}"
            os.makedirs(target, exist_ok=True)
            linux.mount(path, target, flags=linux.MS_BIND | linux.MS_REC)
            linux.restrict_mounts(target, linux.MOUNT_ATTR_NOSUID | linux.MOUNT_ATTR_NODEV | linux.MOUNT_ATTR_RDONLY)
        os.mkdir(f"{_ROOT_MOUNT}/dev")
        for path in _DEVICES:
            os.close(os.open(f"{_ROOT_MOUNT}{path}", os.O_CREAT | os.O_WRONLY))
            linux.mount(path, f"{_ROOT_MOUNT}{path}", flags=linux.MS_BIND)
        os.makedirs(f"{_ROOT_MOUNT}{WORK_FOLDER}", exist_ok=True)
        linux.enter_root(_ROOT_MOUNT)
        linux.restrict_mounts("/", linux.MOUNT_ATTR_RDONLY)

    def prepare(self, limits: Mapping[str, Any]) -> None:
        linux.unshare(linux.CLONE_NEWNS | linux.CLONE_NEWPID)
        options = f"size={limits['disk_bytes']},{_INODES},mode=1777"
        linux.mount("tmpfs", WORK_FOLDER, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)

    def confine(self, limits: Mapping[str, Any]) -> None:
        os.chdir(WORK_FOLDER)
        if self._is_root:  # the limit on processes does not hold for root
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        linux.unshare(linux.CLONE_NEWUSER)  # in which processes are counted, apart from the user's own
        _limit_resources(limits)
        linux.drop_capabilities()
        linux.load_filter(self._filter)


class Landlock:
    """Confinement by Landlock (Linux 5.13) and a filter without system calls for processes, threads and signals."""

    has_processes = False

    def __init__(self) -> None:
        self._filter = compile_filter(read_only=True)
        self._ruleset = -1

    def enter(self) -> None:
        self._ruleset = linux.landlock_read_only([*runtime_folders(), *_DEVICES[3:]])

    def prepare(self, limits: Mapping[str, Any]) -> None:
        """Does nothing: this kind does not use namespaces."""

    def confine(self, limits: Mapping[str, Any]) -> None:
        os.setsid()
        os.chdir("/")
        _limit_resources(limits)
        # First, because it sets no_new_privs, without which the kernel refuses Landlock rules and filters.
        linux.drop_capabilities()
        linux.landlock_restrict(self._ruleset)
        linux.load_filter(self._filter)


def _limit_resources(limits: Mapping[str, Any]) -> None:
    hard = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_NPROC: limits["num_processes"],
        resource.RLIMIT_FSIZE: limits["disk_bytes"],
        resource.RLIMIT_NOFILE: _MAX_DESCRIPTORS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in hard.items():
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))  # SIGXCPU, then SIGKILL


CONFINEMENTS = {"namespaces": Namespaces, "landlock": Landlock}
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
    # An anonymous file, because this function of libseccomp writes to a descriptor.
    with open(os.memfd_create("filter"), "r+b") as file:
        result = library.seccomp_export_bpf(context, ctypes.c_int(file.fileno()))
        library.seccomp_release(context)
        if result:
            raise OSError(-result, f"libseccomp: {os.strerror(-result)}")
        file.seek(0)
        return file.read()


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
