"""Programs that try to get out of the sandbox or to bring the machine down; each prints ESCAPED if it gets somewhere.

The text OUTSIDE in a program stands for a folder of the user that everyone may read and write, with a file `secret.txt`
in it; PARENT for the training process's number.
"""

import os
import tempfile

from modelwright_sandbox.sandbox import Program, Sandbox, SandboxLimits

ENDED = {"cpu_time", "wall_time"}
"""A busy machine may let the wall clock win."""
QUIET = {"exit", "error", "memory", "signal"}
"""Ended by itself; what it printed says whether it got somewhere."""

TRY = """
import os, sys, ctypes
def attempt(function):
    try:
        function()
    except Exception:
        return
    print("ESCAPED", function.__name__, flush=True)
libc = ctypes.CDLL(None, use_errno=True)
def denied(result):
    if result == -1:
        raise OSError
"""

ATTACKS = {
    "fork bomb": (ENDED, "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"),
    "thread bomb": (
        ENDED | QUIET,
        "import threading, time\nwhile True:\n"
        "    try:\n        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "    except Exception:\n        pass",
    ),
    "endless loop": (ENDED, "while True:\n    pass"),
    "endless loop without the signal": (
        ENDED, "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass",
    ),
    "long sleep": ({"wall_time"}, "import time\ntime.sleep(1000)"),
    "10 GB of memory": ({"memory"}, "x = bytearray(10 << 30)\nprint('ESCAPED')"),
    "growing list": ({"memory", "cpu_time"}, "x = [0]\nwhile True:\n    x += x"),
    "memory of many processes": (
        {"memory", "error"},
        "import os, time\nfor _ in range(15):\n    if os.fork() == 0:\n"
        "        x = bytearray(60 << 20)\n        time.sleep(1000)\ntime.sleep(1000)",
    ),
    "shared memory of many processes": (
        {"memory", "error"},
        "import mmap, os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = mmap.mmap(-1, 60 << 20)\n        x.write(bytes(60 << 20))\n        time.sleep(1000)\n"
        "time.sleep(1000)",
    ),
    "slow output": ({"wall_time"}, "import time\nwhile True:\n    print(1, flush=True)\n    time.sleep(0.01)"),
    "output of 1 GB": ({"output"}, "import os\nfor _ in range(1 << 14):\n    os.write(1, b'x' * (1 << 16))"),
    "errors of 1 GB": ({"output"}, "import os\nfor _ in range(1 << 14):\n    os.write(2, b'x' * (1 << 16))"),
    "file of 10 GB": (
        QUIET,
        TRY + "def fill():\n    with open('big', 'wb') as file:\n"
        "        for _ in range(10 << 10):\n            file.write(bytes(1 << 20))\nattempt(fill)",
    ),
    "sparse file of 10 GB": (
        QUIET, TRY + "def grow():\n    with open('big', 'wb') as file:\n        file.truncate(10 << 30)\nattempt(grow)",
    ),
    "many files": (
        QUIET | ENDED,
        TRY + "def fill():\n    for i in range(10**6):\n        open(f'{i}', 'w').close()\nattempt(fill)",
    ),
    "sockets": (
        QUIET,
        TRY + "import socket\n"
        "def ipv4(): socket.create_connection(('127.0.0.1', 22), 1)\n"
        "def ipv6(): socket.socket(socket.AF_INET6)\n"
        "def udp(): socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "def netlink(): socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)\n"
        "def abstract(): socket.socket(socket.AF_UNIX).bind('\\0name')\n"
        "for function in (ipv4, ipv6, udp, netlink, abstract): attempt(function)",
    ),
    "files of the user": (
        QUIET,
        TRY + "def passwd(): open('/etc/passwd').read()\n"
        "def secret(): open('OUTSIDE/secret.txt').read()\n"
        "def overwrite(): os.open('OUTSIDE/secret.txt', os.O_WRONLY)\n"
        "def create(): os.open('OUTSIDE/new', os.O_WRONLY | os.O_CREAT)\n"
        "def home(): os.open('HOMEFOLDER/modelwright_attack', os.O_WRONLY | os.O_CREAT)\n"
        "def folder(): os.listdir('OUTSIDE')\n"
        "def delete(): os.unlink('OUTSIDE/secret.txt')\n"
        "def make_readable(): os.chmod('OUTSIDE/secret.txt', 0o777)\n"
        "def touch(): os.utime('OUTSIDE/secret.txt', (1, 1))\n"
        "def library(): open(os.__file__, 'a')\n"
        "def libraries(): open(os.path.dirname(os.__file__) + '/modelwright_attack', 'w')\n"
        "for function in (passwd, secret, overwrite, create, home, folder, delete, make_readable, touch, library,\n"
        "                 libraries): attempt(function)",
    ),
    "symbolic and hard links": (
        QUIET,
        TRY + "def symbolic():\n    os.symlink('OUTSIDE/secret.txt', 'link')\n    open('link').read()\n"
        "def hard():\n    os.link('OUTSIDE/secret.txt', 'hard')\n"
        "def above(): open('../' * 20 + 'OUTSIDE/secret.txt'[1:]).read()\n"
        "for function in (symbolic, hard, above): attempt(function)",
    ),
    "the files in /proc": (
        QUIET,
        TRY + "for number in ('self', '1', str(os.getppid()), 'PARENT'):\n"
        "    def root(): open(f'/proc/{number}/root' + 'OUTSIDE/secret.txt').read()\n"
        "    def environ(): open(f'/proc/{number}/environ').read()\n"
        "    def memory(): open(f'/proc/{number}/mem', 'r+b')\n"
        "    def score(): open(f'/proc/{number}/oom_score_adj', 'w')\n"
        "    for function in (root, environ, memory, score): attempt(function)\n"
        "def kernel(): open('/proc/sys/kernel/core_pattern', 'w')\nattempt(kernel)",
    ),
    "mounting /proc": (
        QUIET, TRY + "def proc(): denied(libc.mount(b'proc', b'/tmp', b'proc', 0, None))\nattempt(proc)",
    ),
    "descriptors of the launcher": (
        QUIET,
        "import os\nfor number in range(4, 5000):\n"
        "    try:\n        os.fstat(number)\n    except OSError:\n        continue\n    print('ESCAPED', number)",
    ),
    "the environment": (QUIET, "import os\nif 'MODELWRIGHT_ATTACK_SECRET' in os.environ:\n    print('ESCAPED')"),
    "other processes": (
        QUIET,
        TRY + "import resource, signal\n"
        "for number in (os.getppid(), 1, PARENT):\n"
        "    def ptrace(): denied(libc.ptrace(16, number, 0, 0))\n"
        "    def limits(): resource.prlimit(number, resource.RLIMIT_CPU, (1, 1))\n"
        "    def affinity(): os.sched_setaffinity(number, {0})\n"
        "    for function in (ptrace, limits, affinity): attempt(function)\n"
        "def training(): os.kill(PARENT, 0)\n"
        "def owner():\n    import fcntl\n    fcntl.fcntl(0, fcntl.F_SETOWN, PARENT)\n"
        "for function in (training, owner): attempt(function)\n"
        "for number in (os.getppid(), 1):\n"
        "    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):\n"
        "        try:\n            os.kill(number, name)\n        except OSError:\n            pass",
    ),
    "kill everything": (QUIET, "import os, signal\nos.kill(-1, signal.SIGKILL)"),
    "its own folder": (
        QUIET, "import os, shutil\nshutil.rmtree('/tmp', ignore_errors=True)\nos.rmdir(os.getcwd())",
    ),
    "a process that outlives it": (
        QUIET,
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n"
        "    os._exit(0)\nprint('left')",
    ),
    "an outliving process that holds no pipe": (
        QUIET,
        "import os, time\nif os.fork() == 0:\n    os.closerange(0, 64)\n    os.setsid()\n    time.sleep(1000)",
    ),
    "another program": (
        QUIET | ENDED,
        TRY + "def shell(): os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])\n"
        "def python(): os.execv(sys.executable, ['python', '-c', 'print(\"ESCAPED\")'])\n"
        "attempt(shell)\nattempt(python)",
    ),
    "raw system calls": (
        QUIET,
        TRY + "def number(**numbers): return numbers[os.uname().machine]\n"
        "calls = dict(unshare=number(x86_64=272, aarch64=97), setns=number(x86_64=308, aarch64=268),\n"
        "    keyctl=number(x86_64=250, aarch64=219), bpf=number(x86_64=321, aarch64=280),\n"
        "    memfd_create=number(x86_64=319, aarch64=279), shmget=number(x86_64=29, aarch64=194),\n"
        "    process_vm_readv=number(x86_64=310, aarch64=270), userfaultfd=number(x86_64=323, aarch64=282),\n"
        "    open_by_handle_at=number(x86_64=304, aarch64=265), perf_event_open=number(x86_64=298, aarch64=241),\n"
        "    personality=number(x86_64=135, aarch64=92), io_uring_setup=425, pidfd_open=434, open_tree=428,\n"
        "    chroot=number(x86_64=161, aarch64=51), mknod_at=number(x86_64=259, aarch64=33))\n"
        "for name, code in calls.items():\n"
        "    def call(): denied(libc.syscall(code, 0x10000000, 0, 0, 0, 0))\n"
        "    call.__name__ = name\n    attempt(call)\n"
        "def namespace():\n"
        "    denied(libc.syscall(number(x86_64=56, aarch64=220), 0x10000000 | 17, 0, 0, 0, 0))\nattempt(namespace)",
    ),
    "higher limits": (
        QUIET,
        TRY + "import resource\n"
        "def memory(): resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "def user(): os.setuid(0) if os.getuid() else denied(-1)\n"
        "for function in (memory, user): attempt(function)",
    ),
    "deep recursion": (
        QUIET | ENDED,
        "import sys\nsys.setrecursionlimit(10**8)\ndef f(n): return f(n + 1) + 1\nf(0)\nprint('ESCAPED')",
    ),
    "a broken stream": (QUIET, "import os\nos.close(0), os.close(1), os.close(2), os.close(3)\nprint('text')"),
    "a report to all descriptors": (
        QUIET, "import os\nfor number in range(3, 64):\n    try:\n        os.write(number, b'1\\n' * 100)\n"
        "    except OSError:\n        pass",
    ),
}  # fmt: skip
"""How each may end, and its code."""


def source_of(name: str, *, outside: str, home: str, parent: int) -> str:
    source = ATTACKS[name][1]
    return source.replace("OUTSIDE", outside).replace("HOMEFOLDER", home).replace("PARENT", str(parent))


def run_all(kind: str) -> None:
    """All attacks by the user who runs this, without pytest; exits with the first that got somewhere."""
    limits = SandboxLimits(cpu_s=1, wall_s=4, memory_bytes=200 << 20, num_processes=20)
    sandbox = Sandbox(limits, num_workers=2, kinds=[kind])
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/secret.txt", "w") as file:
            file.write("secret")
        sources = [source_of(name, outside=folder, home="/", parent=os.getpid()) for name in ATTACKS]
        executions = sandbox.run([Program(source=source) for source in sources])
        for name, execution in zip(ATTACKS, executions, strict=True):
            if execution.outcome not in ATTACKS[name][0] or "ESCAPED" in execution.stdout:
                raise SystemExit(f"{name}: {execution}")
        if os.listdir(folder) != ["secret.txt"]:
            raise SystemExit(f"files were changed: {os.listdir(folder)}")
    sandbox.close()
    print(f"{len(ATTACKS)} attacks by user {os.getuid()} contained")
