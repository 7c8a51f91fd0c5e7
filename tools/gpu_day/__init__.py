"""A short session on a rented GPU in one command: what works, how fast it is next to stock PyTorch and predictions.

    python -m tools.gpu_day --out day --minutes 7             # on the machine with the GPU, offline
    python -m tools.gpu_day --out day --minutes 3 --again day/gpu_day.json   # what failed or was not reached
    python -m tools.gpu_day --results day/gpu_day.json --write docs/measured/gpu.md    # the page, on any machine
    python -m tools.gpu_day --out day --device cpu            # a rehearsal with small models
    python -m tools.gpu_day --out day --device none           # compile and predict all jobs for an H100, run nothing

Parts are commands of this project, most valuable first. The first ones check values and run side by side; the others
measure and run alone. Each result is in `gpu_day.json` as soon as its part ends or its time is up, and a part that
fails does not stop the next.
"""
