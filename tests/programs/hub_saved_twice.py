"""Save a model with a push twice; in between its owner changes the card there and puts a file into the folder here."""

import json
import os

from hub_job import folder, make, token
from huggingface_hub import HfApi

kept = os.path.join(folder, "ann-kept")
push = {"push_to_hub": True, "repo_id": "ann/kept", "token": token}
make(8).save_pretrained(kept, **push)
card = os.path.join(kept, "README.md")
with open(card, "a") as file:
    file.write("A line of the owner.\n")
HfApi(token=token).upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id="ann/kept")
os.makedirs(os.path.join(kept, "notes"))
with open(os.path.join(kept, "notes", "private.txt"), "w"):
    pass
make(9).save_pretrained(kept, **push)
print(json.dumps(None))
