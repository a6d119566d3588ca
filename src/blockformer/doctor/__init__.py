"""`blockformer doctor`: what a checkpoint of any trainer is, what is wrong with it, and a whole one made of it."""

from .diagnosing import diagnose
from .finding import Diagnosis, Finding
from .mending import mend
from .options import Options
from .writing_out import write_for

__all__ = ["Diagnosis", "Finding", "Options", "diagnose", "mend", "write_for"]
