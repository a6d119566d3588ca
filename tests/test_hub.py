"""Publishing and loading over HTTP, against a Hub on loopback (`hub_server.py`).

A client reads where its Hub is when huggingface_hub is imported, so every client here is a process of its own.
"""

import json
import re
from types import SimpleNamespace

import page_blocks
import pytest
import torch
from fork_server import ForkServer, program
from hub_server import Hub
from own_blocks import NORM
from pairs import assert_close
from sizes import PUBLISHED

from blockformer.presets import preset
from blockformer.publishing import code_files

IDS = [[5, 88, 301, 17, 9, 40]]
ANN, BOB = "hf_ann", "hf_bob"


class Clients:
    """Processes that know one Hub."""

    def __init__(self, hub, folder):
        self.folder = folder
        settings = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}
        settings |= dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS"), "1")
        self.server = ForkServer(folder / "home", settings)
        self.home, self.close = self.server.home, self.server.close

    def run(self, code, elsewhere=True, **arguments):
        """What a job prints last, as JSON; `programs/hub_job.py` has its arguments."""
        arguments = {"folder": str(self.folder), "ids": IDS, "sizes": PUBLISHED, **arguments}
        return json.loads(self.server.said(code, json.dumps(arguments), folder=self.folder, elsewhere=elsewhere))

    def load(self, repo, *revisions, **arguments):
        """The logits of each revision where this package is not, and what else the job said."""
        path = self.folder / "loaded.pt"
        said = self.run(program("hub_load"), repo=repo, revisions=revisions, save=str(path), **arguments)
        return torch.load(path, weights_only=True), said


@pytest.fixture(scope="module")
def published(tmp_path_factory, tiny_tokenizer):
    """A Hub with `ann/small` in three versions and the private `ann/secret`, as this package publishes them."""
    folder = tmp_path_factory.mktemp("hub")
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    hub = Hub({ANN: "ann", BOB: "bob"})
    clients = Clients(hub, folder)
    commits = clients.run(program("hub_publish"), elsewhere=False, token=ANN)
    logits = torch.load(folder / "logits.pt", weights_only=True)
    yield SimpleNamespace(hub=hub, clients=clients, commits=commits, logits=logits, folder=folder, home=clients.home)
    clients.close()
    hub.stop()


def test_the_block_on_trust_loads_a_commit_with_its_code(published):
    """Of a repo that is there, and one of its commits."""
    block = page_blocks.block("trust.md", "someone/their-model")
    commit = re.search(r'commit = "(\w+)"', block)[1]
    block = block.replace("someone/their-model", "ann/small").replace(commit, published.commits["first"])
    module = published.clients.run(program("hub_page"), block=block)
    assert module.startswith("transformers_modules.ann.small.")
    assert published.commits["first"] in module


def files_of(published, repo, revision):
    found = published.hub.repos[repo]
    return found.commits[found.resolve(revision)]


@pytest.mark.versions
def test_each_revision_has_its_own_weights_elsewhere(published):
    commits = published.commits
    wanted = {"None": 2, "v1": 1, commits["first"]: 1, "try": 3}
    revisions = [None if name == "None" else name for name in wanted]
    found, _ = published.clients.load("ann/small", *revisions)
    assert list(found) == list(wanted)
    for name, seed in wanted.items():
        assert torch.equal(found[name], published.logits[seed]), name
    assert not torch.equal(published.logits[1], published.logits[2])
    code = {path.relative_to(published.home).parts[-2] for path in published.home.rglob("modeling_decoder.py")}
    assert {commits["first"], commits["second"], commits["third"]} <= code


