"""What is taken of a machine that no cluster describes."""

FLOPS_PER_BYTE = 2200  # computed while a byte is sent: an H100's 989 TFLOP/s in bf16 against NVLink's 450 GB/s each way
