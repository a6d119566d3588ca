"""lm-eval: log-likelihoods and texts. Usage: python with_lm_eval.py MODELS"""

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from shared import TEXTS, compare

BACKENDS = {"qwen3": "causal", "gpt2": "causal", "t5": "seq2seq", "bart": "seq2seq"}


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    """What a task asks of a model."""
    return [Instance(request_type=kind, doc={}, arguments=given, idx=index) for index, given in enumerate(arguments)]


def model_of(name: str, folder: str, rows: int) -> HFLM:
    """A model, without a hint of its kind, for batches of so many rows."""
    model = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", batch_size=rows)
    if model.backend != BACKENDS[name]:
        raise RuntimeError(f"lm-eval takes it for a {model.backend} model")
    return model


def likelihoods(name: str, folder: str) -> dict:
    """Log-likelihoods of the ends of texts and, of a causal model, of whole ones."""
    model = model_of(name, folder, rows=3)
    halves = [(head, " " + tail) for head, tail in (text.split(" ", 1) for text in TEXTS)]
    choices = model.loglikelihood(requests("loglikelihood", halves), disable_tqdm=True)
    found = {"choices": [likelihood for likelihood, _ in choices]}
    if model.backend == "causal":
        whole = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
        found["perplexity"] = model.loglikelihood_rolling(whole, disable_tqdm=True)
    return found


def texts(name: str, folder: str) -> list[str]:
    """What the model writes; BART one text at a time, since transformers' gives positions to padding."""
    model = model_of(name, folder, rows=1 if name == "bart" else 3)
    until = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    return model.generate_until(requests("generate_until", [(text, until) for text in TEXTS]), disable_tqdm=True)


if __name__ == "__main__":
    for job, do in {"log-likelihoods": likelihoods, "texts": texts}.items():
        for name in BACKENDS:
            compare("lm-eval", job, name, lambda folder, n=name, d=do: d(n, folder))
