"""What the processes of `test_scale.py` do. Each task runs in every process of a world, and alone for comparison."""

import json
import os
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from own_blocks import register_all
from pairs import config, token_ids
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import blockformer

SMALL = {"num_hidden_layers": 2, "initializer_range": 0.2}
SIZES = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, **SMALL}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
EXPERTS |= {"shared_expert_intermediate_size": 64}
STEPS = 3

# Models that tensor parallelism shares out: what stands in its way, one by one.
MODELS = {
    "grouped heads, q/k norm": lambda: blockformer.BlockformerDecoderForCausalLM(config("qwen3", **SMALL)),
    "tied, learned positions, biases": lambda: blockformer.BlockformerDecoderForCausalLM(
        blockformer.preset("gpt2", **SIZES)
    ),
    "encoder, relative keys, tied": lambda: blockformer.BlockformerEncoderForMaskedLM(
        blockformer.preset("bert", position_type="relative_key_query", max_position_embeddings=32, **SIZES)
    ),
    "encoder-decoder, one relative bias": lambda: blockformer.BlockformerEncoderDecoderForConditionalGeneration(
        blockformer.preset("t5", head_dim=16, **{**SIZES, "initializer_range": None})
    ),
    "encoder-decoder, a bias in each layer, q/k norm": lambda: (
        blockformer.BlockformerEncoderDecoderForConditionalGeneration(
            blockformer.preset("umt5", head_dim=16, qk_norm=True, num_key_value_heads=2, **SIZES)
        )
    ),
    "experts, one of them shared, router loss": lambda: blockformer.BlockformerDecoderForCausalLM(
        blockformer.preset(
            "qwen2_moe", num_key_value_heads=2, head_dim=16, output_router_logits=True, **EXPERTS, **SIZES
        )
    ),
    "experts after a dense layer": lambda: blockformer.BlockformerDecoderForCausalLM(
        blockformer.preset(
            "ernie4_5_moe", num_key_value_heads=2, head_dim=16, **EXPERTS, **SIZES, mlp_layer_types=["dense", "sparse"]
        )
    ),
    "experts with biases, sinks": lambda: blockformer.BlockformerDecoderForCausalLM(
        blockformer.preset(
            "gpt_oss",
            num_key_value_heads=2,
            head_dim=16,
            **{**EXPERTS, "shared_expert_intermediate_size": 0},
            **SIZES,
            layer_types=None,
        )
    ),
    "experts without a gate, in a latent": lambda: blockformer.BlockformerDecoderForCausalLM(
        blockformer.preset(
            "nemotron_h",
            num_key_value_heads=2,
            head_dim=16,
            **{**EXPERTS, **SIZES, "num_hidden_layers": 3},
            layer_types=["full_attention", "state_space", "full_attention"],
            mlp_layers=[True, False, True],
            mlp_layer_types=["dense", "dense", "sparse"],
            moe_latent_size=40,
        )
    ),
    "pruned heads": lambda: blockformer.BlockformerDecoderForCausalLM(
        blockformer.preset("gpt2", **SIZES, pruned_heads={0: [1], 1: [0, 2]})
    ),
    "encoder-decoder, sinusoids, biases": lambda: blockformer.BlockformerEncoderDecoderForConditionalGeneration(
        blockformer.preset("marian", decoder_start_token_id=0, **SIZES)
    ),
}