@pytest.mark.versions
def test_card_code_and_tokenizer_arrive(published, tiny_tokenizer):
    names = set(files_of(published, "ann/small", "main"))
    code = code_files(preset("qwen3", **PUBLISHED)).keys()
    assert names >= {*code, "config.json", "generation_config.json", "README.md", "tokenizer.json"}
    for repo in ("ann/small", "ann/secret"):
        card = files_of(published, repo, "main")["README.md"].data.decode()
        assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
        assert "trust_remote_code=True" in card
        assert "More Information Needed" not in card
    card = files_of(published, "ann/small", "v1")["README.md"].data.decode()
    assert "- blockformer\n- tiny\n" in card
    _, (ids, text) = published.clients.load("ann/small", None, words=["import heapq"])
    assert ids == tiny_tokenizer(["import heapq"]).input_ids
    assert text[0].startswith("import heapq")


CONFIG_ALONE = r"""
import json, os, shutil, torch
from hub_job import arguments, folder, logits
from huggingface_hub import hf_hub_download
from transformers import AutoConfig, AutoModelForCausalLM
again = os.path.join(folder, "again")
AutoConfig.from_pretrained("ann/small", revision="v1", trust_remote_code=True).save_pretrained(again)
shutil.copy(hf_hub_download("ann/small", "model.safetensors", revision="v1"), again)
model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
torch.save(logits(model), arguments["save"])
print(json.dumps(None))
"""


@pytest.mark.versions
def test_a_config_that_is_saved_alone_brings_the_code_of_its_models(published):
    path = published.folder / "again.pt"
    published.clients.run(CONFIG_ALONE, save=str(path))
    assert torch.equal(torch.load(path, weights_only=True), published.logits[1])


def test_large_files_come_in_parts_and_no_token_goes_to_their_store(published):
    stored = [request for request in published.hub.requests if request[0] == "PUT"]
    assert {path.rpartition("/")[2] for _, path, _, _ in stored} >= {"1", "2", "3"}
    assert not any(token for method, path, token, _ in published.hub.requests if path.count("/") < 3 and len(path) > 64)
    assert not any(token for _, _, token, _ in stored)
    files = files_of(published, "ann/small", "v1")
    assert files["model.safetensors"].lfs
    assert len(files["model.safetensors"].data) > 2 * published.hub.part
    assert not files["config.json"].lfs
    shards = [name for name in files_of(published, "ann/secret", "main") if name.endswith(".safetensors")]
    assert len(shards) > 2


def test_a_push_leaves_no_weights_of_an_earlier_one(published):
    """The library would load the older, unsharded file."""
    before, after = (set(files_of(published, "ann/small", name)) for name in ("v1", "main"))
    assert "model.safetensors" in before
    assert "model.safetensors" not in after
    assert "model.safetensors.index.json" in after
    assert "tokenizer.json" in after & before
    third = set(files_of(published, "ann/small", "try"))
    assert {name for name in third if "safetensors" in name} == {"model.safetensors"}


def test_a_download_that_breaks_off_goes_on_where_it_stopped(published):
    oid = files_of(published, "ann/small", "v1")["model.safetensors"].lfs
    published.hub.cut_once.add(oid)
    start = len(published.hub.requests)
    found, _ = published.clients.load("ann/small", "v1", piece=10_000)
    assert torch.equal(found["v1"], published.logits[1])
    ranges = [asked for _, path, _, asked in published.hub.requests[start:] if oid in path]
    assert ranges[0] == ""
    assert ranges[1].startswith("bytes=")
    assert int(ranges[1].removeprefix("bytes=").partition("-")[0]) > 0


@pytest.mark.versions
def test_a_private_repo_is_for_its_owner(published):
    trust = {"trust_remote_code": True}
    attempts = [["ann/secret", {**trust, **({"token": token} if token else {})}] for token in (None, BOB, "hf_wrong")]
    outcome = published.clients.run(program("hub_attempts"), attempts=attempts)
    assert len(outcome["said"]) == 6
    for said in outcome["said"][:4]:
        assert said.startswith("OSError: ann/secret is not a local folder")
        assert "pass a token" in said
    for said in outcome["said"][4:]:
        assert said.startswith("OSError: ")
        assert "ann/secret" in said
        assert "Invalid credentials" in said
    found, _ = published.clients.load("ann/secret", None, token=ANN)
    assert torch.equal(found["None"], published.logits[4])


