"""The Triton operations, one file each, beside the torch twin that serves CPU tensors and checks the kernel."""
