"""Two ways to confine a program, each with the system call filter on top.

`namespaces`: the program sees a file system with the Python runtime, read-only, and a private folder; no other process
and no network interface exists for it. `landlock` is for machines that do not let a process create namespaces, such as
most containers: the program may read the Python runtime, and can neither write files nor start processes or threads.
"""

import os
import resource
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any, Protocol

from modelwright_sandbox import linux
from modelwright_sandbox.syscall_filter import compile_filter

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
        self._is_root = _unshare_as_root_or_user()
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


def _unshare_as_root_or_user() -> bool:
    """Creates the namespaces. Returns True if that worked with the rights of root, without a user namespace."""
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    try:
        linux.unshare(flags)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        linux.unshare(flags | linux.CLONE_NEWUSER)
        # `setgroups` has to be denied first, or the kernel refuses a group map written without privileges.
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        return False
    return True


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
