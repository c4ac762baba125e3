"""The NCCL backend, on nccl4py and the CUDA driver."""
