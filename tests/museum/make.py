"""Write small repos by an earlier state of this package, with what its own code computes.

Run it in a clone of that state: PYTHONPATH=CLONE/src python tests/museum/make.py tests/museum/2026-11-20
Each repo keeps only its config and weights; `expected.safetensors` has inputs and logits.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import blockformer

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
START = {"decoder_start_token_id": 0}
PRESETS = {"bert": {}, "gpt2": {}, "qwen3": {}, "t5": START, "marian": START, "transformer-base": START}


@torch.no_grad()
def main() -> None:
    for name, more in PRESETS.items():
        torch.manual_seed(0)
        config = blockformer.preset(name, **SIZES, **more)
        kind = {
            "blockformer_encoder": "EncoderForMaskedLM",
            "blockformer_decoder": "DecoderForCausalLM",
            "blockformer_encoder_decoder": "EncoderDecoderForConditionalGeneration",
        }[config.model_type]
        model = getattr(blockformer, f"Blockformer{kind}")(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # a norm that is not read must show
                parameter.add_(0.3 * torch.randn_like(parameter))
        folder = Path(sys.argv[1]) / name
        model.save_pretrained(folder)
        for path in folder.iterdir():
            if path.name not in ("config.json", "model.safetensors"):
                path.unlink()
        ids = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(1))
        inputs = {"input_ids": ids}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids.flip(1).contiguous()
        save_file({**inputs, "logits": model(**inputs).logits.contiguous()}, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
