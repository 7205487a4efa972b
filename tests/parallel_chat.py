"""A program with an engine, for test_parallel.py: it needs no branch to run under torchrun.
`parallel_chat.py HISTORY TURNS`: so many turns; it prints each of them when it is told."""
import atexit
import os
import sys

import torch.distributed as dist

from serving.sessions import Sessions

# Under torchrun `print` writes each word for itself, and the lines of two processes would mix.
sys.stdout.write(f"process {os.environ.get('RANK')} {os.getpid()}\n")
if os.environ.get("RANK") == "1":
    atexit.register(lambda: sys.stdout.write(f"follower still joined: {dist.is_initialized()}\n"))
history, turns = sys.argv[1:]
sessions = Sessions("tiny_chat", history=history, device="cpu", gpu_cache_tokens=1024, cpu_cache_tokens=0)
sessions.start()
for number in range(int(turns)):
    reply = sessions.chat("Hi", f"c{number}", max_tokens=50, ignore_eos=True)
    print("told", reply.token_ids, flush=True)
sessions.close()
sys.stdout.write("closed\n")
