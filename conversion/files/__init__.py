"""Reading and writing checkpoints: safetensors, pickles, sharded and atomic writing, what lies beside the weights."""
