"""What a push says where there is no Hub. `tests/test_hub.py` has those that arrive."""

import pytest
from huggingface_hub import constants
from sizes import PUBLISHED

import blockformer

PUSHES = {
    "push_to_hub": lambda model, folder: model.push_to_hub("ann/small", token="hf_any"),
    "save_pretrained": lambda model, folder: model.save_pretrained(
        folder, push_to_hub=True, repo_id="ann/small", token="hf_any"
    ),
}


@pytest.mark.parametrize("way", PUSHES)
@pytest.mark.parametrize(
    ("offline", "said"),
    [
        (False, r"publishing ann/small failed, since http://127\.0\.0\.1:9 cannot be reached.*Check the connection"),
        (True, r"publishing ann/small failed, since HF_HUB_OFFLINE is set\. Unset it and push again"),
    ],
)
def test_a_push_without_a_network_says_what_to_do(tmp_path, monkeypatch, way, offline, said):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    model = blockformer.BlockformerDecoderForCausalLM(blockformer.preset("qwen3", **PUBLISHED))
    with pytest.raises(ConnectionError, match=said):
        PUSHES[way](model, tmp_path)
