"""A model's weights as FSDP2 leaves them: parts that the processes pickle, and a distributed checkpoint of all."""

import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

source, target, size = sys.argv[1], sys.argv[2], int(sys.argv[3])


def write(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{target}/store", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    full = load_file(f"{source}/model.safetensors")
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items()}
    os.makedirs(f"{target}/ranks", exist_ok=True)
    torch.save(parts, f"{target}/ranks/model_world_size_{size}_rank_{rank}.pt")
    torch.save({"step": 3}, f"{target}/ranks/optim_world_size_{size}_rank_{rank}.pt")
    dcp.save({"model": parts, "optimizer": {"step": torch.ones(2)}}, checkpoint_id=f"{target}/dcp")
    dist.destroy_process_group()


context = multiprocessing.get_context("fork")
processes = [context.Process(target=write, args=(rank,)) for rank in range(size)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(max(abs(process.exitcode) for process in processes))
