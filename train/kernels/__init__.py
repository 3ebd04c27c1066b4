"""Fused kernels of the trainer, laid out as those of the decoder (`headsmith.inference.kernels`):
`NAME.py` holds the function and its plain PyTorch reference, `NAME_triton.py` the kernel.
"""
