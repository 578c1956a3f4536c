"""A W&B server small enough to read: it takes runs over HTTP the way the real one does, and remembers them."""

import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENTITY = "me"


class Server(ThreadingHTTPServer):
    """Quiet when a client closes its connection without a word, as W&B's does at its end."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class WandbServer:
    """Serves on 127.0.0.1 while the `with` block lasts.

    `runs` maps a run's id to {"name", "group", "project", "job_type", "tags", "config", "history", "summary", "alerts",
    "exit_code"}.
    A run that starts with the id of an earlier one takes its place. `views` are saved workspaces by name.
    """

    def __enter__(self):
        self.runs: dict[str, dict] = {}
        self.views: dict[str, dict] = {}
        self.unknown: list[str] = []
        self._server = Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to send runs here."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": "0123456789" * 4}

    def graphql(self, query: str, variables: dict) -> dict:
        """The answer to a GraphQL request. Unknown ones must be errors: the client takes an empty answer for data."""
        operation = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = operation.group(1) if operation else "?"
        project = {"id": "p", "name": variables.get("project", "p"), "entity": {"id": "e", "name": ENTITY}}
        if name in ("Viewer", "GetDefaultEntity"):
            return {"viewer": {"id": "u", "username": ENTITY, "entity": ENTITY, "flags": "{}", "teams": {"edges": []}}}
        if name == "UpsertBucket":
            run_id = variables.get("name") or variables.get("id")
            if variables.get("displayName") or run_id not in self.runs:  # later ones only bring configuration
                empty = {"history": {}, "summary": {}, "config": {}, "exit_code": None, "alerts": []}
                self.runs[run_id] = empty | {"project": variables.get("project")}
            run = self.runs[run_id]
            for field, key in (
                ("name", "displayName"),
                ("group", "groupName"),
                ("job_type", "jobType"),
                ("tags", "tags"),
            ):
                if variables.get(key):
                    run[field] = variables[key]
            if variables.get("config"):
                run["config"] = {key: v["value"] for key, v in json.loads(variables["config"]).items() if "value" in v}
            bucket = {"id": run_id, "name": run_id, "displayName": run.get("name"), "historyLineCount": 0}
            bucket |= {"description": None, "config": "{}", "sweepName": None, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if name == "RunResumeStatus":
            return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": ENTITY}, "bucket": None}}
        if name == "CreateRunFiles":
            files = [{"name": f, "uploadUrl": f"{self.url}/storage/{f}"} for f in variables.get("files", [])]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if name == "NotifyScriptableRunAlert":
            self.runs[variables["runName"]]["alerts"].append(f"{variables['title']}: {variables['text']}")
            return {"notifyScriptableRunAlert": {"success": True}}
        if name == "UpsertView2":
            view = self.views.setdefault(variables["name"], {"id": f"view{len(self.views)}"})
            view |= {"displayName": variables["displayName"], "spec": variables["spec"]}
            return {"upsertView": {"view": {"id": view["id"], "name": variables["name"]}, "inserted": True}}
        if name == "View":
            found = self.views.get(variables["viewName"])
            return {"project": {"allViews": {"edges": [{"node": found}] if found else []}}}
        if name == "RunStoppedStatus":
            return {"project": {"run": {"stopped": False}}}
        self.unknown.append(name)
        raise LookupError(name)

    def stream(self, run_id: str, sent: dict) -> None:
        """Takes what a running run sends: numbered lines of history, its summary, its end."""
        run = self.runs[run_id]
        for file, part in (sent.get("files") or {}).items():
            for offset, line in enumerate(part.get("content") or []):
                if file == "wandb-history.jsonl":
                    run["history"][part["offset"] + offset] = json.loads(line)
                elif file == "wandb-summary.json":
                    run["summary"].update(json.loads(line))
        if sent.get("complete"):
            run["exit_code"] = sent.get("exitcode")

    def _handler(self):
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, content: dict) -> None:
                body = json.dumps(content).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/graphql":
                    request = json.loads(body)
                    try:
                        self.answer({"data": server.graphql(request["query"], request.get("variables") or {})})
                    except LookupError as error:
                        self.answer({"errors": [{"message": f"unknown operation {error}"}]})
                    return
                if self.path.endswith("/file_stream"):
                    server.stream(self.path.split("/")[4], json.loads(body))
                self.answer({})

            do_PUT = do_POST

            def do_GET(self):
                self.answer({})

            def log_message(self, *_):
                pass

        return Handler
