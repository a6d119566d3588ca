"""The example that serves embeddings: both formats, and a sentence for what it refuses."""

import base64
import http.client
import json
import threading
from http.server import ThreadingHTTPServer

import huggingface_hub
import numpy as np
import pytest
from example_files import load

import blockformer
from blockformer.demo.search import EncoderMissing, encoder_folder

pytest.importorskip("sentence_transformers")
try:
    encoder_folder()
except EncoderMissing as error:
    pytest.skip(str(error), allow_module_level=True)
TEXTS = ["How do I keep bread fresh?", "Wrap the loaf in a cloth. " * 20, "Paint"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server") / "minilm"
    blockformer.convert(encoder_folder(), folder, verify=False)
    return load("embedding_server").Served(str(folder), most=4)


@pytest.fixture(scope="module")
def port(served):
    server = ThreadingHTTPServer(("127.0.0.1", 0), load("embedding_server").handler_of(served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def ask(port):
    def post(path, content, method="POST"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read())
        connection.close()
        return found

    return post


def test_both_formats_give_the_vectors(served, ask):
    expected = served.encoder.encode(TEXTS)
    status, answer = ask("/v1/embeddings", {"input": TEXTS, "model": "minilm"})
    assert (status, answer["object"], answer["model"]) == (200, "list", "minilm")
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected, atol=1e-5)
    tokens = sum(map(len, served.encoder.tokenizer(TEXTS)["input_ids"]))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    _, answer = ask("/v1/embeddings", {"input": TEXTS[0], "model": "minilm", "encoding_format": "base64"})
    found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), np.float32)
    np.testing.assert_allclose(found, expected[0], atol=1e-5)
    status, answer = ask("/embed", {"inputs": TEXTS})
    np.testing.assert_allclose(answer, expected, atol=1e-5)
    status, answer = ask("/v1/models", {}, "GET")
    assert (status, answer["data"][0]["id"]) == (200, "minilm")
    assert "vectors of 384, texts up to 256 tokens" in answer["data"][0]["description"]


@pytest.mark.parametrize(
    ("path", "content", "status", "named"),
    [
        ("/v1/embeddings", {"input": ["a", "word " * 300]}, 413, "text 1 has 302 tokens, and the model reads 256"),
        ("/embed", {"inputs": "word " * 300}, 413, "text 0 has 302 tokens"),
        ("/v1/embeddings", {"input": [1, 2]}, 400, "tokens are not taken"),
        ("/v1/embeddings", {"input": ""}, 400, "none of them empty"),
        ("/v1/embeddings", {"input": ["a"] * 5}, 413, "has 5 texts, and a request at most 4"),
        ("/v1/embeddings", {"input": "a", "dimensions": 64}, 400, "dimensions must be 384"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "must be float or base64"),
        ("/v1/embeddings", {"input": "a", "prompt_name": ["find"]}, 400, "prompt_name ['find'] is not one of"),
        ("/v1/embeddings", b"{", 400, "the body is not JSON"),
        ("/v1/embeddings", [], 400, "the body must be an object"),
        ("/v1/other", {}, 404, "no such path: /v1/other"),
    ],
)
def test_what_is_refused_says_why(ask, path, content, status, named):
    found, answer = ask(path, content)
    error = answer["error"]
    assert named in (error if path == "/embed" else error["message"])
    assert found == status
    assert path == "/embed" or error["type"] == "invalid_request_error"


def test_openai_s_client_gets_the_vectors_and_the_reasons(served, port):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    assert [each.id for each in client.models.list()] == ["minilm"]
    expected = served.encoder.encode(TEXTS)
    for form in ({}, {"encoding_format": "float"}):  # by itself it asks for base64
        answer = client.embeddings.create(model="minilm", input=TEXTS, **form)
        np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=1e-5)
    assert answer.usage.total_tokens == sum(map(len, served.encoder.tokenizer(TEXTS)["input_ids"]))
    with pytest.raises(openai.APIStatusError, match="has 302 tokens, and the model reads 256: split it") as refused:
        client.embeddings.create(model="minilm", input="word " * 300)
    assert refused.value.status_code == 413


def test_the_hub_s_client_asks_like_one_of_text_embeddings_inference(served, port, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    client = huggingface_hub.InferenceClient(f"http://127.0.0.1:{port}/embed")
    expected = served.encoder.encode(TEXTS)
    for count in (1, 3):
        found = client.feature_extraction(TEXTS[0] if count == 1 else TEXTS)
        np.testing.assert_allclose(found, expected[:count], atol=1e-5)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as refused:
        client.feature_extraction("word " * 300)
    assert refused.value.response.status_code == 413
    assert "text 0 has 302 tokens" in refused.value.response.json()["error"]


def test_what_is_no_model_is_said_in_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="not a folder with a model; make one with `blockformer convert`"):
        load("embedding_server").main([str(tmp_path)])
