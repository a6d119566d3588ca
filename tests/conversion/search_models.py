"""Small official decoders with a tokenizer of whole words, to be made into rerankers and embedders."""

import torch
import transformers
from sizes import OFFICIAL_DECODER
from tokenizers import Tokenizer, models, pre_tokenizers

from blockformer.conversion.search_texts import DOCUMENTS, QUERIES

TEMPLATE = (
    "judge {% for m in messages %}{% if m.role == 'query' %} query {{ m.content }}{% endif %}"
    "{% if m.role == 'document' %} document {{ m.content }}{% endif %}{% endfor %} answer"
)
CHAT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
OWN = {
    "Qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "Gemma": {"head_dim": 8},
    "Granite": {"logits_scaling": 4.0, "tie_word_embeddings": True},
}
CONFIGS = {"Gemma3": "Gemma3Text"}
WORDS = ["<pad>", "<s>", "</s>", "<unk>", "no", "yes", "query", "document", "judge", "answer"]
WORDS += sorted({word for text in (*QUERIES, *DOCUMENTS) for word in text.split()} - {*WORDS})


def decoder(folder, kind="Qwen3", task="ForCausalLM", template=TEMPLATE, dtype=torch.float32, **more):
    """Write an official model of a kind, with random weights, and return it in float32."""
    torch.manual_seed(0)
    settings = {**OFFICIAL_DECODER, **OWN.get(kind, {}), "vocab_size": len(WORDS) + 3, **more}
    model = getattr(transformers, kind + task)(
        getattr(transformers, f"{CONFIGS.get(kind, kind)}Config")(**settings)
    ).to(dtype)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=64, padding_side="left", **special
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()