@pytest.mark.versions
def test_integers_in_place_of_weights_are_refused_from_a_hub_too(published):
    published.clients.run(program("hub_integers"), elsewhere=False, token=ANN)
    attempts = [["ann/integers", {"trust_remote_code": True, **where}] for where in ({}, {"revision": "main"})]
    with_package = "import blockformer\n" + program("hub_attempts")  # what reads files strictly is not in a repo
    said = published.clients.run(with_package, elsewhere=False, attempts=attempts)["said"]
    assert said[::2] == ["accepted"] * 2  # the configs
    for text in said[1::2]:
        assert "ann/integers: integers in place of floating-point weights" in text
        assert "model.norm.weight is torch.int32" in text


@pytest.mark.versions
def test_a_revision_that_is_not_there_is_refused_by_name(published):
    gone = "0" * 40
    trust = {"trust_remote_code": True}
    attempts = [["ann/small", {**trust, "revision": name}] for name in ("v9", gone)]
    said = published.clients.run(program("hub_attempts"), attempts=attempts)["said"]
    for name, texts in (("v9", said[:2]), (gone, said[2:])):
        assert len(texts) == 2
        for text in texts:
            assert text.startswith("OSError: "), text
            assert f"{name} is not a valid git identifier" in text


@pytest.mark.versions
def test_nothing_of_a_hub_repo_is_fetched_or_run_without_trust(published):
    start = len(published.hub.requests)
    outcome = published.clients.run(
        program("hub_attempts"),
        attempts=[["ann/small", {"trust_remote_code": False}], ["ann/small", {}], ["ann/small", {"revision": "v1"}]],
    )
    assert len(outcome["said"]) == 6
    for said in outcome["said"]:
        assert said.startswith("ValueError: ")
        assert "trust_remote_code" in said
    assert outcome["remote"] == []
    assert not list(published.home.rglob("*.py"))
    asked = [path for _, path, _, _ in published.hub.requests[start:]]
    assert any("config.json" in path for path in asked)
    assert not any(path.endswith((".py", ".safetensors")) for path in asked)


