"""lm-eval: log-likelihoods and texts. Usage: python with_lm_eval.py MODELS"""

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from shared import TEXTS, compare

BACKENDS = {"qwen3": "causal", "gpt2": "causal", "t5": "seq2seq", "bart": "seq2seq"}


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    """What a task asks of a model."""
    return [Instance(request_type=kind, doc={}, arguments=given, idx=index) for index, given in enumerate(arguments)]


def run(name: str, folder: str) -> dict:
    """Everything that tasks ask of a model, which is told nothing of its kind."""
    model = HFLM(pretrained=folder, trust_remote_code=True, device="cpu", batch_size=3)
    if model.backend != BACKENDS[name]:
        raise RuntimeError(f"lm-eval takes it for a {model.backend} model")
    halves = [(head, " " + tail) for head, tail in (text.split(" ", 1) for text in TEXTS)]
    until = {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
    found = {
        "choices": model.loglikelihood(requests("loglikelihood", halves), disable_tqdm=True),
        "texts": model.generate_until(requests("generate_until", [(text, until) for text in TEXTS]), disable_tqdm=True),
    }
    if model.backend == "causal":
        whole = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
        found["perplexity"] = model.loglikelihood_rolling(whole, disable_tqdm=True)
    return found


if __name__ == "__main__":
    for name in BACKENDS:
        compare("lm-eval", "log-likelihoods and texts", name, lambda folder, n=name: run(n, folder))
