"""Hooks on the import of other modules, so that `import blockformer` itself imports none of them.

- transformers' Auto classes learn of our configs as soon as they exist.
- PEFT learns of their default target modules, if it is imported later than a model is made.
- The first import of a part of the model, by whatever name, sets the whole package up (`api`).

All follow imports by a finder on `sys.meta_path`, which is Python's public place for that. Nothing of transformers is
replaced.
"""

import importlib
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from typing import Any

PACKAGE = __name__.rpartition(".")[0]
PEFT_TABLES = "peft.utils.constants"
AUTO_CLASSES = "transformers.models.auto.configuration_auto"
CONFIGS = {
    "blockformer_decoder": "BlockformerDecoderConfig",
    "blockformer_encoder": "BlockformerEncoderConfig",
    "blockformer_encoder_decoder": "BlockformerEncoderDecoderConfig",
}
"""The config class of each `model_type`."""


def watch_imports() -> None:
    """See to them, now or when the time comes."""
    if PEFT_TABLES not in sys.modules:
        sys.meta_path.insert(0, Watch(lambda name: name == PEFT_TABLES, _tell_peft))
    sys.meta_path.insert(0, Watch(lambda name: name.startswith(f"{PACKAGE}."), _set_up))
    if AUTO_CLASSES in sys.modules:
        _register_configs()
    else:
        sys.meta_path.insert(0, Watch(lambda name: name == AUTO_CLASSES, _register_configs))


def _tell_peft() -> bool:
    compat = importlib.import_module(f"{PACKAGE}.model.compat")
    for model_type in CONFIGS:
        compat.tell_peft(model_type)
    return True


def _set_up() -> bool:
    """Import `api` if a part of the model was imported; a command line that has not come so far needs none of it."""
    is_model_there = f"{PACKAGE}.model.axes" in sys.modules  # which every config declares its fields with
    if is_model_there:
        importlib.import_module(f"{PACKAGE}.api")
    return is_model_there


def _register_configs() -> bool:
    """Register a stand-in for each config.

    Our modules cannot be imported at this point: transformers imports its Auto classes while some of its other
    modules are unfinished.
    """
    auto_config = importlib.import_module(AUTO_CLASSES).AutoConfig
    base = importlib.import_module("transformers.configuration_utils").PretrainedConfig
    for model_type, name in CONFIGS.items():
        auto_config.register(model_type, _stand_in(base, model_type, name))
    return True


def _stand_in(base: type, model_type: str, name: str) -> type:
    """A class that makes our configs; with the first of them our own class takes its place in the Auto classes."""

    def our_class():
        return getattr(importlib.import_module(PACKAGE), name)

    class StandIn(base):
        def __new__(cls, *args, **kwargs):
            return our_class()(*args, **kwargs)

        @classmethod
        def from_dict(cls, *args, **kwargs):
            return our_class().from_dict(*args, **kwargs)

    StandIn.model_type, StandIn.__name__ = model_type, name
    return StandIn


class Watch(MetaPathFinder):
    """Calls something at the end of imports of some modules, once no other of them is being imported around it.

    Args:
        concerns: which modules, by name.
        then: what to call; it returns True when it need not be called again.
    """

    def __init__(self, concerns: Callable[[str], bool], then: Callable[[], bool]):
        self.concerns, self.then = concerns, then
        self.under_way = threading.local()

    def find_spec(self, name, path=None, target=None):
        """The spec that the other finders have for a module, with a loader that reports its end."""
        if not self.concerns(name):
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = ReportingLoader(spec.loader, self)
        return spec

    def load(self, loader, module) -> None:
        """Run a module's code, and after the outermost one what is to be called then."""
        depth = getattr(self.under_way, "depth", 0)
        self.under_way.depth = depth + 1
        try:
            loader.exec_module(module)
        finally:
            self.under_way.depth = depth
        if depth == 0 and self in sys.meta_path and self.then() and self in sys.meta_path:
            sys.meta_path.remove(self)


class ReportingLoader(Loader):
    """Loads a module by its own loader, which it leaves in the module."""

    def __init__(self, loader: Any, watch: Watch):
        self.loader, self.watch = loader, watch

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        """As the module's loader makes it."""
        return self.loader.create_module(spec)

    def exec_module(self, module):
        """Run the module's code."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.watch.load(self.loader, module)
