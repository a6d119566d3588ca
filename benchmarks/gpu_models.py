"""The small models that `gpu.py` checks, ours with the weights of transformers' own, and what they are given."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
ROWS, LENGTH = 4, 24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def project():
    """The package, from this checkout, with its conversion."""
    sys.path.insert(0, str(ROOT / "src"))
    import blockformer

    if importlib.util.find_spec("blockformer.conversion") is None:
        place = ROOT / "conversion"
        spec = importlib.util.spec_from_file_location(
            "blockformer.conversion", place / "__init__.py", submodule_search_locations=[str(place)]
        )
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return blockformer


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 120}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def official_models() -> dict[str, Callable[[], transformers.PreTrainedModel]]:
    """Small models of every topology, of transformers' own classes; the weights are random and large.

    Gpt-oss takes all of its experts: which ones are best is a matter of rounding in 16 bits. Gemma 2's attention is
    eager: in some releases (5.17) its default, "sdpa", leaves the soft caps out.
    """
    gated = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "initializer_range": 0.2, **TOKENS}
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
             {"layers": 2, "ffn_dim": 96, "attention_heads": 4}.items()}  # fmt: skip
    last = {"pad_token_id": 119, "decoder_start_token_id": 119, "eos_token_id": 0, "forced_eos_token_id": 0}
    types = ["linear_attention", "full_attention"]
    delta = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }  # fmt: skip
    return {
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**SIZES, intermediate_size=96, initializer_range=0.2)
        ),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **gated)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=120, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2, **TOKENS
            )
        ),
        "gemma2": lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                **SIZES, **gated, sliding_window=16, query_pre_attn_scalar=16, attn_implementation="eager"
            )
        ),
        "gpt_oss": lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(
                **SIZES, **gated, sliding_window=16, num_local_experts=4, num_experts_per_tok=4, rope_parameters=PLAIN
            )
        ),
        "mixtral": lambda: transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**SIZES, **gated, num_local_experts=4, num_experts_per_tok=2)
        ),
        "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(
                **SIZES,
                **{**gated, "num_key_value_heads": 4, "head_dim": 8},
                q_lora_rank=24,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
                n_routed_experts=4,
                num_experts_per_tok=4,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=32,
                first_k_dense_replace=1,
                rope_parameters=PLAIN,
            )
        ),
        "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(
            transformers.Qwen3_5TextConfig(**SIZES, **{**gated, "initializer_range": 0.1}, **delta, layer_types=types)
        ),
        "bamba": lambda: transformers.BambaForCausalLM(
            transformers.BambaConfig(
                **SIZES,
                **gated,
                attn_layer_indices=[1],
                mamba_d_state=16,
                mamba_d_head=32,
                mamba_n_heads=4,
                mamba_chunk_size=8,
            )
        ),
        "lfm2": lambda: transformers.Lfm2ForCausalLM(
            transformers.Lfm2Config(**SIZES, **gated, layer_types=["conv", "full_attention"])
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=120, decoder_start_token_id=0
            )
        ),
        "marian": lambda: transformers.MarianMTModel(
            transformers.MarianConfig(
                **sides, **last, d_model=64, vocab_size=120, init_std=0.2, max_position_embeddings=256
            )
        ),
    }


def converted(peer: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Ours with the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return project().from_official(folder)


def inputs_of(model, device: str) -> dict[str, torch.Tensor]:
    """A padded batch, a decoder's on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 118, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    is_decoder = not model.config.is_encoder_decoder and model.can_generate()
    for row in range(1, ROWS):
        mask[row, (slice(4 * row) if is_decoder else slice(LENGTH - 4 * row, None))] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids[:, :7].contiguous()
    elif is_decoder:  # without them, transformers counts the padding
        batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return {name: tensor.to(device) for name, tensor in batch.items()}
