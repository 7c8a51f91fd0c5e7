"""A server that draws answers with the weights of a folder: vLLM or SGLang, through their HTTP interface.

Both have OpenAI's `/v1/completions` with token ids as the prompt, and one more field, `return_token_ids`: the reply has
an answer's ids as numbers, next to the log-probabilities that `logprobs` asks for. No text is tokenized. Sources:
vllm/entrypoints/openai/completion/protocol.py in github.com/vllm-project/vllm, and
python/sglang/srt/entrypoints/openai/protocol.py in github.com/sgl-project/sglang.

    weights   vLLM    POST /collective_rpc, method reload_weights, and /reset_prefix_cache: docs/features/sleep_mode.md
                      and `reload_weights` of vllm/v1/worker/gpu_model_runner.py; need VLLM_SERVER_DEV_MODE=1
              SGLang  POST /update_weights_from_disk: docs/advanced_features/sglang_for_rl.md

Each answer is a request with its own seed, because SGLang gives all answers to one request the same seed. A request
that fails for a reason that may pass is repeated after each of `WAITS_S`; a reply may take `PATIENCE_S`.
"""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import numpy as np

from compiler_trainer.config.errors import UserError
from compiler_trainer.data.chat import Prompt
from compiler_trainer.models.sampling import Drawn, Sampling

OPTION = "loss.server"
PATIENCE_S = 1800.0  # for a reply: the longest answer, with all other answers before it
WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before a request is repeated
TRANSIENT = (429, 502, 503, 504)  # HTTP status: too many requests, or a proxy whose server is starting
AT_ONCE = 256  # requests; the server batches them
SHOWN = 300  # characters of a server's message
PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}  # whatever generation_config.json says
DEVELOPMENT = "start vLLM with VLLM_SERVER_DEV_MODE=1, which its endpoints for weights need"


@dataclass(frozen=True)
class Server:
    """A server at `url`, without a slash at its end; its `engine` is vllm or sglang."""

    url: str
    engine: str

    def load(self, folder: Path) -> None:
        """Make the server draw with the weights of a folder that it sees; raise UserError if it cannot load them."""
        try:
            if self.engine == "sglang":
                reply = ask(self.url, "/update_weights_from_disk", {"model_path": str(folder)})
                if not isinstance(reply, dict) or not reply.get("success"):
                    raise Refused(200, shortened(json.dumps(reply)))
                return
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            ask(self.url, "/collective_rpc", body)
            ask(self.url, "/reset_prefix_cache?reset_running_requests=true", {})  # keys and values of earlier weights
        except Refused as refusal:
            fix = "it needs the model of model.path, and must see this folder under the same name"
            fix = DEVELOPMENT if self.engine == "vllm" and refusal.status == 404 else fix
            problem = f"{self.url} has not loaded the weights in {folder} ({refusal})"
            raise UserError(OPTION, f"{problem}; {fix}") from refusal

    def draw(self, prompts: Sequence[Prompt], samplings: Sequence[Sampling]) -> list[Drawn]:
        """Return an answer to each prompt, in order; raise UserError if one fails."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return list(threads.map(self.answer, prompts, samplings))

    def answer(self, prompt: Prompt, sampling: Sampling) -> Drawn:
        """Return an answer to a prompt; raise UserError if the server gives none with ids and log-probabilities.

        Its entropy is estimated as minus the mean log-probability of its tokens, which the server drew.
        """
        body = {
            "prompt": prompt.ids,
            "max_tokens": sampling.tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "stop_token_ids": sorted(prompt.ends),
            "n": 1,
            "logprobs": 1,
            "return_token_ids": True,
            **PLAIN,
        }
        try:
            reply = ask(self.url, "/v1/completions", body)
        except Refused as refusal:
            problem = f"{self.url} refuses a prompt of {len(prompt.ids):,} tokens ({refusal})"
            raise UserError(OPTION, f"{problem}; start it with a context of train.seq_len tokens or more") from refusal
        return drawn_of(self.url, reply, prompt)


def connect(address: str) -> Server:
    """Return the server at an address; raise UserError unless it is vLLM or SGLang."""
    url = address.rstrip("/")
    try:
        reply = ask(url, "/v1/models")
        engine = reply["data"][0]["owned_by"]
    except (Refused, KeyError, IndexError, TypeError) as error:
        problem = f"{url}/v1/models names no model ({shortened(str(error))})"
        raise UserError(OPTION, f"{problem}; start vLLM or SGLang there") from error
    if engine not in ("vllm", "sglang"):
        raise UserError(OPTION, f"{url} is a server of {engine}, whose weights cannot be updated; use vLLM or SGLang")
    return Server(url, engine)


def drawn_of(url: str, reply: Any, prompt: Prompt) -> Drawn:
    """Return the answer in a reply of `/v1/completions`; raise UserError if it has none with token ids."""
    try:
        (choice,) = reply["choices"]
        ids, logs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        is_whole = len(ids) == len(logs) > 0 and all(map(is_id, ids)) and all(map(is_finite, logs))
    except (KeyError, TypeError, ValueError):
        is_whole = False
    if not is_whole:
        problem = f"{url} gives no answer with token ids and a log-probability of each: {shortened(json.dumps(reply))}"
        raise UserError(OPTION, f"{problem}; use a version of vLLM or SGLang that knows return_token_ids")
    ended = ids[-1] in prompt.ends
    if reason not in ("stop", "length") or reason == "stop" and not ended:
        problem = f"{url} ends an answer with token {ids[-1]} for the reason {reason!r}, and the model's ends are"
        raise UserError(OPTION, f"{problem} {sorted(prompt.ends)}; start it with the folder of model.path")
    return Drawn(ids, np.array(logs, np.float32), -float(np.mean(logs)), ended)


def is_id(value: object) -> bool:
    """Return True for a number of a token."""
    return isinstance(value, int) and value >= 0


def is_finite(value: object) -> bool:
    """Return True for a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


