"""Run a block of a page where this package is not; print which module the class of its `model` is from."""

import json
import sys

from hub_job import arguments

names = {"__name__": "__main__"}
exec(compile(arguments["block"], "the page", "exec"), names)
assert "blockformer" not in sys.modules
print(json.dumps(type(names["model"]).__module__))