PUSH_AND_SAY = r"""
import json
from hub_job import arguments, make, token
said = "pushed"
try:
    make(5).push_to_hub("ann/small", token=token, max_shard_size=arguments["shards"])
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def test_an_interrupted_push_leaves_the_old_revision(published):
    before = published.hub.repos["ann/small"].branches["main"]
    uploads = len(published.hub.objects)
    published.hub.die_at_commit = True
    said = published.clients.run(PUSH_AND_SAY, elsewhere=False, token=ANN, shards="5GB")
    assert said != "pushed"
    assert len(published.hub.objects) == uploads + 1, "the server dies after the upload"
    published.hub.restart()
    assert published.hub.repos["ann/small"].branches["main"] == before
    found, _ = published.clients.load("ann/small", None)
    assert torch.equal(found["None"], published.logits[2])


@pytest.mark.parametrize(("token", "message"), [(BOB, "403"), ("hf_wrong", "401")])
def test_who_may_not_write_changes_nothing(published, token, message):
    commits = dict(published.hub.repos["ann/small"].branches)
    said = published.clients.run(PUSH_AND_SAY, elsewhere=False, token=token, shards="5GB")
    assert said.startswith(("HfHubHTTPError: ", "RepositoryNotFoundError: "))
    assert message in said
    assert published.hub.repos["ann/small"].branches == commits


def test_of_two_pushes_at_once_one_is_refused(published):
    said = published.clients.run(program("hub_race"), elsewhere=False, token=ANN)
    assert "412" in said
    files = files_of(published, "ann/race", "main")
    assert "model.safetensors" not in files
    assert "model.safetensors.index.json" in files


AGAIN = r"""
import json, sys
from hub_job import token
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("ann/small", trust_remote_code=True, revision="v1")
model.push_to_hub("ann/again", token=token, private=True)
assert "blockformer" not in sys.modules
print(json.dumps(None))
"""


@pytest.mark.versions
def test_a_model_from_a_repo_is_published_anew_with_its_code(published):
    published.clients.run(AGAIN, token=ANN)
    assert published.hub.repos["ann/again"].private
    found, _ = published.clients.load("ann/again", None, token=ANN)
    assert torch.equal(found["None"], published.logits[1])
    old, new = files_of(published, "ann/small", "v1"), files_of(published, "ann/again", "main")
    for name in code_files(preset("qwen3", **PUBLISHED)):
        assert new[name].data == old[name].data


@pytest.mark.versions
def test_blocks_from_outside_arrive_and_load_elsewhere(published):
    published.clients.run(program("hub_blocks"), elsewhere=False, token=ANN, block=str(NORM))
    found, _ = published.clients.load("ann/blocks", None)
    assert torch.equal(found["None"], torch.load(published.folder / "blocks.pt"))
    for repo in ("ann/blocks", "ann/blocks-config"):
        files = files_of(published, repo, "main")
        assert files[NORM.name].data == NORM.read_bytes()
        assert {"blocks.py", "with_blocks.py", "modeling_decoder.py"} <= files.keys()


def test_saving_with_a_push_keeps_the_owners_card_and_sends_only_what_it_wrote(published):
    published.clients.run(program("hub_saved_twice"), elsewhere=False, token=ANN)
    files = files_of(published, "ann/kept", "main")
    card = files["README.md"].data.decode()
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert card.endswith("A line of the owner.\n")
    assert not [name for name in files if "private" in name]
    assert len(published.hub.repos["ann/kept"].commits) == 4


def test_conversion_takes_a_hub_id_and_leaves_its_code_there(published):
    start = len(published.hub.requests)
    said = published.clients.run(program("hub_convert"), elsewhere=False, token=ANN)
    assert_close(torch.load(published.folder / "official.pt", weights_only=True), published.logits[2])
    assert_close(torch.load(published.folder / "ours.pt", weights_only=True), published.logits[1])
    assert "ann/secret" in said
    assert "your access to it" in said
    assert not (published.folder / "nothing").exists()
    assert not [path for _, path, _, _ in published.hub.requests[start:] if path.endswith(".py")]


def check_fine_tuned(published, fresh, *ways):
    """What tools save of a commit, after which `main` has become another model, is that model by that code."""
    path, commit = published.folder / "tuned.pt", published.hub.repos["ann/small"].resolve("v1")
    adapters = published.clients.run(program("hub_fine_tuned"), ways=ways, commit=commit, save=str(path))
    assert list(adapters.values()) == [["ann/small", commit]]
    wanted = torch.load(path, weights_only=True)
    folder, again = published.folder / "tuned", published.folder / "again.pt"
    fresh(program("fine_tuned"), folder, json.dumps(list(wanted)), json.dumps(IDS), again, folder=published.folder)
    found = torch.load(again, weights_only=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    for name in wanted:
        for code, file in code_files(preset("qwen3", **PUBLISHED)).items():
            assert (folder / name / code).read_bytes() == file.read_bytes()
        for file in (folder / name).rglob("*.json"):
            assert "ann/" not in file.read_text(), f"{file} leads to the Hub"
    return wanted


@pytest.mark.versions
def test_what_is_fine_tuned_keeps_its_code_and_adapters_their_base(published, fresh):
    wanted = check_fine_tuned(published, fresh, "trainer", "peft", "sentence_transformers")
    assert wanted.keys() == {"trainer", "run/checkpoint-2", "merged", "sentences"}


def test_what_trl_saves_keeps_its_code_and_base(published, fresh):
    pytest.importorskip("trl")
    assert check_fine_tuned(published, fresh, "trl").keys() == {"trl"}
