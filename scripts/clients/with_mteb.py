"""mteb: scores of its own small tasks. Usage: python with_mteb.py MODELS"""

import mteb
from mteb.mocks.mock_tasks import MockClassificationTask, MockRetrievalTask, MockSTSTask
from sentence_transformers import SentenceTransformer, models
from shared import TRUST, compare


def run(folder: str) -> list:
    """The main score of each task."""
    words = models.Transformer(folder, model_kwargs=TRUST, config_kwargs=TRUST, processor_kwargs=TRUST)
    model = SentenceTransformer(modules=[words, models.Pooling(64, "mean")], device="cpu")
    tasks = [MockSTSTask(), MockRetrievalTask(), MockClassificationTask()]
    results = mteb.evaluate(model, tasks, cache=None, co2_tracker=False, show_progress_bar=False)
    return [result.get_score() for result in results.task_results]


if __name__ == "__main__":
    for name in ("bert-encoder", "qwen3"):
        compare("mteb", "similarity, retrieval, classification", name, run)
