# Runs inside of the sandbox before anything else does, after a line that sets CANARY, the path of a file that everyone
# may read and write, and MAX_PROCESSES. Writes "confined" if nothing that it tries works.
import os
import signal
import socket

escapes = []


def attempt(what, function):
    try:
        function()
    except OSError:
        return
    escapes.append(what)


def fork_too_often():
    children = []
    try:
        for _ in range(MAX_PROCESSES + 1):  # noqa: F821
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


attempt("it can open a network socket", lambda: socket.socket(socket.AF_INET))
attempt("it can open an abstract socket", lambda: socket.socket(socket.AF_UNIX))
attempt("it can read a file outside", lambda: open(CANARY).close())  # noqa: F821
attempt("it can write to a file outside", lambda: os.open(CANARY, os.O_WRONLY))  # noqa: F821
attempt("it can start more processes than allowed", fork_too_often)
print(escapes[0] if escapes else "confined")
