"""A stand-in for a server of answers: the parts of vLLM's and SGLang's HTTP interface that training uses.

It draws with transformers' model and the project's own sampling, and is as strict as the servers are about the paths and
fields of their interfaces.
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

from compiler_trainer.config.files import ends_of_answers
from compiler_trainer.models.sampling import Sampling, group

FIELDS = {"prompt", "max_tokens", "temperature", "seed", "stop_token_ids", "n", "logprobs", "return_token_ids", "top_p", "top_k", "min_p", "repetition_penalty"}


class Listener(ThreadingHTTPServer):
    request_queue_size = 512  # connections that wait, of which a client opens many at once


class StandIn:
    """A server of an engine, vllm or sglang, with the model of a folder; `url` is its address.

    `loaded` counts updates of its weights, and `seeds` has those of all requests. `change` may replace a reply, (path,
    reply) -> (status, reply).
    """

    def __init__(self, engine, folder, change=lambda path, reply: (200, reply)):
        self.engine, self.folder, self.change = engine, Path(folder), change
        self.model, self.ends = read(folder), set(ends_of_answers(Path(folder)))
        self.loaded, self.cached, self.seeds, self.lock = 0, False, [], threading.Lock()
        self.http = Listener(("127.0.0.1", 0), handler_of(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def reply(self, path, body):
        """Return the reply to a request, None if the engine has no such path."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "digits", "owned_by": self.engine, "root": str(self.folder)}]}
        if path == "/v1/completions":
            return self.complete(body)
        if path == "/update_weights_from_disk" and self.engine == "sglang":
            self.load(body["model_path"])
            return {"success": True, "message": "Succeeded to update model weights."}
        if path == "/collective_rpc" and self.engine == "vllm":
            assert body["method"] == "reload_weights"
            self.load(body["kwargs"]["weights_path"])
            self.cached = True
            return {"results": [None]}
        if path == "/reset_prefix_cache" and self.engine == "vllm":
            self.cached = False
            return {}
        return None

    def load(self, folder):
        self.model.load_state_dict(read(folder).state_dict())  # of the same model, or an error
        self.loaded += 1

    def complete(self, body):
        """Return one answer, with its ids and log-probabilities as both engines name them."""
        assert body.keys() == FIELDS and body["n"] == 1 and body["return_token_ids"]
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1, -1, 0, 1)
        assert not self.cached, "keys and values of earlier weights"
        self.seeds.append(body["seed"])
        sampling = Sampling(body["max_tokens"], body["temperature"], seed=body["seed"])
        (answer,) = group(self.model, body["prompt"], self.ends | set(body["stop_token_ids"]), sampling, 1)
        logs = {"token_logprobs": answer.logs.tolist(), "tokens": ["?"] * len(answer.ids)}
        choice = {"index": 0, "text": "?", "token_ids": answer.ids, "logprobs": logs, "finish_reason": "stop" if answer.ended else "length"}
        return {"object": "text_completion", "choices": [choice]}


def read(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def handler_of(server):
    """Return the class of handlers of requests to a server, one at a time."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(None)

        def do_POST(self):
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body):
            path = urlsplit(self.path).path
            with server.lock:
                try:
                    reply = server.reply(path, body)
                    status, reply = (404, {"detail": "Not Found"}) if reply is None else server.change(path, reply)
                except Exception as error:  # as FastAPI does
                    status, reply = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
            content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    return Handler


@contextmanager
def answering(engine, folder, **options):
    """Yield a server that answers until the end of the block."""
    server = StandIn(engine, folder, **options)
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
