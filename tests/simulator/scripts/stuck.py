"""One rank of two whose peer dies or hangs in the middle: `stuck.py killed` or `stuck.py hanging`."""

# ruff: noqa: E402  (the device is loaded before torch)
from __future__ import annotations

import os
import signal
import sys
import time

import npu_patch.simulator

npu_patch.simulator.load()

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
x = torch.ones(1, device="npu")
dist.all_reduce(x)
if rank == 1:
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
try:
    dist.all_reduce(x)
    torch.npu.synchronize()
except RuntimeError as error:
    print("failed:", str(error).replace("\n", " "), flush=True)
os._exit(0)
