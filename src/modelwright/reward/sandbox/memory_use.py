"""How much memory a process and its descendants use."""

import os

_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")


def memory_of_tree(process: int, proc: int) -> int:
    """Bytes of a process and its descendants in memory or swap that no file backs. Pages that a fork shares count once
    for each process. proc: descriptor of the folder /proc.

    Processes that end meanwhile count 0, and so do descendants on a kernel without CONFIG_PROC_CHILDREN.
    """
    total, pending = 0, [process]
    while pending:
        number = pending.pop()
        lines = _read(f"{number}/status", proc).splitlines()
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(_COUNTED))
        pending += map(int, _read(f"{number}/task/{number}/children", proc).split())
    return total


def _read(name: str, folder: int) -> str:
    try:
        descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 1 << 16).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
