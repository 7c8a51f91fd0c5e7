"""What is taken of a machine that no cluster describes."""

FLOPS_PER_SENT_BYTE = 2200  # an H100's 989 TFLOP/s in bf16 against NVLink's 450 GB/s each way
