"""One process of several that watch each other; a script for `test_heartbeat`.

heartbeat_ranks.py silent    the last one stops without a word
heartbeat_ranks.py leaves    the last one leaves early
heartbeat_ranks.py paused    all are stopped from outside and go on after a while
"""

import os
import signal
import sys
import time

import torch

from modelwright.parallel.heartbeat import Heartbeat
from modelwright.parallel.mesh import join_world

LOST_AFTER_S = 3.0


def main() -> None:
    with join_world(torch.device("cpu")) as world:
        last = world.rank == world.size - 1
        with Heartbeat(world, lost_after_s=LOST_AFTER_S):
            world.barrier()
            if sys.argv[1] == "silent":
                if last:
                    print(os.getpid(), flush=True)
                    os.kill(os.getpid(), signal.SIGSTOP)
                world.barrier()  # the others wait for it
            elif sys.argv[1] == "paused":
                print("beating", flush=True)
                time.sleep(3 * LOST_AFTER_S)
            elif not last:
                time.sleep(3 * LOST_AFTER_S)
        if sys.argv[1] == "leaves" and last:
            time.sleep(4 * LOST_AFTER_S)
    print("ended well")


if __name__ == "__main__":
    main()
