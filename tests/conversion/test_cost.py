"""What a conversion costs: memory at its peak, and what planning reads."""

import sys

import pytest
import torch
import transformers
from fork_server import ForkServer, program

from blockformer.conversion.plan import parse_dtype, plan_in
from blockformer.files.checkpoint import Checkpoint

from .oracles import edit_tensors

MIB = 1 << 20
LARGEST = 32 * MIB
SIZES = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16}


def decoder(folder, words):
    """A model whose largest tensor, which a tied head stores a second time, has `words` times 1 KiB in bfloat16."""
    config = transformers.LlamaConfig(vocab_size=words, tie_word_embeddings=True, dtype="bfloat16", **SIZES)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    edit_tensors(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    return folder


def transposing(folder, width):
    """A model whose largest tensors, of 8 * width**2 bytes in bfloat16, are transposed."""
    config = transformers.GPT2Config(n_embd=width, n_layer=1, n_head=1, n_inner=4 * width, vocab_size=64, n_positions=8)
    transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize(("make", "size", "times"), [(decoder, 32 << 10, 0), (transposing, 2048, 2)])
def test_memory_at_its_peak(tmp_path, processes: ForkServer, make, size, times, dtype):
    """What is renamed, cast or compared goes by in parts; what an operation changes is held as it is read and made."""
    small, large = make(tmp_path / "small", 64), make(tmp_path / "large", size)
    settings = "{}" if dtype is None else f'{{"dtype": "{dtype}"}}'
    said = processes.said(
        program("memory_of_casts"), small, large, tmp_path / "target", settings, folder=tmp_path, elsewhere=False
    )
    grown = int(said.splitlines()[-1])
    print(f"{grown / MIB:.0f} MiB")
    assert grown < times * LARGEST + (40 if times else 24) * MIB


def reads(monkeypatch):
    """The names of tensors that are read from here on."""
    names = []
    for way in ("read", "parts"):
        real = getattr(Checkpoint, way)
        monkeypatch.setattr(Checkpoint, way, lambda self, name, real=real: (names.append(name), real(self, name))[1])
    return names


def test_planning_reads_no_layers_that_are_not_of_the_model(tmp_path, monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
    config = transformers.Glm4MoeConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, n_routed_experts=4,
        num_experts_per_tok=2, first_k_dense_replace=1,
    )  # fmt: skip
    transformers.Glm4MoeForCausalLM(config).save_pretrained(tmp_path / "src")
    further = {"model.layers.2.eh_proj.weight": torch.ones(32, 64), "model.layers.2.enorm.weight": torch.ones(32)}
    edit_tensors(tmp_path / "src", **further)
    names = reads(monkeypatch)
    with Checkpoint(tmp_path / "src") as checkpoint:
        plan = plan_in(checkpoint, None, parse_dtype(None))
    assert plan.origin.unused == list(further)
    assert names == []


def test_planning_reads_the_buffers_that_it_judges(tmp_path, monkeypatch):
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "src")
    buffer = {"embeddings.position_ids": torch.arange(512)[None]}
    edit_tensors(tmp_path / "src", **buffer)
    names = reads(monkeypatch)
    with Checkpoint(tmp_path / "src") as checkpoint:
        plan_in(checkpoint, None, parse_dtype(None))
    assert names == list(buffer)