def of_preset(name):
    """A small model of a preset, its norms, biases and router corrections random too."""
    config_class = blockformer.PRESETS[name][0]
    # A model after T5 has unscaled scores: drawn like the others it would be chaotic.
    sizes = {**SIZES, "initializer_range": None} if "t5" in name else SIZES
    if config_class.is_encoder_decoder:
        sizes = {**sizes, "decoder_start_token_id": 0}
    usual = blockformer.preset(name, **{key: sizes[key] for key in sizes if key != "intermediate_size"})
    own = {"intermediate_size": usual.intermediate_size} if usual.intermediate_size == 4 * 64 else {}
    own |= {"sliding_window": 6} if usual.sliding_window else {}
    # Every fourth layer of some is of another kind.
    own |= {"num_hidden_layers": 4} if not all(getattr(blockformer.preset(name), "rope_layers", None) or [True]) else {}
    if getattr(usual, "num_experts", 0):
        own |= {key: size for key, size in EXPERTS.items() if getattr(usual, key)}
    model = HEADS[config_class](blockformer.preset(name, **{**sizes, **own}))
    with torch.no_grad():
        drawn = [weight for weight in model.parameters() if weight.dim() == 1]
        drawn += [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
        for each in drawn:
            each.add_(torch.randn_like(each) * 0.2)
    return model


HEADS = {
    blockformer.BlockformerDecoderConfig: blockformer.BlockformerDecoderForCausalLM,
    blockformer.BlockformerEncoderConfig: blockformer.BlockformerEncoderForMaskedLM,
    blockformer.BlockformerEncoderDecoderConfig: blockformer.BlockformerEncoderDecoderForConditionalGeneration,
}
# Presets with a kind of attention, feed-forward or positions that none of the models above has.
SPECIAL = "phi gpt_neox olmo olmo2 gemma2 smollm3 bloom gpt_bigcode afmoe albert gte deberta-v2 mpnet m2m_100".split()
SPECIAL += [
    "deepseek_v3",
    "article-transformer-printed",
    "hunyuan_v1_dense",
    "apertus",
    "olmo_hybrid",
    "lfm2",
    "nemotron_h",
    "falcon_h1",
]
USUAL = [*MODELS, *SPECIAL]
MODELS |= {name: partial(of_preset, name) for name in blockformer.PRESETS}


def whole_in(config):
    """A pattern of the projections that are whole in each process."""
    one_key = config.num_key_value_heads == 1 or getattr(config, "kv_lora_rank", None)
    attention = config.qk_norm in ("per_head", "projection") or config.pruned_heads or config.attention_sinks or one_key
    attention = attention or config.is_varied
    places = [r"\.(self|cross)_attn\."] if attention else []
    places += (
        [r"\.self_attn\.(state_space\.)?(in|out)_proj"] if getattr(config, "layer_types", None) else []
    )  # of layers with a state
    places += [r"\.experts\."] if getattr(config, "expert_bias", False) else []
    places += [r"relative_bias\.embedding$"] if config.position_type == "disentangled" else []
    return "|".join(places) or "^$"


AUTO = {
    "blockformer_decoder": AutoModelForCausalLM,
    "blockformer_encoder": AutoModelForMaskedLM,
    "blockformer_encoder_decoder": AutoModelForSeq2SeqLM,
}


def run(tasks, rank, size, folder):
    """One process of a world: each task's answer goes into the folder."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    for task in tasks:
        torch.manual_seed(0)
        torch.save(globals()[task](rank, size, Path(folder)), f"{folder}/{task}-{rank}.pt")
    dist.destroy_process_group()


# Data parallel


def small_model():
    torch.manual_seed(0)
    return blockformer.BlockformerDecoderForCausalLM(config("qwen3", tie_word_embeddings=True, **SMALL)).train()


def steps(model, rank, size, whole=lambda tensor: tensor):
    """Losses over all processes and the weights after some steps, of which each process takes its share of the rows."""
    # A large epsilon: where a gradient is next to nothing, AdamW would make a whole step of its rounding.
    optimizer = blockformer.adamw(model, learning_rate=1e-2, weight_decay=0.1, eps=1e-3)
    losses = []
    for step in range(STEPS):
        rows = token_ids(4, 12, seed=step)[rank::size]
        loss = model(rows, labels=rows, return_logits=step > 0).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / size
        if size > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    weights = {
        name.removeprefix("module."): whole(weight.detach()).clone() for name, weight in model.named_parameters()
    }
    return {"losses": losses, "weights": weights}


def alone(rank=0, size=1, folder=None):
    return steps(small_model(), 0, 1)


def ddp(rank, size, folder):
    return steps(DistributedDataParallel(small_model()), rank, size)


def small_masked_lm():
    """With a pooler in the config, which this head does not read."""
    torch.manual_seed(0)
    dry = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return blockformer.BlockformerEncoderForMaskedLM(blockformer.preset("bert", **SIZES, **dry)).train()


def masked_lm(rank, size, folder):
    return steps(DistributedDataParallel(small_masked_lm()), rank, size)


def small_sparse():
    """With experts; the balancing loss is left out, which is no sum over the processes' rows."""
    torch.manual_seed(0)
    settings = {**EXPERTS, **SIZES, "num_key_value_heads": 2, "head_dim": 16}
    return blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen2_moe", **settings)).train()


def ddp_experts(rank, size, folder):
    return steps(DistributedDataParallel(small_sparse()), rank, size)


def fsdp_experts(rank, size, folder):
    model = small_sparse()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return steps(model, rank, size, whole=lambda weight: weight.full_tensor())


def fsdp(rank, size, folder):
    """Also saves the shards of each process, as they are."""
    model = small_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    answer = steps(model, rank, size, whole=lambda weight: weight.full_tensor())
    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=str(folder / "shards"))
    return answer


# Tensor parallel


def model_inputs(model):
    """A padded batch for a model of any topology."""
    ids = token_ids(3, 10)
    mask = torch.ones_like(ids)
    ids[1, 7:], mask[1, 7:] = 0, 0
    given = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = token_ids(3, 6, seed=1)
    return given


def answers(model):
    """Logits, generated ids, and the gradients of a loss, by parameter."""

    def whole(tensor):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    given = model_inputs(model)
    found = {}
    with torch.no_grad():
        found["logits"] = whole(model.eval()(**given).logits)
        if model.can_generate():
            prompt = {"input_ids": given["input_ids"][:1], "attention_mask": given["attention_mask"][:1]}
            found["text"] = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    labels = token_ids(3, found["logits"].shape[1], seed=2)
    found["loss in chunks"] = whole(model(**given, labels=labels, return_logits=False).loss.detach())
    loss = model(**given, labels=labels).loss
    loss.backward()
    found["loss"] = whole(loss.detach())
    found["gradients"] = {
        name: whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None
    }
    return found


def tensor_parallel(rank, size, folder):
    from transformers.distributed import DistributedConfig

    found = {}
    for number, name in enumerate(json.loads((folder / "models.json").read_text())):
        place = folder / f"model-{number}"
        kind = AUTO[AutoConfig.from_pretrained(place).model_type]
        model = kind.from_pretrained(place, distributed_config=DistributedConfig(tp_plan="auto"))
        found[name] = answers(model)
        local = {name: getattr(weight, "_local_tensor", weight) for name, weight in model.named_parameters()}
        found[name]["local_sizes"] = {name: weight.numel() for name, weight in local.items()}
    return found


def blocks_in_parallel(rank, size, folder):
    register_all()
    for file in folder.glob("*.py"):
        blockformer.register(file)
    return tensor_parallel(rank, size, folder)
