"""No loader runs a repo's code that it was not told to trust, from any thread."""

import os
import sys
import threading

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

repo, planted = sys.argv[1:3]


def attempt(auto, **options):
    try:
        auto.from_pretrained(repo, **options)
    except Exception as error:
        outcome = error
    else:
        outcome = None
    assert not os.path.exists(planted), (auto, options)
    assert not [name for name in sys.modules if name.startswith("transformers_modules.")], (auto, options)
    return outcome


outcomes = []


def everything():
    for options in ({"trust_remote_code": False}, {"trust_remote_code": None}, {}):
        for auto in (AutoConfig, AutoModel, AutoModelForCausalLM):
            outcomes.append(attempt(auto, **options))
        attempt(AutoTokenizer, **options)  # needs no code of the repo: it may succeed


everything()
thread = threading.Thread(target=everything)
thread.start()
thread.join()
assert len(outcomes) == 18
assert all(isinstance(outcome, (ValueError, EOFError, OSError)) for outcome in outcomes), outcomes

try:
    AutoConfig.from_pretrained(repo, trust_remote_code=True)
except ValueError as error:
    assert "no field 'trust_remote_code'" in str(error)  # noqa: PT017  # the planted flag; the code that refuses it has run
assert os.path.exists(planted), "the planted code is real"
print("refused")
