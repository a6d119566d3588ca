"""Weights as DeepSpeed ZeRO saves them: a program of our own that follows the layout its `zero_to_fp32.py` reads."""

from collections import OrderedDict

import torch


def write_zero(folder, weights, stage, world, *, frozen=(), buffers=(), shared=None, alignment=None):
    """Write a checkpoint of so many processes.

    Args:
        folder: to be made, such as `global_step5`.
        weights: name -> tensor in float32.
        stage: 1, 2 or 3.
        world: how many processes there are.
        frozen: names of weights that were not trained.
        buffers: names of what are buffers.
        shared: name -> the name of the weight that it is.
        alignment: elements to whose multiple each parameter is filled up; None: they lie side by side.
    """
    folder.mkdir(parents=True)
    shared = shared or {}
    trained = [name for name in weights if name not in {*frozen, *buffers, *shared}]
    # Two groups, as weight decay makes them: matrices, and everything else.
    groups = [[name for name in trained if (weights[name].dim() > 1) is wide] for wide in (True, False)]
    half = {name: each.bfloat16() for name, each in weights.items()}
    model = {
        "module": half if stage < 3 else {name: half[name] for name in buffers},
        "buffer_names": list(buffers),
        "param_shapes": [OrderedDict((name, weights[name].shape) for name in group) for group in groups],
        "frozen_param_shapes": {name: weights[name].shape for name in frozen} if stage > 1 else None,
        "shared_params": shared,
        "ds_version": "0.19.8",
    }
    optimizers, paddings = _vectors(groups, weights, stage, world, alignment)
    for rank in range(world):
        state = {"zero_stage": stage, "partition_count": [world] * 2 if stage < 3 else world}
        if alignment is not None:
            state["param_alignment_paddings"] = paddings
        state["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"] = optimizers[rank]
        state["optimizer_state_dict"] = {"state": {0: {"exp_avg": torch.zeros(3)}}}
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, folder / name)
        if stage == 3:
            fragments = {each: _part(half[each], rank, world) for each in frozen}
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
            torch.save({**model, "frozen_param_fragments": fragments}, folder / name)
    if stage < 3:
        fragments = {each: half[each] for each in frozen} if stage == 2 else None
        torch.save({**model, "frozen_param_fragments": fragments}, folder / "mp_rank_00_model_states.pt")


def _part(tensor, rank, world):
    """The part of one process of a parameter that stage 3 cuts, the last one filled up."""
    flat = tensor.flatten()
    size = -(-len(flat) // world)
    return torch.cat([flat, flat.new_full((size * world - len(flat),), 7.0)])[rank * size : (rank + 1) * size].clone()


def _vectors(groups, weights, stage, world, alignment):
    """The vectors of each process, one a group, and the padding after each parameter."""
    if stage == 3:
        return [
            [torch.cat([_part(weights[name], rank, world) for name in group]) for group in groups]
            for rank in range(world)
        ], None
    made, paddings = [[] for _ in range(world)], []
    for group in groups:
        parts, own = [], []
        for name in group:
            flat = weights[name].flatten()
            own.append(-len(flat) % (alignment or 1))
            parts += [flat, flat.new_full((own[-1],), 7.0)]
        paddings.append(own)
        whole = torch.cat(parts)
        whole = torch.cat([whole, whole.new_zeros(-len(whole) % (2 * world))])
        for rank, part in enumerate(whole.chunk(world)):
            made[rank].append(part.clone())
    return made, paddings
