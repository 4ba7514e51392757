"""What happens in processes of their own to the heap for tensors, for `test_tensor_heap`: `heap_process.py NAME`."""

import json
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memory_references import NaiveHeap
from modelwright.ops.tensor_heap import LEAST_BYTES, give_back_memory, heap_figures, use_tensor_heap

GROW_BYTES = 2**21
ALIGNMENT = 64


def block(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def twin() -> dict[str, int]:
    """The same blocks in the same order have the places that the reference gives them."""
    use_tensor_heap()
    draw, naive, alive, base = random.Random(0), NaiveHeap(grow_bytes=GROW_BYTES), [], 0
    for number in range(2000):
        if draw.random() < 0.52 or not alive:
            num_bytes = draw.choice([LEAST_BYTES, draw.randint(LEAST_BYTES, 2**18), draw.randint(2**18, 2**22)])
            size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            made, offset = block(num_bytes), naive.allocate(size)
            base = base or made.data_ptr()
            assert made.data_ptr() - base == offset, number
            alive.append((made, offset, size))
        else:
            made, offset, size = alive.pop(draw.randrange(len(alive)))
            naive.give(offset, size)
            del made
    figures = heap_figures()
    assert figures is not None
    assert figures.living_bytes == sum(size for _, _, size in alive)
    assert figures.mapped_bytes == naive.end
    return {"mapped": figures.mapped_bytes, "peak": figures.peak_bytes}


def small() -> dict[str, int]:
    """Blocks below the least size are not in the heap."""
    use_tensor_heap()
    kept = [block(LEAST_BYTES - 1) for _ in range(100)]
    figures = heap_figures()
    assert figures is not None
    return {"living": figures.living_bytes, "kept": len(kept)}


def threads() -> dict[str, int]:
    """Threads that make and free, also what others have made, keep what they have written."""
    use_tensor_heap()
    shared: list[Tensor] = []
    lock, wrong = threading.Lock(), []

    def work(seed: int) -> None:
        draw, own = random.Random(seed), []
        for _ in range(300):
            made = block(draw.randint(LEAST_BYTES, 2**20))
            made.fill_(seed)
            own.append(made)
            if draw.random() < 0.5:
                gone = own.pop(draw.randrange(len(own)))
                if not bool((gone == seed).all()):
                    wrong.append(seed)
                with lock:
                    shared.append(gone)
                    if len(shared) > 8:
                        shared.pop(draw.randrange(8))
            if len(own) > 16:
                del own[:8]
        wrong.extend(seed for made in own if not bool((made == seed).all()))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    shared.clear()
    figures = heap_figures()
    assert figures is not None
    return {"wrong": len(wrong), "living": figures.living_bytes}


def fork() -> dict[str, int]:
    """Children that are forked while another thread is in the heap can make tensors."""
    use_tensor_heap()
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            block(2**17)

    worker = threading.Thread(target=busy)
    worker.start()
    states = []
    for _ in range(20):
        child = os.fork()
        if child == 0:
            os._exit(0 if block(2**18).fill_(3).sum() == 3 * 2**18 else 1)
        states.append(os.waitpid(child, 0)[1])
    stop.set()
    worker.join()
    return {"failed": sum(state != 0 for state in states)}


def pages() -> dict[str, int]:
    """Free pages stay until they are given back; living ones keep their values."""
    use_tensor_heap()
    kept = block(2**20).fill_(7)
    gone = block(200 * 2**20).fill_(1)
    other = block(2**20).fill_(9)
    full = resident_bytes()
    del gone
    freed = resident_bytes()
    give_back_memory()
    returned = resident_bytes()
    assert bool((kept == 7).all())
    assert bool((other == 9).all())
    assert bool((block(100 * 2**20).fill_(5) == 5).all())
    return {"full": full, "freed": freed, "returned": returned}


def numpy_and_pickle() -> dict[str, bool]:
    """Memory that leaves PyTorch: arrays that outlive their tensor, and storages that processes share."""
    use_tensor_heap()
    array = block(2**20).fill_(4).numpy()
    others = [block(2**20).fill_(number) for number in range(8)]
    shared = block(2**20).fill_(6).share_memory_()
    resized = torch.empty(0).resize_(2**18).fill_(2.0)
    assert all(bool((one == number).all()) for number, one in enumerate(others))
    return {
        "array": bool((array == 4).all()),
        "shared": bool((shared == 6).all()),
        "resized": float(resized.sum()) == 2.0 * 2**18,
        "numpy": int(np.asarray(shared).sum()) == 6 * 2**20,
    }


def off() -> dict[str, bool]:
    """The variable, or a compiler that is missing, leaves glibc's heap, which maps larger blocks one by one."""
    is_used = use_tensor_heap()
    gone = block(64 * 2**20).fill_(1)
    full = resident_bytes()
    del gone
    give_back_memory()
    return {"used": is_used, "returned": resident_bytes() < full - 60 * 2**20, "figures": heap_figures() is not None}


CHECKS: dict[str, Callable[[], dict]] = {
    one.__name__: one for one in (twin, small, threads, fork, pages, numpy_and_pickle, off)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(CHECKS[sys.argv[1]]()))
