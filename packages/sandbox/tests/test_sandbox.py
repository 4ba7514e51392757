"""Attacks on the sandbox: each ends bounded and labeled, and the program after it runs as if nothing had been."""

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelwright.core.config import ConfigError
from modelwright_sandbox.sandbox import KINDS, Execution, Launcher, Program, Sandbox, SandboxError, SandboxLimits
from refusals import config_error
from sandbox_attacks import ATTACKS, source_of

LIMITS = SandboxLimits(cpu_s=1, wall_s=4, memory_bytes=200 << 20, num_processes=20)
HONEST = Program(source="numbers = map(int, input().split())\nprint(sum(numbers))", stdin="1 2 3\n")


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest):
    sandbox = Sandbox(LIMITS, num_workers=2, kinds=[request.param])
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    (folder / "secret.txt").write_text("secret")
    os.chmod(folder, 0o777)
    os.chmod(folder / "secret.txt", 0o666)
    return folder


@pytest.fixture(scope="module")
def executions(sandbox: Sandbox, outside: Path) -> dict[str, tuple[Execution, Execution]]:
    """What became of each attack, and of an honest program after it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODELWRIGHT_ATTACK_SECRET", "secret")
        other = Sandbox(LIMITS, num_workers=1, kinds=[sandbox.kind])
    programs = list[Program]()
    for name in ATTACKS:
        source = source_of(name, outside=str(outside), home=str(Path.home()), parent=os.getpid())
        programs += [Program(source=source), HONEST]
    results = other.run(programs[:2]) + sandbox.run(programs[2:])
    other.close()
    return dict(zip(ATTACKS, zip(results[::2], results[1::2], strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_ends_and_gets_nowhere(executions: dict[str, tuple[Execution, Execution]], name: str) -> None:
    attack, honest = executions[name]
    assert attack.outcome in ATTACKS[name][0], attack
    assert "ESCAPED" not in attack.stdout, attack
    assert len(attack.stdout) + len(attack.stderr) < 2 * LIMITS.output_bytes
    assert honest == Execution(outcome="exit", stdout="6\n")


@pytest.mark.parametrize("name", ["sockets", "symbolic and hard links", "the environment"])
def test_an_attack_works_outside_of_the_sandbox(name: str, outside: Path, tmp_path: Path) -> None:
    source = source_of(name, outside=str(outside), home=str(tmp_path), parent=os.getpid())
    own = {**os.environ, "MODELWRIGHT_ATTACK_SECRET": "secret"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path, env=own)
    assert "ESCAPED" in done.stdout


@pytest.mark.slow
def test_nothing_is_left_behind(executions: object, sandbox: Sandbox, outside: Path) -> None:
    assert [path.name for path in outside.iterdir()] == ["secret.txt"]
    assert (outside / "secret.txt").read_text() == "secret"
    assert stat.S_IMODE((outside / "secret.txt").stat().st_mode) == 0o666
    assert not (Path.home() / "modelwright_attack").exists()
    assert signal.getsignal(signal.SIGIO) == signal.SIG_DFL
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] != 1
    for pid in children_of(os.getpid()):
        assert children_of(pid) == [], "a launcher has no program"
    assert orphans_within(0) == []


def children_of(pid: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def orphans_within(seconds: float) -> list[int]:
    """Launchers, or what was forked from them, whose parent is gone, when there are none or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        orphans = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command = (folder / "cmdline").read_text()
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, UnicodeDecodeError):
                continue
            if "sandbox.launcher import main" in command and parent == 1:
                orphans.append(int(folder.name))
        if not orphans or time.monotonic() > deadline:
            return orphans
        time.sleep(0.1)


def test_landlock_cannot_be_bypassed_by_opening_a_readable_file_with_flags(sandbox: Sandbox) -> None:
    """Its first versions (before Linux 6.2) let whoever may read a file truncate it; O_CREAT stands in for O_TRUNC."""
    (execution,) = sandbox.run([Program(source="import os\nos.open(os.__file__, os.O_RDONLY | os.O_CREAT)")])
    assert execution.outcome == ("error" if sandbox.kind == "landlock" else "exit")


