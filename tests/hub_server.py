"""A small Hub of the tests' own, on loopback, in memory: what huggingface_hub and transformers ask of one for models.

Repos, commits, branches and tags; large files by LFS, in one piece or in parts, on a second port as on the Hub, where
they lie on another host; bytes of a range; private repos and tokens; the codes and headers of its refusals. Xet storage
it does not have: clients set `HF_HUB_DISABLE_XET`. Faults are switched on by attributes of the `Hub`.
"""

import base64
import hashlib
import json
import re
import secrets
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

API = r"/api/models/(?P<repo>[^/]+/[^/]+)"
ROUTES = [
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", rf"{API}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"{API}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"{API}/branch/(?P<name>[^/]+)", "branch"),
    ("POST", rf"{API}/tag/(?P<revision>[^/]+)", "tag"),
    ("GET", rf"{API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", "tree"),
    ("GET", rf"{API}/refs", "refs"),
    ("GET", rf"{API}(?:/revision/(?P<revision>[^/]+))?", "info"),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs_batch"),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)/lfs/(?P<act>complete|verify)", "lfs_finish"),
    ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]  # HEAD goes where GET goes
STORAGE = [
    ("PUT", r"/(?P<oid>[0-9a-f]{64})/(?P<part>\d+)", "store"),
    ("GET", r"/(?P<oid>[0-9a-f]{64})", "stored"),
]


class Refusal(Exception):
    """An answer of another status than 200, with the Hub's code and message in its headers."""

    def __init__(self, status, code="", message="", **headers):
        self.status, self.headers = status, headers
        self.headers |= {"X-Error-Code": code} if code else {}
        self.headers |= {"X-Error-Message": message} if message else {}


class Died(Exception):
    """The server goes away without an answer."""


@dataclass
class Blob:
    """A file of a commit: its bytes, and its SHA-256 where it is stored by LFS."""

    data: bytes
    lfs: str = ""

    @property
    def oid(self):
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data, usedforsecurity=False).hexdigest()

    @property
    def etag(self):
        return self.lfs or self.oid


@dataclass
class Repo:
    """Commits are whole trees: path -> `Blob`."""

    private: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def resolve(self, revision):
        """The commit of a branch, a tag or a commit's hash."""
        revision = self.branches.get(revision) or self.tags.get(revision) or revision
        if revision not in self.commits:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return revision

    def add(self, branch, tree):
        oid = secrets.token_hex(20)
        self.commits[oid] = tree
        self.branches[branch] = oid
        return oid


