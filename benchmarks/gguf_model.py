"""A Qwen3 as a GGUF file, and llama.cpp running one, by token ids and without a tokenizer.

Needs the packages `gguf` and `llama_cpp` (llama-cpp-python).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

# Names in an official Qwen3 checkpoint -> names in a GGUF file; a layer's names are without their prefix.
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The GGUF name of a weight of an official Qwen3.

    Raises:
        KeyError: a Qwen3 has no such weight.
    """
    if not name.startswith("model.layers."):
        return WHOLE[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{LAYER[rest.removesuffix('.weight')]}.weight"


def write(path: Path, config: Mapping, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a Qwen3 as a GGUF file without a vocabulary.

    Args:
        config: the entries of an official Qwen3's `config.json`.
        weights: by their official names. Matrices are written as they are, in float32 or bfloat16, vectors in float32.
            A head that is tied may be among them; llama.cpp takes the embeddings where there is none.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, weight in weights.items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        weight = weight.detach().contiguous()
        if weight.dim() == 1 or weight.dtype is torch.float32:
            writer.add_tensor(gguf_name(name), weight.float().numpy())
        else:
            bits = weight.to(torch.bfloat16).view(torch.uint8).numpy()
            writer.add_tensor(gguf_name(name), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, threads: int, bfloat16_head: bool = False) -> None:
    """Write the Q4_0 form of a GGUF file, by llama.cpp itself.

    Args:
        bfloat16_head: keep embeddings and head in bfloat16; by itself llama.cpp gives a head of 6 bits.
    """
    import gguf
    import llama_cpp

    _be_quiet()
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype, settings.nthread = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, threads
    if bfloat16_head:
        settings.token_embedding_type = settings.output_tensor_type = int(gguf.GGMLQuantizationType.BF16)
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if failed:
        raise RuntimeError(f"llama.cpp could not quantize {source}")


class GgufModel:
    """A GGUF file in llama.cpp's own runtime: one sequence, kept between calls.

    Args:
        path: the file.
        room: the most tokens of a sequence.
        threads: of the processor.
        exact: a float32 cache and plain attention; otherwise what llama.cpp does by itself (float16).
    """

    def __init__(self, path: Path, room: int, threads: int, exact: bool = False):
        import llama_cpp

        self._library = llama_cpp
        _be_quiet()
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )  # fmt: skip
        if not self._model:
            raise RuntimeError(f"llama.cpp could not load {path}")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = room
        settings.n_threads = settings.n_threads_batch = threads
        if exact:
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeError(f"llama.cpp could not make a context for {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def forget(self, length: int = 0) -> None:
        """Keep the first so many tokens of the sequence."""
        self._library.llama_memory_seq_rm(self._memory, 0, length, -1)

    def feed(self, ids: list[int]) -> np.ndarray:
        """Append tokens to the sequence; the logits after the last of them, [V]."""
        tokens = (self._library.llama_token * len(ids))(*ids)
        if self._library.llama_decode(self._context, self._library.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama.cpp could not take these tokens")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(self._vocab_size,))

    def generate(self, ids: list[int], count: int) -> list[int]:
        """Write so many tokens after a prompt, greedily; a new sequence."""
        self.forget()
        written = [int(self.feed(ids).argmax())]
        while len(written) < count:
            written.append(int(self.feed(written[-1:]).argmax()))
        return written

    def close(self) -> None:
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)


def _be_quiet() -> None:
    import llama_cpp

    llama_cpp.llama_log_set(_DISCARD, ctypes.c_void_p(0))


_DISCARD = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)
