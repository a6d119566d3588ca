"""Talk to a converted decoder: you type a line and see the answer as it is written; the conversation is remembered.

    blockformer convert Qwen/Qwen3-0.6B qwen3
    python examples/chat.py qwen3
    python examples/chat.py qwen3 --system "Answer in one sentence." --greedy

An empty line or Ctrl-D ends it.
"""

import argparse
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import blockformer  # noqa: F401  (the Auto classes take its classes then, not the code in the repo)


def answer(model, tokenizer, messages: list[dict[str, str]], **settings) -> str:
    """The model's next answer, which is also printed as it is written.

    Args:
        model: a decoder with a language model head.
        tokenizer: its tokenizer, with a chat template.
        messages: the conversation, each with its `role` ("system", "user" or "assistant") and `content`.
        settings: what `generate` takes.
    """
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids, mask = inputs["input_ids"].to(model.device), inputs["attention_mask"].to(model.device)  # each [1, T]
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    tokens = model.generate(input_ids=ids, attention_mask=mask, streamer=streamer, **settings)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def main(command_line=None) -> None:
    """Load, then answer line after line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("repo", help="a decoder of Blockformer: a folder or a Hub id")
    parser.add_argument("--system", help="the system prompt")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token, no sampling")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="length of an answer (default: 512)")
    arguments = parser.parse_args(command_line)

    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.repo)
    except (OSError, ValueError) as error:
        sys.exit(f"{arguments.repo}: no repo with a tokenizer: {str(error).partition(chr(10))[0]}")
    if tokenizer.chat_template is None:
        sys.exit(f"{arguments.repo}: its tokenizer has no chat template; take a model that was trained to chat")
    model = AutoModelForCausalLM.from_pretrained(arguments.repo).eval()
    model.prepare_for_inference()  # what is faster on this processor
    settings = {"do_sample": not arguments.greedy, "max_new_tokens": arguments.max_new_tokens}
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            break
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": answer(model, tokenizer, messages, **settings)})


if __name__ == "__main__":
    main()
