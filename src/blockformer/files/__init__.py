"""Reading and writing checkpoints: safetensors, pickles, sharded and atomic writing, the files next to them."""
