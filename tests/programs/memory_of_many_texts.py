"""Write, or prepare a model and undo it, again and again; print by how much the process has grown."""

import sys

import psutil
import torch

import blockformer

family, job, warm, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sizes = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 520,
    "num_attention_heads": 4,
    "vocab_size": 777,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
torch.manual_seed(0)
config = blockformer.preset(family, **sizes, **({"decoder_start_token_id": 0} if family == "t5" else {}))
kind = "EncoderDecoderForConditionalGeneration" if config.is_encoder_decoder else "DecoderForCausalLM"
model = getattr(blockformer, "Blockformer" + kind)(config).eval()
if job.endswith("bfloat16"):
    model.to(torch.bfloat16)


def prepare():
    model.prepare_for_inference(compile=job.endswith("compiled"))


def write(cycle):
    ids = torch.randint(3, 777, (1, 90 + cycle % 3), generator=torch.Generator().manual_seed(cycle % 7))
    beams = 3 if job.endswith("beams") else 1
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, num_beams=beams)


def prepare_and_undo(cycle):
    prepare()
    write(cycle)
    model.prepare_for_training()


if job in ("write prepared", "write compiled"):
    prepare()
process, held = psutil.Process(), []
for cycle in range(warm + cycles):
    write(cycle) if job.startswith("write") else prepare_and_undo(cycle)
    if cycle + 1 == warm:
        before = process.memory_info().rss
print(process.memory_info().rss - before)