class Hub:
    """The server and all that it holds.

    Args:
        tokens: token -> its user, who may write the repos of that name and read the private ones.
        lfs_above: bytes from which a file is a large one; safetensors always are, as by the Hub's `.gitattributes`.
        part: bytes in one part of an upload; a large file of more comes in several.
    """

    def __init__(self, tokens, lfs_above=64_000, part=100_000):
        self.tokens, self.lfs_above, self.part = tokens, lfs_above, part
        self.repos = {}
        self.objects = {}  # SHA-256 -> bytes, whole
        self.parts = {}  # SHA-256 -> {number: bytes}
        self.requests = []  # (method, path, whether a token came along, Range)
        self.die_at_commit = False
        self.cut_once = set()  # SHA-256 of the files of which the first download ends in the middle
        self.lock = threading.RLock()
        self.start()

    def start(self, port=0):
        self.servers = [Server(self, ROUTES, port), Server(self, STORAGE, 0)]
        self.url = f"http://127.0.0.1:{self.servers[0].server_port}"
        # Another host by name, as on the Hub: clients keep their token to themselves there.
        self.storage = f"http://localhost:{self.servers[1].server_port}"

    def stop(self):
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def restart(self):
        """The same repos at the same address, after a server that died."""
        port = self.servers[0].server_port
        with suppress(OSError):
            self.stop()
        self.die_at_commit = False
        self.start(port)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, hub, routes, port):
        super().__init__(("127.0.0.1", port), Handler)
        self.hub = hub
        self.routes = [(method, re.compile(pattern), name) for method, pattern, name in routes]
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, request, client_address):
        """A client that hangs up is no error of the server; a test sees what it lacks."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def answer(self):
        url = urlsplit(self.path)
        self.hub, self.query = self.server.hub, parse_qs(url.query)
        self.body = self.read_body()
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        self.hub.requests.append((self.command, url.path, bool(self.token), self.headers.get("Range", "")))
        try:
            with self.hub.lock:
                if self.token and self.token not in self.hub.tokens:
                    raise Refusal(401, message="Invalid credentials in Authorization header")
                status, headers, content = self.called(url.path)
        except Refusal as refusal:
            message = refusal.headers.get("X-Error-Message", "")
            status, headers, content = refusal.status, refusal.headers, json.dumps({"error": message}).encode()
        except Died:
            self.close_connection = True
            return
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", headers.get("Content-Length") or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def called(self, path):
        """What the method of this path answers."""
        for method, pattern, name in self.server.routes:
            match = pattern.fullmatch(path)
            if match and method == self.command.replace("HEAD", "GET"):
                return getattr(self, name)(**{key: unquote(text) for key, text in match.groupdict().items() if text})
        raise Refusal(404, message=f"no such place: {self.command} {path}")

    def read_body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    @staticmethod
    def reply(value):
        return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()

    def repo_of(self, name, write=False):
        """A repo that the caller may see. Without a token a private one looks like one that is not there."""
        repo, user = self.hub.repos.get(name), self.hub.tokens.get(self.token)
        if repo is None or (repo.private and user != name.partition("/")[0]):
            raise Refusal(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if write and user is None:
            raise Refusal(401, message="Invalid username or password.")
        if write and user != name.partition("/")[0]:
            raise Refusal(403, message="You do not have the rights to write here")
        return repo

    # The repo

    def create(self):
        wanted, user = json.loads(self.body), self.hub.tokens.get(self.token)
        if user is None:
            raise Refusal(401, message="Invalid username or password.")
        owner = wanted.get("organization") or user
        if owner != user:
            raise Refusal(403, message="You do not have the rights to create a repo here")
        name = f"{owner}/{wanted['name']}"
        here = json.dumps({"url": f"{self.hub.url}/{name}"}).encode()
        if name in self.hub.repos:
            return 409, {"X-Error-Message": "You already created this model repo"}, here
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repos[name] = repo = Repo(private)
        repo.add("main", {".gitattributes": Blob(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")})
        return 200, {}, here

    def validate(self):
        """The Hub parses the card's YAML; here its fences and their `key: value` lines must be there."""
        content = json.loads(self.body)["content"]
        head = re.match(r"---\n(.*?)\n---\n", content, re.S)
        good = head and all(re.match(r"\w+:|- |#|\s|$", line) for line in head[1].splitlines())
        return self.reply({"errors": [] if good else [{"message": "not YAML"}], "warnings": []})

    def whoami(self):
        if not self.token:
            raise Refusal(401, message="Invalid username or password.")
        return self.reply({"type": "user", "name": self.hub.tokens[self.token], "orgs": []})

    def info(self, repo, revision="main"):
        found = self.repo_of(repo)
        sha = found.resolve(revision)
        files = [{"rfilename": path} for path in sorted(found.commits[sha])]
        about = {"id": repo, "modelId": repo, "sha": sha, "private": found.private, "siblings": files, "tags": []}
        return self.reply(about)

    def refs(self, repo):
        found = self.repo_of(repo)
        kinds = {"branches": ("heads", found.branches), "tags": ("tags", found.tags), "converts": ("convert", {})}
        return self.reply(
            {
                key: [{"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": sha} for name, sha in refs.items()]
                for key, (kind, refs) in kinds.items()
            }
        )

    def branch(self, repo, name):
        found = self.repo_of(repo, write=True)
        if name in found.branches:
            raise Refusal(409, message="Reference already exists")
        found.branches[name] = found.resolve((json.loads(self.body or b"{}")).get("startingPoint") or "main")
        return self.reply({})

    def tag(self, repo, revision):
        found = self.repo_of(repo, write=True)
        found.tags[json.loads(self.body)["tag"]] = found.resolve(revision)
        return self.reply({})

    def tree(self, repo, revision, folder=""):
        found = self.repo_of(repo)
        entries = []
        for path, blob in sorted(found.commits[found.resolve(revision)].items()):
            if folder and not path.startswith(f"{folder}/"):
                continue
            entry = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.oid}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.lfs, "size": len(blob.data), "pointerSize": 130}
            entries.append(entry)
        if folder and not entries:
            raise Refusal(404, "EntryNotFound", f"{folder} does not exist")
        return self.reply(entries)

    # Uploads

    def preupload(self, repo, revision):
        found = self.repo_of(repo, write=True)
        tree = found.commits[found.resolve(revision)]
        files = []
        for file in json.loads(self.body)["files"]:
            large = file["size"] >= self.hub.lfs_above or file["path"].endswith(".safetensors")
            old = tree.get(file["path"])
            mode = {"uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            files.append({"path": file["path"], **mode, "oid": old.etag if old else None})
        return self.reply({"files": files, "commitOid": found.resolve(revision)})

    def lfs_batch(self, repo):
        self.repo_of(repo, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            if oid not in self.hub.objects:
                here = f"{self.hub.url}/{repo}/lfs"
                number = -(-size // self.hub.part)
                urls = [f"{self.hub.storage}/{oid}/{part}" for part in range(1, number + 1)]
                upload = {"href": urls[0]}
                if number > 1:
                    header = {str(part): url for part, url in enumerate(urls, 1)}
                    header["chunk_size"] = str(self.hub.part)
                    upload = {"href": f"{here}/complete?parts={number}", "header": header}
                wanted["actions"] = {"upload": upload, "verify": {"href": f"{here}/verify"}}
            objects.append(wanted)
        return self.reply({"transfer": "basic", "objects": objects})

    def store(self, oid, part):
        self.hub.parts.setdefault(oid, {})[int(part)] = self.body
        return 200, {"ETag": f'"{hashlib.md5(self.body, usedforsecurity=False).hexdigest()}"'}, b""

    def lfs_finish(self, repo, act):
        """`complete` after several parts, `verify` after every upload: then the parts become one file."""
        wanted = json.loads(self.body)
        oid, parts = wanted["oid"], self.hub.parts.get(wanted["oid"], {})
        if act == "complete":
            for part in wanted["parts"]:
                digest = hashlib.md5(parts[part["partNumber"]], usedforsecurity=False).hexdigest()
                if part["etag"].strip('"') != digest:
                    raise Refusal(400, message="a part's etag is wrong")
            return self.reply({})
        self.repo_of(repo, write=True)
        data = b"".join(parts[number] for number in sorted(parts))
        if hashlib.sha256(data).hexdigest() != oid or len(data) != wanted["size"]:
            raise Refusal(400, message="the uploaded object is not what it is called")
        self.hub.objects[oid] = data
        return self.reply({})

    def commit(self, repo, revision):
        if self.hub.die_at_commit:
            threading.Thread(target=self.hub.stop, daemon=True).start()
            raise Died
        found = self.repo_of(repo, write=True)
        if revision not in found.branches:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        tree = dict(found.commits[found.branches[revision]])
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                if value.get("parentCommit", found.branches[revision]) != found.branches[revision]:
                    raise Refusal(412, message="A commit has happened since. Please refresh and try again.")
            elif entry["key"] == "file":
                tree[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise Refusal(400, message=f"{value['path']}: its LFS object was not uploaded")
                tree[value["path"]] = Blob(self.hub.objects[value["oid"]], lfs=value["oid"])
            elif entry["key"] == "deletedFile":
                if value["path"] not in tree:
                    raise Refusal(404, "EntryNotFound", "A file with this name doesn't exist")
                del tree[value["path"]]
            else:
                raise Refusal(400, message=f"unknown: {entry['key']}")
        oid = found.add(revision, tree)
        return self.reply({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"})

    # Downloads

    def resolve(self, repo, revision, path):
        found = self.repo_of(repo)
        sha = found.resolve(revision)
        blob = found.commits[sha].get(path)
        if blob is None:
            raise Refusal(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"', "Accept-Ranges": "bytes"}
        if not blob.lfs:
            return self.piece(blob.data, headers)
        headers |= {"X-Linked-Etag": f'"{blob.lfs}"', "X-Linked-Size": str(len(blob.data))}
        return 302, {**headers, "Location": f"{self.hub.storage}/{blob.lfs}"}, b""

    def stored(self, oid):
        if oid not in self.hub.objects:
            raise Refusal(404)
        status, headers, content = self.piece(self.hub.objects[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})
        if oid in self.hub.cut_once:
            self.hub.cut_once.remove(oid)
            headers["Content-Length"] = str(len(content))
            content = content[: len(content) // 2]
            self.close_connection = True
        return status, headers, content

    def piece(self, data, headers):
        """All bytes or, with a Range, those from one on."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return 200, headers, data
        start, end = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        return 206, headers, data[start : end + 1]