# ---- requests ------------------------------------------------------------------------------------------


class Refused(Exception):
    """A reply with an HTTP status that says why a request failed for good."""

    def __init__(self, status: int, message: str):
        super().__init__(f"HTTP {status}: {message}" if message else f"HTTP {status}")
        self.status = status


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON that a server replies to a GET, or to a POST of `body`; None without content.

    Raises Refused if it replies with an error, and UserError if it does not reply in time.
    """
    for wait_s in (*WAITS_S, None):
        try:
            return reply_of(url, path, body)
        except HTTPError as error:
            if error.code not in TRANSIENT or wait_s is None:
                raise Refused(error.code, message_of(error.read())) from error
        except (URLError, ConnectionError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError) or wait_s is None:
                raise UserError(OPTION, f"{url} does not answer ({reason}); start vLLM or SGLang there") from error
        except TimeoutError as error:
            problem = f"{url}{path} has not replied after {PATIENCE_S:,.0f} s"
            raise UserError(OPTION, f"{problem}; look at the server's log") from error
        time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def reply_of(url: str, path: str, body: dict[str, Any] | None) -> Any:
    """Return the JSON of one reply; None without content."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        content = response.read()
    try:
        return json.loads(content) if content.strip() else None
    except ValueError as error:
        raise Refused(response.status, f"no JSON: {message_of(content)}") from error


def message_of(content: bytes) -> str:
    """Return the message of an error, in the forms that OpenAI's interface, FastAPI and SGLang give it."""
    text = content.decode("utf-8", "replace")
    try:
        reply = json.loads(text)
    except ValueError:
        return shortened(text)
    for key in ("error", "detail", "message"):
        if isinstance(reply, dict) and key in reply:
            reply = reply[key]
    return shortened(reply if isinstance(reply, str) else json.dumps(reply))


def shortened(text: str) -> str:
    """Return the beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