def test_programs_do_not_see_each_other(sandbox: Sandbox) -> None:
    if sandbox.kind == "landlock":
        pytest.skip("without namespaces a program cannot write at all")
    program = Program(source="import os\nprint(os.listdir('.'))\nopen('mine', 'w').write('x')")
    assert [one.stdout for one in sandbox.run([program] * 4)] == ["[]\n"] * 4


@pytest.mark.slow
def test_memory_of_many_processes_is_counted_together(executions: dict[str, tuple[Execution, Execution]]) -> None:
    outcomes = {executions[f"{kind}memory of many processes"][0].outcome for kind in ("", "shared ")}
    assert outcomes in ({"memory"}, {"error"})
    if outcomes == {"error"}:
        assert "Operation not permitted" in executions["memory of many processes"][0].stderr, "no process is allowed"


def test_a_temporary_file_threads_and_subprocesses(sandbox: Sandbox) -> None:
    source = (
        "import asyncio, multiprocessing, tempfile, threading\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()\n"
        "import os, subprocess\npid = os.fork()\n"
        "if pid == 0: os._exit(3)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    (execution,) = sandbox.run([Program(source=source)])
    if sandbox.kind == "namespaces":
        assert execution == Execution(outcome="exit", stdout="thread\n3\n")
    else:
        assert execution.outcome == "error", "files, threads and processes are refused"


@pytest.mark.parametrize(
    ("source", "checks", "num_passed", "outcome"),
    [
        ("def f(x): return x + 1", ("assert f(1) == 2", "assert f(1) == 3", "assert f(2) == 3"), 2, "exit"),
        ("def f(x): return x + 1\nimport sys\nsys.exit()", ("assert f(1) == 2",), 1, "exit"),
        ("import os\nos._exit(0)", ("assert f(1) == 2",), 0, "exit"),
        ("raise SystemExit(3)", ("assert True",), 0, "error"),
        ("def f(x): raise SystemExit", ("assert f(1) == 2",), 0, "exit"),
        ("def f(x):", ("assert True",), 0, "error"),
        ("if __name__ == '__main__': input()", ("assert True",), 1, "exit"),
        ("x = 1", ("assert x == 1", "while True: pass"), 1, "cpu_time"),
        ("import os\ntry:\n    os.write(3, b'1\\n')\nfinally:\n    os._exit(0)", ("assert False",), 0, "exit"),
    ],
)
def test_checks(sandbox: Sandbox, source: str, checks: tuple[str, ...], num_passed: int, outcome: str) -> None:
    (execution,) = sandbox.run([Program(source=source, checks=checks)])
    assert execution.num_passed == num_passed
    assert execution.outcome in {outcome, outcome.replace("cpu", "wall")}


def test_a_program_ends_like_a_script(sandbox: Sandbox) -> None:
    source = (
        "import atexit, sys, random\natexit.register(lambda: print('at exit'))\n"
        "print(__name__, sys.argv, random.random(), list({'a', 'b', 'c'}), 'äß€')\nsys.exit('message')"
    )
    first, second = sandbox.run([Program(source=source)] * 2)
    assert first == second
    assert first.stdout.startswith("__main__ ['answer.py'] 0.8444")
    assert first.stdout.endswith("'äß€\nat exit\n".replace("'", ""))
    assert (first.outcome, first.stderr) == ("error", "message\n")


def test_large_input_and_output_pass(sandbox: Sandbox) -> None:
    text = "x" * 500_000
    (execution,) = sandbox.run([Program(source="import sys\nprint(sys.stdin.read(), end='')", stdin=text)])
    assert execution == Execution(outcome="exit", stdout=text)


def test_a_launcher_that_is_killed_is_replaced(sandbox: Sandbox) -> None:
    assert sandbox.run([HONEST])[0].stdout == "6\n"
    for pid in children_of(os.getpid()):
        if "sandbox.launcher" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
    assert [one.stdout for one in sandbox.run([HONEST] * 3)] == ["6\n"] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_all_ends_with_a_training_process_that_is_killed(kind: str) -> None:
    code = (
        "from modelwright_sandbox.sandbox import *\nimport threading, os, time\n"
        f"sandbox = Sandbox(SandboxLimits(cpu_s=300, wall_s=600), num_workers=1, kinds=[{kind!r}])\n"
        "threading.Timer(1, lambda: os.kill(os.getpid(), 9)).start()\n"
        "sandbox.run([Program(source='import time\\ntime.sleep(500)')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert orphans_within(30) == []


def environment() -> dict[str, str]:
    root = Path(__file__).parents[3]
    return {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'packages' / 'sandbox'}"}


def test_a_machine_that_allows_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Launcher, kind: str) -> None:
        raise OSError(38, "unshare: Function not implemented")

    monkeypatch.setattr(Launcher, "__init__", refuse)
    with pytest.raises(ConfigError, match=r"namespaces: .*not implemented.*landlock: .*allow user namespaces"):
        Sandbox(LIMITS, num_workers=1)


def test_landlock_is_used_where_namespaces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Launcher.__init__

    def refuse(self: Launcher, kind: str) -> None:
        if kind == "namespaces":
            raise SandboxError("unshare: Operation not permitted")
        start(self, kind)

    monkeypatch.setattr(Launcher, "__init__", refuse)
    sandbox = Sandbox(LIMITS, num_workers=1)
    assert (sandbox.kind, sandbox.run([HONEST])[0].stdout) == ("landlock", "6\n")
    sandbox.close()


def test_a_sandbox_that_leaks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test counts what works, not what was set up."""
    monkeypatch.setattr(Launcher, "run", lambda self, program, limits: run_unprotected(program))
    with pytest.raises(ConfigError, match="the self-test says: it can open a network socket"):
        Sandbox(LIMITS, num_workers=1)


def run_unprotected(program: Program) -> Execution:
    done = subprocess.run(
        [sys.executable, "-c", program.source], input=program.stdin, capture_output=True, text=True, timeout=60
    )
    return Execution(outcome="exit", stdout=done.stdout, stderr=done.stderr)


def test_the_smallest_memory_is_enough() -> None:
    sandbox = Sandbox(SandboxLimits(memory_bytes=64 << 20), num_workers=1)
    assert sandbox.run([HONEST]) == [Execution(outcome="exit", stdout="6\n")]
    sandbox.close()


def test_limits_are_checked() -> None:
    with config_error("memory_bytes"):
        SandboxLimits(memory_bytes=1)
    with pytest.raises(ConfigError, match="cpu_s"):
        SandboxLimits(cpu_s=0)


def readable_python() -> str:
    """An interpreter of this version that other users may run, or ""."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for path in (shutil.which(f"python{version}", path="/usr/local/bin:/usr/bin"), sys.executable):
        parents = Path(path).resolve().parents if path else ()
        if path and all(folder.stat().st_mode & stat.S_IXOTH for folder in parents):
            return path
    return ""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("kind", KINDS)
def test_an_ordinary_user_has_the_same_sandbox(tmp_path: Path, kind: str) -> None:
    python = readable_python()
    if not python:
        pytest.skip("no interpreter that other users may run")
    folders = [folder for folder in sys.path if folder.endswith("site-packages")]
    own = {"PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], *folders]), "HOME": "/", "TMPDIR": "/tmp"}
    folder = str(Path(__file__).parent)
    code = f"import sys\nsys.path.insert(0, {folder!r})\nimport sandbox_attacks\nsandbox_attacks.run_all({kind!r})"
    user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    done = subprocess.run([*user, python, "-c", code], capture_output=True, text=True, env=own, cwd="/", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(ATTACKS)} attacks by user 12345 contained"
