"""A process that has imported PyTorch and forks to judge each tree: `python tools/faults/warm.py`.

Reads lines of JSON, {"folder": ..., "models": [...], "limit": seconds}, and answers each with the line of JSON from
`tools/faults/judge.py` of that folder. It must not have imported the passes itself.
"""

import json
import os
import signal
import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx


def warm_up() -> None:
    """Trigger PyTorch's lazy imports."""
    with torch.no_grad():
        torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    make_fx(lambda x: torch.autograd.grad((x * x).sum(), x), tracing_mode="fake")(torch.ones(2, requires_grad=True))


def answer(folder: str, models: list[str], limit: int) -> None:
    """Judge a tree in this process."""
    signal.alarm(limit)  # ends the process
    os.chdir(folder)
    sys.path[0] = folder
    from tools.faults.judge import judge

    print(json.dumps(judge(models)), flush=True)


if __name__ == "__main__":
    warm_up()
    for line in sys.stdin:
        if not os.fork():
            answer(**json.loads(line))
            os._exit(0)
        _, status = os.wait()
        if status:
            verdict = "fails: takes too long" if os.WTERMSIG(status) == signal.SIGALRM else "fails: cannot be imported"
            print(json.dumps(dict.fromkeys(("spec", "numeric", "value"), verdict)), flush=True)
