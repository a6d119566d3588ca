"""In place of a part that this repo's model does not use. Blockformer has its code, and so do repos that need it."""


class LeftOut:
    """A class or a function of the part: a base without fields, and an error where it is called."""

    left_out = __name__.rpartition(".")[2]

    def __init__(self, *args, **kwargs):
        why = f"this repo leaves out {self.left_out}.py, which its model does not use"
        raise ValueError(f"{type(self).__name__}: {why}; install blockformer, which has it, and export again.")


def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(f"{__name__} has no {name}: {__doc__}")
    return type(name, (LeftOut,), {})
