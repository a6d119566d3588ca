"""Checkpoints of DeepSpeed ZeRO, put together: every number of every stage, and what cannot be read is said."""

import pytest
import torch
import transformers
from pairs import assert_close
from safetensors.torch import load_file

from blockformer.conversion import ConversionError, from_official
from blockformer.doctor import diagnose, mend

from ..conversion.oracles import edit_config, official_folder
from .zero_layout import write_zero

IDS = torch.arange(5, 25)[None]


def of_zero(folder, stage, world=3, family="llama", name="LlamaForCausalLM", shared=None, **how):
    """A model whose folder has ZeRO's parts in place of its weights; gives the model and its weights."""
    model = official_folder(folder, family, name, tie_word_embeddings=shared is not None)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_zero(folder / "global_step5", weights, stage, world, shared=shared, **how)
    (folder / "latest").write_text("global_step5")
    return model, weights


@torch.no_grad()
@pytest.mark.parametrize(
    ("stage", "world", "how"),
    [(1, 3, {}), (2, 4, {}), (2, 3, {"alignment": 8}), (3, 3, {}), (3, 1, {}), (2, 1, {})],
)
def test_every_stage(tmp_path, stage, world, how):
    model, weights = of_zero(tmp_path / "run", stage, world, **how)
    found = diagnose(tmp_path / "run")
    assert "the parts of DeepSpeed ZeRO" in found.what
    assert {each.kind for each in found.findings if each.severity != "note"} <= {"sharded", "fresh"}
    mend(tmp_path / "run", tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == weights.keys()
    for name, each in load_file(tmp_path / "out/model.safetensors").items():
        assert torch.equal(each, weights[name]), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_close(again(IDS).logits, model(IDS).logits, 0.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_were_frozen_are_there_too(tmp_path, stage):
    _, weights = of_zero(tmp_path / "run", stage, frozen=("model.embed_tokens.weight", "model.norm.weight"))
    mend(tmp_path / "run/global_step5", tmp_path / "out", tmp_path / "run")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == weights.keys()
    for name, each in found.items():
        is_frozen = name in ("model.embed_tokens.weight", "model.norm.weight")
        assert torch.equal(each, weights[name].bfloat16() if is_frozen else weights[name]), name


@pytest.mark.parametrize("stage", [2, 3])
def test_shared_weights_and_buffers(tmp_path, stage):
    model = official_folder(tmp_path / "run", "bart")
    weights = {name: each.detach() for name, each in model.state_dict().items()}
    (tmp_path / "run/model.safetensors").unlink()
    own = "model.shared.weight"
    shared = {name: own for name, each in weights.items() if name != own and each.data_ptr() == weights[own].data_ptr()}
    assert shared
    write_zero(tmp_path / "run/global_step5", weights, stage, 2, shared=shared, buffers=("final_logits_bias",))
    mend(tmp_path / "run", tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out").eval()
    assert torch.equal(again.final_logits_bias, model.final_logits_bias.bfloat16().float())
    assert torch.equal(again.model.shared.weight, model.model.shared.weight)
    assert diagnose(tmp_path / "out", quick=True).status == 0


def test_what_is_missing_or_unknown_is_said(tmp_path):
    of_zero(tmp_path / "run", 3)
    folder = tmp_path / "run/global_step5"
    told = lambda: " ".join(f"{each.sentence} {each.remedy}" for each in diagnose(tmp_path / "run").findings)  # noqa: E731
    (folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").rename(tmp_path / "moved")
    assert "the optim_states file of process 1 is missing" in told()
    with pytest.raises(ConversionError, match="the optim_states file of process 1 is missing"):
        mend(tmp_path / "run", tmp_path / "out")
    (tmp_path / "moved").rename(folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    (folder / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    assert "2 of 3 optim_states files are there" in told()
    (folder / "zero_pp_rank_2_mp_rank_01_model_states.pt").write_bytes(b"")
    assert (
        "tensor parallelism; join them with DeepSpeed's own program: python -m deepspeed.utils.zero_to_fp32" in told()
    )
    of_zero(tmp_path / "other", 1)
    path = tmp_path / "other/global_step5/mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=True)
    content["param_shapes"][0].popitem()
    torch.save(content, path)
    with pytest.raises(ConversionError, match="do not use up the optimizer's numbers; join them with DeepSpeed's"):
        mend(tmp_path / "other", tmp_path / "out")
    torch.save({**content, "param_shapes": None}, path)
    with pytest.raises(ConversionError, match="it has no param_shapes"):
        mend(tmp_path / "other", tmp_path / "out")


def test_of_several_steps_the_latest_is_read(tmp_path):
    _, weights = of_zero(tmp_path / "run", 2)
    write_zero(tmp_path / "run/global_step4", {name: each * 0 for name, each in weights.items()}, 2, 2)
    mend(tmp_path / "run", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["lm_head.weight"], weights["lm_head.weight"])
    (tmp_path / "run/latest").unlink()
    assert any("name the folder of one" in each.sentence for each in diagnose(tmp_path / "run").findings)


def test_the_config_s_dtype_is_compared_with_that_of_the_optimizer(tmp_path):
    of_zero(tmp_path / "run", 2)
    edit_config(tmp_path / "run", dtype="bfloat16")
    found = diagnose(tmp_path / "run", quick=True)
    assert any("config.json says bfloat16, and most weights are float32" in each.sentence for each in found.findings)


def test_loading_such_a_folder_names_doctor(tmp_path):
    of_zero(tmp_path / "run", 3)
    with pytest.raises(
        ConversionError, match=r"the parts that DeepSpeed ZeRO saves.*: blockformer doctor .* --mend NEW"
    ):
        from_official(tmp_path / "run")
