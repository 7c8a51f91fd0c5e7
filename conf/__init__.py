"""Named choices of options: `train.yaml` and one folder a group. Defaults: `compiler_trainer/config/schema.py`."""
