"""Runs inside the sandbox before any other program, and writes "confined" if none of its attacks works.

Reads the path of an outside file that everyone may read and write, and the limit on processes, as a list in JSON.
"""

import json
import os
import signal
import socket

canary, max_processes = json.loads(input())
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
        for _ in range(max_processes + 1):
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
attempt("it can read a file outside", lambda: open(canary).close())
attempt("it can write to a file outside", lambda: os.open(canary, os.O_WRONLY))
attempt("it can start more processes than allowed", fork_too_often)
print(escapes[0] if escapes else "confined")
