"""Why a file next to the weights is not carried, by its name."""

from pathlib import PurePosixPath

from .names import CODE_FILES, FEW_BITS, INDEX, PROCESSOR_FILES

OTHER_FORMAT = "the model in another format"
OTHER_WEIGHTS = "other weights, which are not read"
TRAINING = "the state of a training run"
CODE = "code, which is never carried"
PICTURES = "pictures and documents"
PROCESSOR = "settings by which pictures and sound are read"
OF_FEW_BITS = "settings of weights in few bits"
BOOKKEEPING = "bookkeeping of git and the Hub"
UNKNOWN = "not known to Blockformer"
NOT_A_FILE = "not a regular file"
ODD_NAME = "a name that not every system can have"
WRITTEN_ANEW = "the new folder has its own"
OLD_CARD = "the card, which describes the old folder"
OF_THE_WAY_BACK = "left from an earlier source, and not used here"
REASONS = {
    ".h5 .msgpack .ot .onnx .onnx_data .gguf .ggml .tflite .mlmodel .engine .pb .npz .tiktoken": OTHER_FORMAT,
    ".safetensors .bin .pt .pth .ckpt .pkl": OTHER_WEIGHTS,
    " ".join(CODE_FILES): CODE,
    ".png .jpg .jpeg .gif .svg .webp .pdf .bmp .mp4 .html": PICTURES,
    ".gitattributes .gitignore .gitmodules": BOOKKEEPING,
    ".sig": "a signature, which would not hold",
}
OTHER_FORMATS = ("onnx", "openvino", "coreml", "original", "metal", "tf", "flax", "gguf", "mlx")
TRAINING_FILES = ("optimizer", "scheduler", "rng_state", "training_args", "trainer_state", "events.out", "scaler")


def reason_for(name: str) -> str:
    """Why a file is not carried."""
    path = PurePosixPath(name)
    if path.name.startswith(TRAINING_FILES) or path.parts[0] in ("runs", "logs"):
        return TRAINING
    if name in FEW_BITS:
        return OF_FEW_BITS
    if name in PROCESSOR_FILES:
        return PROCESSOR
    if path.parts[0] in OTHER_FORMATS and len(path.parts) > 1:
        return OTHER_FORMAT
    if any(part.startswith(".") for part in path.parts):
        return BOOKKEEPING
    if INDEX.fullmatch(path.name) or name.endswith(".index.json.bak"):
        return OTHER_WEIGHTS
    return next((reason for endings, reason in REASONS.items() if path.suffix.lower() in endings.split()), UNKNOWN)
