"""The values of a config that need more than a renaming between the official fields and ours, in both directions."""

from .base import Computed, NotExpressible, Official, Value, constants
from .common import DROPOUTS, ENDS, LAST_PLACE, TOKENS, common_entries, token_or_none, within
from .encoder import RELATIVE, SIDE, TOKEN_TYPES, EncoderPositions, Pooler
from .heads import NOT_PRUNED, PRUNED_HEADS, HeadDim
from .rotary import AXES, Rope, RopeByLayerType, RopeOfText, RotaryPart, only_sliding_layers_rotate, part_of
from .scalars import Factor, Flag, InnerSize, RootOfWidth, invert_power, positive, roundest
from .states import ScansByLayer, StatesByLayer, least_step
from .windows import Window
