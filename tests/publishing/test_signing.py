"""Signatures: a repo passes as it was signed, and a changed byte, an added file and another key are refused by name."""

import shutil

import pytest

import blockformer
from blockformer.cli import main
from blockformer.conversion.exporting import export_folder
from blockformer.publishing import signing

pytest.importorskip("model_signing")

SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


def key(folder, name):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    kind, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / f"{name}.pem").write_bytes(private.private_bytes(kind, serialization.PrivateFormat.PKCS8, plain))
    public = private.public_key().public_bytes(kind, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / f"{name}.pem", folder / f"{name}.pub"


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    home = tmp_path_factory.mktemp("signed")
    private, public = key(home, "mine")
    config = blockformer.preset("qwen3", **SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    blockformer.export_model(blockformer.BlockformerDecoderForCausalLM(config), home / "repo", sign=private)
    return home / "repo", private, public


@pytest.fixture
def repo(signed, tmp_path):
    return shutil.copytree(signed[0], tmp_path / "repo")


def test_a_repo_passes_as_it_was_signed_and_when_it_is_exported_again(signed, repo, tmp_path):
    _, private, public = signed
    assert blockformer.verify(repo, key=public).is_ok
    export_folder(repo, tmp_path / "again", sign=private)
    assert blockformer.verify(tmp_path / "again", key=public).is_ok
    with pytest.raises(SystemExit) as end:
        main(["verify", str(repo), "--key", str(public)])
    assert not end.value.code


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda repo: (repo / "README.md").write_text("other"), r"README\.md"),
        (lambda repo: (repo / "extra.txt").write_text("x"), r"Extra files .* extra\.txt"),
        (lambda repo: (repo / "generation_config.json").unlink(), r"Missing files .* generation_config\.json"),
        (lambda repo: (repo / "model.sig").write_text("{}"), r"model\.sig is damaged, or not a signature"),
        (lambda repo: (repo / "model.sig").unlink(), r"the signature is missing \(model\.sig\)"),
    ],
)
def test_what_was_changed_is_named(spoil, message, repo, signed):
    spoil(repo)
    found = blockformer.verify(repo, key=signed[2])
    assert found.problems.keys() == {"signature"}
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found.problems["signature"][0])


def test_another_key_and_no_key_are_refused(repo, tmp_path, signed):
    assert "Key mismatch" in blockformer.verify(repo, key=key(tmp_path, "other")[1]).problems["signature"][0]
    for path in (tmp_path / "nowhere.pem", tmp_path):
        with pytest.raises(signing.SigningError, match="no such key file"):
            signing.sign(repo, path)
        with pytest.raises(signing.SigningError, match="no such key file"):
            blockformer.verify(repo, key=path)
    (tmp_path / "text.pem").write_text("not a key")
    with pytest.raises(signing.SigningError, match="not a private key"):
        signing.sign(repo, tmp_path / "text.pem")
    with pytest.raises(signing.SigningError, match="not a public key"):
        blockformer.verify(repo, key=tmp_path / "text.pem")
    assert blockformer.verify(repo, key=signed[2]).is_ok
