"""Try to load configs and models; print how each attempt ended, and which code of repos was imported meanwhile."""

import json
import sys

from hub_job import arguments
from transformers import AutoConfig, AutoModelForCausalLM

said = []
for repo, options in arguments["attempts"]:
    for auto in (AutoConfig, AutoModelForCausalLM):
        try:
            auto.from_pretrained(repo, **options)
        except (EOFError, OSError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("accepted")
print()  # a question that nobody answers ends without a line's end
print(json.dumps({"said": said, "remote": [name for name in sys.modules if name.startswith("transformers_modules.")]}))
