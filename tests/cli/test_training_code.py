"""Training code's checkpoints on the command line: `convert` reads them and writes for it."""

import pytest
import torch
from own_codes import IDS, ROPE, official
from pairs import assert_close
from transformers import AutoModelForCausalLM

from blockformer.cli import main
from blockformer.cli.checkpoints import CODES
from blockformer.doctor.known_codes import OWN_CODE


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    told = capsys.readouterr()
    return ended.value.code or 0, told.out, " ".join(told.err.replace("│", " ").split())


def test_the_command_line_names_all_code_that_is_written():
    assert {*CODES} == {code.name for code in OWN_CODE if code.back is not None}


@torch.no_grad()
def test_out_and_in_again(tmp_path, capsys):
    model = official("llama", rope_parameters=ROPE)
    model.save_pretrained(tmp_path / "official")
    code, said, _ = run(capsys, "convert", tmp_path / "official", tmp_path / "lit", "--to", "litgpt")
    assert code == 0
    assert "a checkpoint for litgpt\n17 tensors written for litgpt, read again and compared" in said
    assert {path.name for path in (tmp_path / "lit").iterdir()} > {"lit_model.pth", "model_config.yaml", "config.json"}
    code, said, _ = run(capsys, "convert", tmp_path / "lit", tmp_path / "ours")
    assert code == 0
    assert f"{tmp_path / 'lit'} -> {tmp_path / 'ours'}: a self-contained repo" in said
    assert "note: a checkpoint of litgpt, read as LlamaForCausalLM" in said
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", trust_remote_code=True).eval()
    assert_close(ours(IDS).logits, model(IDS).logits, 1e-5)
    card = (tmp_path / "ours/README.md").read_text()
    assert "Converted by Blockformer from the folder `lit`" in card
    assert {path.name for path in tmp_path.iterdir()} == {"official", "lit", "ours"}
    code, said, _ = run(
        capsys, "convert", tmp_path / "lit/lit_model.pth", tmp_path / "half", "--dtype", "bfloat16", "--no-verify"
    )
    assert (code, "bfloat16" in said) == (0, True)


def test_a_file_of_no_known_code_may_be_an_articles(tmp_path, capsys):
    torch.save({"encoder.weight": torch.ones(2, 2)}, tmp_path / "weights.pt")
    code, _, error = run(capsys, "convert", tmp_path / "weights.pt", tmp_path / "out")
    assert code == 1
    assert "give config (--config) and family (--family)" in error


def test_what_is_refused(tmp_path, capsys):
    official("llama").save_pretrained(tmp_path / "official")
    target = (tmp_path / "official", tmp_path / "lit", "--to", "litgpt")
    for given in (["--dtype", "bfloat16"], ["--layers", "0"], ["--no-verify"], ["--max-shard-size", "1MB"]):
        code, _, error = run(capsys, "convert", *target, *given)
        assert code != 0
        assert f"{given[0]} cannot be combined with --to litgpt; convert in two steps" in error
    (tmp_path / "run").mkdir()
    torch.save({"tok_embeddings.weight": torch.ones(4, 2), "layers.0.attn.output_proj.weight": torch.ones(2, 2),
                "layers.0.mlp.w1.weight": torch.ones(2, 2), "layers.0.sa_norm.scale": torch.ones(2)},
               tmp_path / "run/model.pt")  # fmt: skip
    code, _, error = run(capsys, "convert", tmp_path / "run", tmp_path / "out")
    assert code == 1
    assert "torchtune saves no settings, and shapes do not show num_attention_heads" in error
    assert {path.name for path in tmp_path.iterdir()} == {"official", "run"}
