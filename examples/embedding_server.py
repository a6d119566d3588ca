"""Serve a converted embedder by two formats that clients know: OpenAI's and text-embeddings-inference's.

    pip install sentence-transformers
    python examples/embedding_server.py minilm --port 8000
    curl localhost:8000/v1/embeddings -H 'Content-Type: application/json' -d '{"input": ["A text."], "model": "minilm"}'
    curl localhost:8000/embed -H 'Content-Type: application/json' -d '{"inputs": ["A text."]}'

MODEL is a folder that `blockformer convert` made and sentence-transformers opens. `GET /v1/models` says what is served.
A text that is too long is refused, never cut. For one machine and people you trust: there are no keys and no TLS.
"""

import argparse
import base64
import importlib.util
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import blockformer  # noqa: F401 - the Auto classes know its models

LARGEST = 32 << 20
"""Bytes of a request."""


class Refused(ValueError):
    """A request that gets an error; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Served:
    """A model, its name, and what it takes.

    Args:
        folder: the model's.
        most: texts in a request.
        batch: texts in a forward pass; sentence-transformers puts texts of like lengths together.
    """

    def __init__(self, folder: str, most: int = 2048, batch: int = 32) -> None:
        from sentence_transformers import SentenceTransformer

        self.name, self.most, self.batch = Path(folder).name, most, batch
        self.encoder = SentenceTransformer(folder, device="cpu")
        self.encoder[0].model.prepare_for_inference()
        self.longest = self.encoder.max_seq_length
        self.size = self.encoder.get_embedding_dimension()

    @property
    def title(self) -> str:
        """What is served, in words."""
        prompts = ", ".join(name for name, text in self.encoder.prompts.items() if text) or "none"
        return f"{self.name}: vectors of {self.size}, texts up to {self.longest} tokens, prompts: {prompts}"

    def vectors(self, texts: Any, prompt: Any = None) -> tuple[Any, int]:
        """Vectors [N, C] of a text or several, and the number of their tokens.

        Raises:
            Refused: it is no text, too long, or there are too many.
        """
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(each, str) and each for each in texts):
            raise Refused("the input must be a text or a list of texts, none of them empty; tokens are not taken")
        if len(texts) > self.most:
            raise Refused(f"the input has {len(texts)} texts, and a request at most {self.most}: send several", 413)
        if prompt is not None and prompt not in list(self.encoder.prompts):
            raise Refused(f"prompt_name {prompt!r} is not one of {', '.join(self.encoder.prompts)}, the model's")
        before = "" if prompt is None else self.encoder.prompts[prompt]
        ids = self.encoder.tokenizer([before + each for each in texts], truncation=False, verbose=False)["input_ids"]
        for place, each in enumerate(ids):
            if len(each) > self.longest:
                raise Refused(f"text {place} has {len(each)} tokens, and the model reads {self.longest}: split it", 413)
        found = self.encoder.encode(texts, batch_size=self.batch, prompt_name=prompt, show_progress_bar=False)
        return found, sum(map(len, ids))


def openai_answer(served: Served, asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to `POST /v1/embeddings`; `prompt_name` is an addition to that format."""
    form = asked.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise Refused(f"encoding_format must be float or base64, not {form!r}")
    if asked.get("dimensions") not in (None, served.size):
        raise Refused(f"dimensions must be {served.size}, the model's, or left out")
    vectors, tokens = served.vectors(asked.get("input"), asked.get("prompt_name"))
    shown = [base64.b64encode(each.tobytes()).decode() if form == "base64" else each.tolist() for each in vectors]
    data = [{"object": "embedding", "index": place, "embedding": each} for place, each in enumerate(shown)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": served.name, "usage": usage}


def handler_of(served: Served) -> type[BaseHTTPRequestHandler]:
    """What answers the requests of one server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            about = {"id": served.name, "object": "model", "owned_by": "local", "description": served.title}
            answers = {"/health": {}, "/v1/models": {"object": "list", "data": [about]}}
            known = self.path in answers
            self.send(200 if known else 404, answers.get(self.path, {"error": f"no such path: {self.path}"}))

        def do_POST(self) -> None:
            try:
                asked = self.body()
                if self.path == "/v1/embeddings":
                    self.send(200, openai_answer(served, asked))
                elif self.path == "/embed":
                    self.send(200, served.vectors(asked.get("inputs"), asked.get("prompt_name"))[0].tolist())
                else:
                    raise Refused(f"no such path: {self.path}; there are /v1/embeddings and /embed", 404)
            except Refused as error:
                message, kind = str(error), "invalid_request_error"
                inner = {"message": message, "type": kind, "param": None, "code": None}
                is_tei = self.path == "/embed"
                self.send(error.status, {"error": message, "error_type": "Validation"} if is_tei else {"error": inner})

        def body(self) -> dict[str, Any]:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > LARGEST:
                self.close_connection = True
                raise Refused(f"a request needs a Content-Length of at most {LARGEST} bytes", 413)
            try:
                asked = json.loads(self.rfile.read(int(length)))
            except ValueError as error:
                raise Refused(f"the body is not JSON: {error}") from error
            if not isinstance(asked, dict):
                raise Refused("the body must be an object")
            return asked

        def send(self, status: int, content: Any) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words: Any) -> None:
            pass

    return Handler


def main(command_line=None) -> None:
    """Load, say what is served, serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="the folder of a converted embedder")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="the port (default: 8000)")
    parser.add_argument("--most", type=int, default=2048, help="texts in a request (default: 2048)")
    arguments = parser.parse_args(command_line)
    if importlib.util.find_spec("sentence_transformers") is None:
        sys.exit("sentence-transformers is not installed: pip install sentence-transformers")
    if not (Path(arguments.model) / "config.json").is_file():
        sys.exit(f"{arguments.model}: not a folder with a model; make one with `blockformer convert`")
    served = Served(arguments.model, arguments.most)
    server = ThreadingHTTPServer((arguments.host, arguments.port), handler_of(served))
    print(f"{served.title}\nhttp://{arguments.host}:{server.server_port}/v1/embeddings and /embed; Ctrl-C ends it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
