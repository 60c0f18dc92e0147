"""What XLA's compilers for TPUs and GPUs say of a run, on a machine without either."""
